"""From a plan to its bytes; the folders say what lies where, each may import those on its right:
stages, planning, comparing, execution, cutting.
"""
