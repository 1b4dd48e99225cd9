"""The address of the hub in the environment, before its client is imported."""

from __future__ import annotations

import os
import re
from urllib.parse import urlsplit

ENDPOINT = "https://huggingface.co"


class EndpointError(ValueError):
    """`HF_ENDPOINT` isn't an address."""


def check_endpoint(asked: bool = False) -> None:
    """Makes sure that `HF_ENDPOINT` is an address, where it is set: else the hub's client can't even be imported.

    Args:
      asked: whether the hub is to be asked, which takes a whole address.

    Raises:
      EndpointError: it isn't. One that may hold a password or a token isn't shown.
    """
    address = os.environ.get("HF_ENDPOINT", ENDPOINT)
    try:
        found = urlsplit(address)
        _ = found.port
        if asked and not (found.scheme in ("http", "https") and found.hostname):
            raise ValueError("it begins with https:// or http://, and a host")
        if asked and (found.query or found.fragment):
            raise ValueError("it ends with a host or a path")
    except ValueError as e:
        shown = "" if re.search("[@?#]", address) else f"={address}"
        raise EndpointError(f"HF_ENDPOINT{shown}: is no address of a hub ({e}); mend it, or unset it") from e
