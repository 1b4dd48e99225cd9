"""What is held against what: a checkpoint against its source, an export against its checkpoint, any two checkpoints; for
`verify`, `diff` and watchers. It may import running and terminal.
"""
