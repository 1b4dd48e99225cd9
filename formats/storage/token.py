"""The hub's token: where it comes from. It goes into the hub's requests and nowhere else."""

from __future__ import annotations

import functools
import os

import huggingface_hub

from weightbeam.formats.storage.store import StorageError
from weightbeam.formats.text.installing import install

SECRET = "WEIGHTBEAM_HF_TOKEN_SECRET"  # in the environment: which secret holds the token
TIMEOUT = 30.0  # seconds


def token() -> str | None:
    """The hub's token; None if there is none.

    The first of these: HF_TOKEN, the hub's own login on this machine, the secret that the environment names.

    Raises:
      StorageError: the secret can't be read, or what is set can't be a token; it isn't shown.
    """
    found = huggingface_hub.get_token() or (_read_secret(version) if (version := secret()) else None)
    if found and not (found.isascii() and found.isprintable()):
        raise StorageError(
            "HF_TOKEN, or the hub's login on this machine, has characters that no token of the hub has; was it copied with something else?"
        )
    return found


def secret() -> str | None:
    """The secret that holds the token, as `projects/…/secrets/…/versions/latest`: a name that may be told, unlike the
    token.
    """
    return os.environ.get(SECRET) or None


_forgotten: set[str] = set()  # those of calls of this process that are over, whose threads may be at work still


def name_secret(version: str | None, of_a_call: bool = False) -> None:
    """Names that secret for this process and those that it starts; None changes nothing.

    Args:
      of_a_call: it is a call that names it, and not a worker, whose call may be over.
    """
    if of_a_call:
        _forgotten.discard(version or "")
    if version and version not in _forgotten:
        os.environ[SECRET] = version


def forget_secret(version: str, before: str | None) -> None:
    """Takes a secret back, as no call of this process names it any more; the environment names `before` again."""
    _forgotten.add(version)
    if before is None:
        os.environ.pop(SECRET, None)
    else:
        os.environ[SECRET] = before


@functools.cache
def _read_secret(version: str) -> str:
    try:
        from google.api_core.exceptions import GoogleAPIError  # only now: only where a secret is named
        from google.auth.exceptions import GoogleAuthError
        from google.cloud.secretmanager import SecretManagerServiceClient
    except ImportError as e:
        raise StorageError(f"{version}: the hub's token can't be read from Secret Manager: {install('gcp')}") from e
    try:
        client = SecretManagerServiceClient(transport="rest")
        answer = client.access_secret_version(name=version, timeout=TIMEOUT)
    except (GoogleAPIError, GoogleAuthError, OSError) as e:
        raise StorageError(f"{version}: the hub's token can't be read from Secret Manager: {e}") from e
    return answer.payload.data.decode().strip()
