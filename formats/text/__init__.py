"""Text that nobody vouches for: JSON as it is edited, what may be printed, what installs the package. Imports nothing else of
`formats`.
"""
