"""Virtual checkpoints: what stock Orbax restores of them is what the ordinary conversion writes, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import assert_same_bits, call, convert, digest, given, given_arrays, restore

LAYOUTS = {"scanned": (), "unscanned": ("--scan_layers", "false")}
OPTIONS = {"llama3.1": ("--maxtext_model", "llama3.1-8b"), "llama3.1-fp32": ("--maxtext_model", "llama3.1-8b")}
