"""Values of options: from their text, or with an error that says what it should be."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable

from weightbeam.model_mappings import cut

BOOLEANS = {"true": True, "false": False}  # as MaxText writes them
OTHER_BOOLEANS = {"1": True, "yes": True, "0": False, "no": False}  # behind a `=`: by itself it may be a folder's name
DTYPES = {  # what vLLM, MLX and llama.cpp call them, too
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
}


def boolean(text: str) -> bool:
    """`true` or `false`; also `1`, `0`, `yes`, `no`."""
    values = BOOLEANS | OTHER_BOOLEANS
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"{text!r} should be true or false")
    return values[text.lower()]


def dtype_name(text: str) -> str:
    """The name of a dtype, also by its short name: `bf16` is `bfloat16`. Other words stay as they are."""
    return DTYPES.get(text.lower(), text)


MAX_INTEGER = 2**31 - 1


def natural(text: str) -> int:
    """An integer from 0 on."""
    return _integer(text, 0)


def positive(text: str) -> int:
    """An integer from 1 on."""
    return _integer(text, 1)


def _integer(text: str, first: int) -> int:
    if not text.isascii() or not text.isdigit() or not first <= int(text) <= MAX_INTEGER:
        raise argparse.ArgumentTypeError(f"{text!r} should be an integer from {first} to {MAX_INTEGER}")
    return int(text)


def counts(text: str) -> tuple[int, ...]:
    """Integers from 1 on, with commas between them."""
    return tuple(positive(number.strip()) for number in text.split(","))


def ranges(text: str) -> str:
    """Ranges of numbers, `0:4` or `0:2,58:61`, each as it is spelled at its shortest."""
    try:
        return cut.spelled(cut.spans(text))
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from e


def naturals(text: str) -> tuple[int, ...]:
    """Integers from 0 on, with commas between them."""
    return tuple(natural(number.strip()) for number in text.split(","))


def amount(text: str) -> float:
    """A number above 0."""
    return _number(text, lambda number: 0 < number < math.inf, "above 0")


def distance(text: str) -> float:
    """A number from 0 on."""
    return _number(text, lambda number: 0 <= number < math.inf, "from 0 on")


def fraction(text: str) -> float:
    """A number above 0, up to 1."""
    return _number(text, lambda number: 0 < number <= 1, "above 0 and up to 1")


def _number(text: str, fits: Callable[[float], bool], which: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not fits(number):
        raise argparse.ArgumentTypeError(f"{text!r} should be a number {which}")
    return number


def secret(text: str) -> str:
    """A version of a secret, as Secret Manager names it. What isn't one may be a token, and isn't repeated."""
    if not re.fullmatch(r"projects/[^/\s]+/secrets/[^/\s]+/versions/[^/\s]+", text):
        raise argparse.ArgumentTypeError(
            "… should be the name of a secret, projects/PROJECT/secrets/SECRET/versions/latest, and no token"
        )
    return text


def size(text: str) -> int:
    """Bytes: a number, or one with K, M, G or T (or KiB, …: of 1024) or with KB, MB, GB or TB (of 1000), in letters of
    either case.
    """
    found = re.fullmatch(r"([0-9]+) *(?:([kmgt])(i?b)?|b)?", text.strip().lower(), re.ASCII)
    if not found or not int(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} should be bytes, such as 134217728 or 128MiB")
    power = " kmgt".index(found[2] or " ")
    return int(found[1]) * (1000 if found[3] == "b" else 1024) ** power


def seconds(text: str) -> float:
    """Seconds: a number with s, m, h or d."""
    number, factor = text[:-1], {"s": 1, "m": 60, "h": 3600, "d": 86400}.get(text[-1:])
    if factor is None or not number.isascii() or not number.isdigit() or not 0 < int(number) < MAX_INTEGER:
        raise argparse.ArgumentTypeError(f"{text!r} should be a number with s, m, h or d, such as 15m")
    return float(int(number) * factor)


def port(text: str) -> int:
    """A number of a TCP port."""
    if (number := natural(text)) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} should be a port, up to 65535")
    return number


LISTS = frozenset({counts, naturals, ranges})  # that read several values, with commas between them
