"""The hub's token: where it is looked for, and that it stays where it belongs."""

from __future__ import annotations

import base64
import functools
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from google.api_core.client_options import ClientOptions
from google.auth.credentials import AnonymousCredentials
from google.cloud import secretmanager
from servers.server import Call, Reply, Server, json_reply
from support import LLAMA, make_release

import weightbeam as wb
from weightbeam.formats.storage import StorageError
from weightbeam.formats.storage.token import SECRET, _read_secret, name_secret, secret, token
from weightbeam.pipelines.running.token_secret import use_secret

NAME = "projects/1234/secrets/hub/versions/latest"
CLIENT = secretmanager.SecretManagerServiceClient


class FakeSecrets(Server):
    """A Secret Manager, by REST: versions of secrets by name."""

    def __init__(self, **versions: bytes) -> None:
        super().__init__()
        self.versions = {NAME.replace("hub", name): data for name, data in versions.items()}

    def answer(self, call: Call) -> Reply:
        match = re.fullmatch("/v1/(.+):access", call.path)
        if call.method != "GET" or match is None:
            raise NotImplementedError
        if (data := self.versions.get(match[1])) is None:
            error = {
                "code": 404,
                "message": f"Secret [{match[1]}] not found or has no versions.",
                "status": "NOT_FOUND",
            }
            return json_reply(404, {"error": error}, kind="read")
        return json_reply(200, {"name": match[1], "payload": {"data": base64.b64encode(data).decode()}}, kind="read")


def ask_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has Google's client ask another Secret Manager."""
    options = {"credentials": AnonymousCredentials(), "client_options": ClientOptions(api_endpoint=url)}
    monkeypatch.setattr(secretmanager, "SecretManagerServiceClient", functools.partial(CLIENT, **options))


@pytest.fixture(autouse=True)
def secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSecrets]:
    """No token anywhere but in a secret that nobody has named yet."""
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv(SECRET, "")
    monkeypatch.setattr("weightbeam.formats.storage.token._forgotten", set())
    _read_secret.cache_clear()
    with FakeSecrets(hub=b"hf_of_the_secret\n") as server:
        ask_at(server.url, monkeypatch)
        yield server


def test_the_first_that_is_there(secrets: FakeSecrets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment, then the hub's login, then the secret; which isn't asked before it is needed, and once in a
    process.
    """
    assert token() is None
    name_secret(None)
    assert not secret()
    name_secret(NAME)
    assert secret() == NAME
    assert token() == token() == "hf_of_the_secret"
    assert len(secrets.log) == 1
    (tmp_path / "token").write_text("hf_of_the_login")
    assert token() == "hf_of_the_login"
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_environment")
    assert token() == "hf_of_the_environment"
    assert len(secrets.log) == 1


def test_a_call_names_it_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And for what its plan becomes; another call at the same time can't have another one, since threads read for all."""
    other = NAME.replace("hub", "other")
    monkeypatch.setenv(SECRET, other)
    release = make_release(tmp_path / "hf", LLAMA)
    plan = wb.plan(release, hf_token_secret=NAME)
    assert secret() == other
    seen: list[str | None] = []
    wb.convert(plan, tmp_path / "out", progress=lambda _: seen.append(secret()))
    assert ({*seen}, secret()) == ({NAME}, other)
    beside: list[object] = []

    def call_beside(_: object) -> None:
        for name in (other, NAME):
            with ThreadPoolExecutor() as threads:
                beside.append(threads.submit(wb.plan, release, hf_token_secret=name).exception())

    wb.convert(plan, tmp_path / "again", progress=call_beside)
    assert isinstance(beside[0], wb.Refused)
    assert f"another call of this process is at work with {NAME}" in str(beside[0])
    assert beside[1] is None
    name_secret(NAME)  # by a worker's thread that outlives its call
    assert secret() == other


def test_what_a_command_names_is_its_processs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that comes later takes nothing back."""
    use_secret(NAME)
    monkeypatch.setenv(SECRET, "projects/1/secrets/own/versions/1")
    wb.inspect(make_release(tmp_path / "hf", LLAMA))
    assert secret() == "projects/1/secrets/own/versions/1"


def test_a_secret_that_is_not_there() -> None:
    name_secret(NAME.replace("hub", "other"))
    with pytest.raises(
        StorageError,
        match=r"projects/1234/secrets/other/versions/latest: the hub's token can't be read from Secret Manager: 404 .*not found",
    ):
        token()


def test_no_secret_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    ask_at("http://127.0.0.1:1", monkeypatch)
    name_secret(NAME)
    with pytest.raises(StorageError, match=re.escape(f"{NAME}: the hub's token can't be read from Secret Manager: ")):
        token()


def test_an_installation_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.cloud.secretmanager", None)
    name_secret(NAME)
    with pytest.raises(
        StorageError,
        match=re.escape(
            f"{NAME}: the hub's token can't be read from Secret Manager: pip install '.[gcp]' in Weightbeam's folder"
        ),
    ):
        token()


def test_no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real one, without an account of Google's."""
    monkeypatch.setattr(secretmanager, "SecretManagerServiceClient", CLIENT)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "nothing.json"))
    name_secret(NAME)
    with pytest.raises(StorageError, match=r"Secret Manager: .*nothing.json was not found"):
        token()


@pytest.mark.parametrize("wrong", ["hf_tökén", "hf_x\x1b[31m"])
def test_what_cant_be_a_token_is_refused_in_words(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It isn't shown, and nothing of it gets into a header."""
    monkeypatch.setenv("HF_TOKEN", wrong)
    with pytest.raises(StorageError, match="no token of the hub") as e:
        token()
    assert wrong not in str(e.value)
