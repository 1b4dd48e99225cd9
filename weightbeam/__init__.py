"""Weightbeam moves model weights between Hugging Face releases and MaxText/JAX.

The folders of the repository's top level are this package's subpackages: `model_mappings`, `formats`, `transforms` and
`pipelines` are links to them here, and plain folders where the package is installed.
"""

__version__ = "0.1.0"
