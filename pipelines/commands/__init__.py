"""The commands: a module each, with a function, a value, and what runs it at the terminal. Imports `loading`, `running`,
`terminal`.
"""
