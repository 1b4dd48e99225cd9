"""What lies where, and how it is read and written; the folders say what of it, each may import those on its right:
targets, release, adapters, orbax, encodings and record, staging, safetensors, storage, text and heaps.
"""
