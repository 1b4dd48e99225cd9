"""What Beam's `--setup_file` names when it packs the package for workers. All that it says stands in pyproject.toml."""

from setuptools import setup

setup()
