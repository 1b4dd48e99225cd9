"""Whether values are right: digests of what was read, differences, non-finite values, the second opinion of `verify`.
Imports `execution` and `cutting`.
"""
