"""How arrays and tensors are cut: mesh, chunk grid, blocks, units, rows, files, what loading then costs. Integers, and
descriptions of what a unit does; no byte is read here. Imports nothing else of `transforms`.
"""
