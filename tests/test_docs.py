"""What the documents show: every command is one, every link leads somewhere, and the code of a page runs."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from facts import tiny
from processes import run
from support import BF16, save

from weightbeam.pipelines.running.beam_options import check_options
from weightbeam.pipelines.terminal.arguments.parser import parse

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "deploy" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str = "") -> list[str]:
    """The blocks of code of a page in one language."""
    return [code for found, code in BLOCK.findall(page.read_text()) if found == language]


def commands(page: Path) -> list[str]:
    """What a page shows of `weightbeam …`, without comments, one command each."""
    lines = "\n".join(blocks(page)).replace("\\\n", " ").splitlines()
    return [
        line.strip().removeprefix("$ ") for line in lines if re.match(r"(\$ )?weightbeam \S*[^:\s]( |$)", line.strip())
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_is_one(page: Path) -> None:
    """Its options are ours, or among Beam's that are meant."""
    for command in commands(page):
        # what follows three blanks is an explanation
        words = shlex.split(re.sub(r"   .*", "", command), comments=True)[1:]
        if {"…", "COMMAND", "[options]"} & set(words):
            continue
        args, rest = parse([word for word in words if word not in ("&&", "|")])
        assert args.command in words, command
        check_options(rest)


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_links_lead_somewhere(page: Path) -> None:
    """To files that are there, and to headings that they have."""
    broken = []
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


def anchors(page: Path) -> set[str]:
    """Those of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_code_of_the_page_on_jax_runs(tmp_path: Path) -> None:
    """All of it, in order, on two devices."""
    config = tiny.CONFIGS["qwen3"]
    save(tmp_path / "hf", config, {name: np.ones(shape, BF16) for name, shape in tiny.shapes(config).items()})
    (tmp_path / "page.py").write_text(
        "from pathlib import Path\nrelease, checkpoint = 'hf', Path('ckpt').absolute()\n"
        + "\n".join(blocks(ROOT / "docs" / "howto" / "jax.md", "python"))
    )
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    ran = run(sys.executable, "page.py", cwd=tmp_path, env=os.environ | devices, status=0)
    assert "bfloat16" in ran.stdout
