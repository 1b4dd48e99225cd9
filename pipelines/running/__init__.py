"""Carrying a transfer out: what its place must be, the graph, the engines, publication. Whoever has a `Transfer` calls
`carry.carry`; no command is known here. Imports `terminal`.
"""
