"""The Terraform parses, names nothing that isn't declared, declares nothing that isn't named, and gives nobody too
much.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import hcl2
import pytest
from lark import Token, Tree

FOLDER = Path(__file__).parents[2] / "deploy" / "terraform"
FILES = {file.name: file.read_text() for file in sorted(FOLDER.glob("*.tf"))}
# a block, and what its references begin with
DECLARING = {"variable": "var", "resource": "", "data": "data", "module": "module"}
BUILT_IN = {"each", "count", "path", "self", "terraform"}

GOOD = """
variable "a" { type = string }
locals { b = [for r in ["x"] : "roles/${r}-${var.a}" if r.used] }
data "google_project" "p" {}
resource "google_thing" "t" {
  for_each = toset(local.b)
  name     = "${each.value} var.not_a_reference ${data.google_project.p.number}"
  dynamic "env" {
    for_each = []
    content { value = env.value }
  }
}
output "o" { value = google_thing.t["x"].id }
"""


def blocks(tree: Tree) -> Iterator[tuple[list[str], Tree]]:
    """The blocks at the top: their words, such as `resource`, type and name, and their bodies."""
    for block in tree.children[0].find_data("block") if isinstance(tree.children[0], Tree) else ():
        words = [
            _text(child).strip('"')
            for child in block.children
            if isinstance(child, Tree) and child.data in ("identifier", "string")
        ]
        body = next(child for child in block.children if isinstance(child, Tree) and child.data == "body")
        yield words, body


def declared(trees: Iterable[Tree]) -> set[str]:
    """What may be named: `var.x`, `local.x`, `data.type.name`, `type.name`, `module.x`."""
    found = set()
    for tree in trees:
        for words, body in blocks(tree):
            if words[0] == "locals":
                found |= {
                    f"local.{_text(child.children[0])}"
                    for child in body.children
                    if isinstance(child, Tree) and child.data == "attribute"
                }
            elif words[0] in DECLARING and len(words) > 1:
                found.add(".".join(filter(None, [DECLARING[words[0]], *words[1:]])))
    return found


def named(trees: Iterable[Tree]) -> set[str]:
    """What is named anywhere: in expressions, and in templates within strings."""
    found = set()
    for tree in trees:
        own = BUILT_IN | {
            _text(child)
            for intro in tree.find_data("for_intro")
            for child in intro.children
            if _is(child, "identifier")
        }
        own |= {words[1] for block in tree.find_data("block") if (words := _words(block))[0] == "dynamic"}
        for term in tree.find_data("get_attr_expr_term"):
            root, *attributes = _chain(term)
            depth = {"var": 1, "local": 1, "module": 1, "data": 2}.get(root, 1)
            if root and root not in own and len(attributes) >= depth:
                found.add(".".join([root, *attributes[:depth]]))
    return found


def problems(texts: Iterable[str]) -> list[str]:
    """What is named but not declared, and variables, locals and data that are declared but not named."""
    trees = [hcl2.parses_to_tree(text) for text in texts]
    there, used = declared(trees), named(trees)
    idle = {name for name in there - used if name.startswith(("var.", "local.", "data."))}
    return sorted([f"undeclared: {name}" for name in used - there] + [f"unused: {name}" for name in idle])


def _chain(term: Tree) -> list[str]:
    """`a.b[0].c` as a, b, c; an empty name where it begins with something else, such as a call."""
    if term.data == "identifier":
        return [_text(term)]
    inner = [child for child in term.children if isinstance(child, Tree)]
    if term.data == "get_attr_expr_term":
        return [*_chain(inner[0]), *(_text(child) for child in inner[1].children if _is(child, "identifier"))]
    if term.data in ("expr_term", "index_expr_term", "attr_splat_expr_term", "full_splat_expr_term"):
        return _chain(inner[0])
    return [""]


def _is(node: object, kind: str) -> bool:
    return isinstance(node, Tree) and node.data == kind


def _text(tree: Tree) -> str:
    return "".join(str(token) for token in tree.scan_values(lambda value: isinstance(value, Token))).strip()


def _words(block: Tree) -> list[str]:
    return [_text(child).strip('"') for child in block.children if _is(child, "identifier") or _is(child, "string")]


def test_every_name_is_declared_and_used() -> None:
    assert len(FILES) > 4
    assert problems(FILES.values()) == []


def test_the_check_passes_what_is_right() -> None:
    assert problems([GOOD]) == []


@pytest.mark.parametrize(
    ("right", "wrong", "problem"),
    [
        ("{var.a}", "{var.c}", "undeclared: var.c"),
        ("toset(local.b)", "toset(local.c)", "undeclared: local.c"),
        ('google_thing.t["x"].id', 'google_thing.u["x"].id', "undeclared: google_thing.u"),
        ("data.google_project.p.", "data.google_project.q.", "undeclared: data.google_project.q"),
        ("{ value = env.value }", "{ value = each_env.value }", "undeclared: each_env.value"),
        ('google_thing.t["x"].id', "module.m.id", "undeclared: module.m"),
        ("{var.a}", "{r}", "unused: var.a"),
        ("toset(local.b)", "toset([])", "unused: local.b"),
    ],
)
def test_the_check_finds_what_is_wrong(right: str, wrong: str, problem: str) -> None:
    assert right in GOOD
    assert problem in problems([GOOD.replace(right, wrong)])


def test_what_does_not_parse_is_found() -> None:
    with pytest.raises(Exception, match="Unexpected"):
        hcl2.parses_to_tree(GOOD.replace('"google_thing" "t" {', '"google_thing" "t"'))


@pytest.mark.parametrize("kind", ["variable", "output"])
def test_variables_and_outputs_say_what_they_are(kind: str) -> None:
    found = {
        name: body
        for text in FILES.values()
        for entry in hcl2.loads(text).get(kind, [])
        for name, body in entry.items()
    }
    assert len(found) > 4
    assert [name for name, body in found.items() if not body.get("description")] == []


def test_text_variables_are_checked() -> None:
    variables = {name: body for entry in hcl2.loads(FILES["variables.tf"])["variable"] for name, body in entry.items()}
    assert [name for name, body in variables.items() if body["type"] == "string" and "validation" not in body] == []


def test_no_secret_passes_through_the_state() -> None:
    resources = {
        kind.strip('"') for text in FILES.values() for entry in hcl2.loads(text).get("resource", []) for kind in entry
    }
    assert "google_secret_manager_secret" in resources
    assert "google_secret_manager_secret_version" not in resources


def test_rights_are_few() -> None:
    """No basic role, no administrator, nobody from outside; IAM is added to, never replaced."""
    everything = "\n".join(FILES.values())
    roles = set(re.findall(r"roles/[\w.]+", everything))
    assert len(roles) > 6
    assert {
        role for role in roles if role.split("/")[1] in ("owner", "editor", "viewer") or "admin" in role.lower()
    } == set()
    assert re.findall(r"allUsers|allAuthenticatedUsers|_iam_(?:binding|policy)\b", everything) == []
