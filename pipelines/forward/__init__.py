"""Models run forward on this machine's CPU: transformers' own layers, with one layer of weights in memory at a time.

    sides.py       whose weights: a release, a release with an adapter in it, an Orbax checkpoint read back through its table
    streamed.py    torch and transformers: the model without its weights, which come and go with each layer
    tokens.py      transformers: a prompt as token ids
    maxtext.py     MaxText in another interpreter, which runs
    in_maxtext.py  a program of its own, likewise with one layer of weights in memory at a time
    report.py      what is told of logits

torch and transformers are imported inside functions only, and in these modules alone: the extra `models` has them.
"""
