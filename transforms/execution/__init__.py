"""What a unit does with bytes, as functions without Beam: read, decode, arrange, copy and cast, in memory of its own.
Imports `cutting`.
"""
