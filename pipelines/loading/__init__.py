"""Weights where a program wants them: `open` reads any box of any array as numpy, `load` puts whole trees onto a JAX mesh.

    indexing.py    a numpy index as a box
    sources.py     a release or an Orbax checkpoint, as arrays of which any box can be made
    tree.py        `open`: these arrays as a lazy tree
    schedule.py    who reads what in which step: boxes and integers, without JAX
    abstract.py    which arrays a program asks for, and the tree that they become
    mesh.py        JAX: shardings, and the programs that exchange and place
    agreement.py   several processes: an error of one is an error of all
    load.py        `load`: the steps, one after the other, reading ahead
    maxtext.py     MaxText's loader, replaced by this one
    report.py      what `plan --load` prints

JAX is imported inside functions only: `open` doesn't need it.
"""
