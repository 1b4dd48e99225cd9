"""The address of the hub in the environment, before its client is imported."""

from __future__ import annotations

import os
import re
from urllib.parse import urlsplit


class EndpointError(ValueError):
    """`HF_ENDPOINT` isn't an address."""


def check_endpoint(asked: bool = False) -> None:
    """Makes sure that `HF_ENDPOINT` is an address, where it is set: else the hub's client can't even be imported.

    Args:
      asked: whether the hub is to be asked, which takes a whole address.

    Raises:
      EndpointError: it isn't. One that may hold a password or a token isn't shown.
    """
    if (address := os.environ.get("HF_ENDPOINT")) is None:
        return
    why, is_shown = "", not re.search("[@?#]", address)
    try:
        found = urlsplit(address)
        _ = found.port
        if asked and not (found.scheme in ("http", "https") and found.hostname):
            why = "it begins with https:// or http://, and a host"
        elif asked and (found.query or found.fragment):
            why = "it ends with a host or a path"
    except ValueError:  # whose message may have a part of a password
        why, is_shown = "its host or its port isn't one", False
    if why:
        shown = f"={address}" if is_shown else ""
        raise EndpointError(f"HF_ENDPOINT{shown}: is no address of a hub ({why}); mend it, or unset it")
