"""A plan at work: staged, made again on each worker, and carried out by PTransforms that call what lies below. The only
folder of `transforms` that imports Beam.
"""
