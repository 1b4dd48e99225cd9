"""Weights where a program wants them: `open` reads any box of any array as numpy, `load` puts whole trees onto a JAX
mesh.

    source.py      what arrays come from
    release.py     a release, as MaxText's arrays or as it is
    coded.py       a release whose FP8 is left to the devices: codes and scales
    checkpoint.py  an Orbax checkpoint, ours or anyone's
    scaled.py      one of FP8 codes and scales, by its values
    opening.py     what a user names, opened as one of them

    indexing.py    a numpy index as a box
    tree.py        `open`: arrays as a lazy tree

    schedule.py    who reads what in which step: boxes and integers, without JAX
    exchange.py    how slices travel between devices: integers, too
    abstract.py    which arrays a program asks for, and the tree that they become
    mesh.py        JAX: meshes, and how arrays lie on their devices
    decoding.py    JAX: the programs that make values of codes and scales
    placing.py     JAX: the programs that exchange slices and put blocks into their places
    scratch.py     buffers that are used again
    meeting.py     several processes: all are there and mean the same, before anything is exchanged
    agreement.py   several processes: an error of one is an error of all
    load.py        `load`: the steps, one after the other, reading ahead

    maxtext.py     MaxText's loader, replaced by this one
    report.py      what `plan --load` prints

JAX is imported inside functions only: `open` doesn't need it.
"""
