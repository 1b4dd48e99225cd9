"""What strangers wrote into names and configs, at the terminal: shown, and never acted on by rich, by a terminal or by
a chat.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pairs import each, some
from processes import run
from support import BF16, LLAMA, call, random_tensors, save

from weightbeam.formats.text.printable import printable, without_user
from weightbeam.pipelines.watching.notices import Notices

HARMFUL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
ODD = ["[/]", "[red]x", "[link=https://evil.example]here[/link]", ":smile:", "\u202egnp.exe", "[bold", "\u2066x\u2069"]


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://me:secret@host.example/x@y", "https://host.example/x@y"),
        ("me:secret@127.0.0.1:9", "127.0.0.1:9"),
        ("http://host.example/a@b", "http://host.example/a@b"),
        ("host.example", "host.example"),
        ("", ""),
    ],
)
def test_an_address_is_shown_without_its_password(address: str, shown: str) -> None:
    assert without_user(address) == shown


@pytest.mark.parametrize("odd", ODD)
def test_names_with_markup_are_shown_as_they_are(tmp_path: Path, odd: str, capfd: pytest.CaptureFixture[str]) -> None:
    """In a tensor that the plan leaves out, and as one that the table doesn't know."""
    name = f"model.layers.0.{odd}.self_attn.rotary_emb.inv_freq"
    folder = save(tmp_path / "hf", LLAMA, random_tensors(LLAMA) | {name: np.zeros(4, BF16)})
    assert call("plan", "--source", folder, "--maxtext_model", "llama2-7b") in (0, 2)
    assert call("inspect", folder) == 0
    said = capfd.readouterr()
    assert not HARMFUL.search(said.out + said.err)
    assert "\x1b" not in said.out + said.err
    assert printable(odd) in said.out


def test_fields_of_configs_are_printable(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;owned\x07[/x]\n\u202e"
    folder = save(tmp_path / "hf", LLAMA | dict(model_type=evil), random_tensors(LLAMA))
    assert call("inspect", folder) == 0
    assert call("plan", "--source", folder) == 2
    quantised = LLAMA | dict(quantization_config=dict(quant_method="compressed-tensors", format=evil))
    folder = save(tmp_path / "quantised", quantised, random_tensors(LLAMA))
    assert call("plan", "--source", folder) == 2
    assert call("convert", "--source", folder, "--output", tmp_path / "out") == 2
    (tmp_path / "pickles").mkdir()
    (tmp_path / "pickles" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "pickles" / "\x1b[31mx.bin").touch()
    assert call("plan", "--source", tmp_path / "pickles") == 2
    said = capfd.readouterr()
    assert not HARMFUL.search(said.out + said.err)
    assert r"\x1b]0;owned\x07[/x]\n" in said.out


@given(st.text(), st.booleans())
def test_printable(text: str, lines: bool) -> None:
    """Nothing harmful is left, nothing harmless is changed, and lines are kept where they are ours."""
    shown = printable(text, lines=lines)
    assert not HARMFUL.search(shown)
    assert ("\n" in shown) == (lines and "\n" in text)
    if text.isascii() and text.isprintable():
        assert shown == text
    assert len(printable(text, 10)) < 250


def test_notices_hold_no_mentions_and_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """As chats of Slack's kind read them."""
    posted: list[dict[str, Any]] = []
    monkeypatch.setattr("weightbeam.pipelines.watching.notices._post", lambda url, message: posted.append(message))
    reason = "its licence is <!channel> <https://evil.example|approve> & \u202eco, which isn't among licences"
    Notices(["https://chat.example"]).tell(
        dict(state="refused", repo="acme/tiny", commit="0" * 40, target="t", reason=reason)
    )
    (message,) = posted
    assert not re.search(r"[<>\u202e]", message["text"])
    assert "&lt;!channel&gt; &lt;https://evil.example|approve&gt; &amp; " in message["text"]
    assert message["reason"] == reason  # a field of JSON, for programs


@pytest.mark.parametrize(("command", "encoding"), each(["plan --source", "inspect"], ["ascii", "latin-1"]))
def test_a_narrow_encoding(source: Path, command: str, encoding: str) -> None:
    """`×` and `…` aren't in ASCII."""
    extra = ["--maxtext_model", "llama2-7b"] if "plan" in command else []
    arguments = [sys.executable, "-m", "weightbeam.pipelines.cli", *command.split(), str(source), *extra]
    ran = subprocess.run(
        arguments,
        capture_output=True,
        timeout=120,
        check=False,
        env=os.environ | {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"},
    )
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert b"embed" in ran.stdout


def test_a_result_for_a_closed_stream_is_refused(source: Path) -> None:
    """Not lost with status 0."""
    script = f"{sys.executable} -m weightbeam.pipelines.cli inspect {source} --json - >&-"
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert ended.returncode == 2
    assert "--json=-: standard output is closed; name a file" in ended.stderr


@pytest.mark.parametrize("closed", some(["2>&-", ">&-", "<&-", ">&- 2>&-"], 2))
def test_closed_streams(source: Path, tmp_path: Path, closed: str) -> None:
    """The exit status is right, and nothing that is printed gets into a file that is open under that number."""
    here = f"{sys.executable} -m weightbeam.pipelines.cli"
    output = tmp_path / "out"
    model = "--maxtext_model llama2-7b"
    script = f"{here} convert --source {source} --output {output} {model} {closed} && {here} verify --source {source} --checkpoint {output} {model} {closed}"
    run("bash", "-c", script, status=0)
