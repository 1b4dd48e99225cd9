"""What a person types and sees, at a terminal, in a notebook, in Python: options, keywords, messages, tables, progress.
Imports no other folder of `pipelines`.
"""
