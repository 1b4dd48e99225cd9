"""Benchmarks, each a module and a process of its own (`__main__`), and what they share: checkpoints (`models`), commands
and the machine (`measure`), copies to compare with (`copies`), results (`figures`, `picture`).
"""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
sys.path.append(str(TESTS))  # whose servers, clusters and shapes of models are measured with
