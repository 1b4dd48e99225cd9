"""YAML from a stranger: bounded in bytes, and in the values that aliases repeat."""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Any

import yaml

from weightbeam.formats.text.printable import listed

MAX_YAML = 1 << 20  # bytes of a text: to parse it takes seconds for each MB
STRING, INTEGER = "tag:yaml.org,2002:str", "tag:yaml.org,2002:int"
MAX_DIGITS = 1000  # Python prints numbers of 4,300 digits at most
MAX_VALUES = 100_000  # with those that aliases repeat; MaxText's base.yml has some two thousand


class StrictLoader(yaml.SafeLoader):
    """YAML in which no key stands twice, of which the last would win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines = defaultdict[str, list[int]](list)
        for key, _ in node.value:
            if key.tag == STRING:
                lines[key.value].append(key.start_mark.line + 1)
        if twice := [f"{key} stands in lines {listed(list(map(str, at)))}" for key, at in lines.items() if len(at) > 1]:
            raise yaml.YAMLError("; ".join(twice))
        return super().construct_mapping(node, deep)


def parse_yaml(text: str | bytes, loader: type[yaml.BaseLoader | yaml.SafeLoader] = yaml.SafeLoader) -> Any:
    """What a text says; None where it is empty.

    Raises:
      YAMLError: it isn't YAML, or is larger than anything that is meant.
    """
    if len(text) > MAX_YAML:
        raise yaml.YAMLError(f"has more than {MAX_YAML:,} bytes; that can't be meant")
    try:
        reader = loader(text)
        root = reader.get_single_node()
        if root is None:
            return None
        _count(root, {})
        return reader.construct_document(root)
    except yaml.YAMLError:
        raise
    except UnicodeDecodeError:
        raise
    except RecursionError as e:
        raise yaml.YAMLError("is nested too deep") from e
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as e:  # of a date or a number
        raise yaml.YAMLError(f"holds what can't be meant: {e}") from e


def _count(node: yaml.Node, known: dict[int, int]) -> int:
    """The values that a node holds, with those of the nodes that it repeats; `known` are those that were counted, and
    those around it, with more than any may have. Raises YAMLError where there are too many, it holds itself, a number
    is too long, or a text has half of a character.
    """
    if isinstance(node, yaml.ScalarNode):
        try:
            os.fsencode(node.value)
        except UnicodeEncodeError as e:
            raise yaml.YAMLError(f"has {e.object[e.start]!a}, half of a character") from e
    if node.tag == INTEGER and len(node.value) > MAX_DIGITS:
        raise yaml.YAMLError(f"has a number of {len(node.value):,} characters; that can't be meant")
    if (count := known.get(id(node))) is None:
        known[id(node)] = MAX_VALUES  # of one that holds itself
        below = node.value if isinstance(node, yaml.CollectionNode) else []
        parts = [part for each in below for part in (each if isinstance(each, tuple) else (each,))]
        count = known[id(node)] = 1 + sum(_count(part, known) for part in parts)
    if count > MAX_VALUES:
        raise yaml.YAMLError(
            f"has more than {MAX_VALUES:,} values, with those that aliases repeat; that can't be meant"
        )
    return count
