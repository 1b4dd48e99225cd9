"""What a person or a program calls: `api`, `cli`, `entry`; the folders say what lies where, each may import those on its right:
watching, commands, checking, forward, loading, running, terminal.
"""
