"""The address of the hub in the environment, before its client is imported."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from weightbeam.formats.text.printable import without_user


class EndpointError(ValueError):
    """`HF_ENDPOINT` isn't an address."""


def check_endpoint() -> None:
    """Makes sure that `HF_ENDPOINT` is an address, where it is set: else the hub's client can't even be imported.

    Raises:
      EndpointError: it isn't.
    """
    address = os.environ.get("HF_ENDPOINT", "")
    try:
        _ = urlsplit(address).port
    except ValueError as e:
        raise EndpointError(
            f"HF_ENDPOINT={without_user(address)}: is no address of a hub ({e}); mend it, or unset it"
        ) from e
