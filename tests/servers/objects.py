"""Objects of a bucket as the JSON API describes them, what may be asked of them, and how it refuses."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import functools
import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import google_crc32c

from servers.server import Call, Reply, json_reply


@dataclasses.dataclass(frozen=True)
class Object:
    """One generation of an object. `times` are seconds since 1970: made, and changed last."""

    bucket: str
    name: str
    data: bytes
    generation: int
    times: tuple[float, float]
    metageneration: int = 1
    # what the client may set: contentType, metadata, …
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    components: int = 0  # how many objects it was composed of

    @functools.cached_property
    def crc32c(self) -> str:
        return _base64(google_crc32c.Checksum(self.data).digest())

    @functools.cached_property
    def md5(self) -> str:
        return _base64(hashlib.md5(self.data, usedforsecurity=False).digest())

    @property
    def hashes(self) -> dict[str, str]:
        """GCS has no MD5 of composed objects."""
        return {"crc32c": self.crc32c} | ({} if self.components else {"md5Hash": self.md5})

    @property
    def resource(self) -> dict[str, Any]:
        """As the API describes it."""
        made = dict(
            kind="storage#object", id=f"{self.bucket}/{self.name}/{self.generation}", name=self.name, bucket=self.bucket, size=str(len(self.data)),
            generation=str(self.generation), metageneration=str(self.metageneration), etag=_base64(f"{self.generation}/{self.metageneration}".encode()),
            storageClass="STANDARD", timeCreated=_rfc3339(self.times[0]), updated=_rfc3339(self.times[1]), timeStorageClassUpdated=_rfc3339(self.times[0]),
        )  # fmt: skip
        counted = {"componentCount": self.components} if self.components else {}
        return {"contentType": "application/octet-stream"} | dict(self.settings) | made | self.hashes | counted


class RefusedError(Exception):
    """An answer that isn't a success."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.reply = refused(status, reason, message)


def refused(status: int, reason: str, message: str, headers: Mapping[str, str] | None = None) -> Reply:
    """An error as the API says it."""
    if status == 304:
        return Reply(304)
    errors = [{"message": message, "domain": "global", "reason": reason}]
    return json_reply(status, {"error": {"code": status, "message": message, "errors": errors}}, headers)


def multipart(call: Call, headers: bool = False) -> Iterator[bytes]:
    """The parts of a `multipart` request: their contents, as they are; the standard library's parser would change line
    ends.
    """
    match = re.search(r"""boundary=["']?([^"';]+)""", call.headers["Content-Type"])
    assert match is not None
    for part in re.split(rb"(?:^|\r?\n)--" + re.escape(match[1].encode()) + rb"(?:--)?", call.body)[1:-1]:
        head, content = re.split(rb"\r?\n\r?\n", part, maxsplit=1)
        yield head.strip() + b"\n\n" + content if headers else content


def conditions_of(call: Call, prefix: str = "if") -> dict[str, str | None]:
    """The conditions on what is written, or on the source of a copy."""
    names = ("GenerationMatch", "GenerationNotMatch", "MetagenerationMatch", "MetagenerationNotMatch")
    return {f"if{name}": call.get(prefix + name) for name in names}


def settable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a client may say of an object."""
    fields = (
        "contentType",
        "contentEncoding",
        "cacheControl",
        "contentDisposition",
        "contentLanguage",
        "customTime",
        "metadata",
    )
    return {name: settings[name] for name in fields if name in settings}


def bucket_resource(name: str) -> dict[str, Any]:
    when = _rfc3339(0)
    return dict(
        kind="storage#bucket", id=name, name=name, location="US", locationType="multi-region", storageClass="STANDARD", timeCreated=when, updated=when,
        metageneration="1", etag="CAE=", projectNumber="1", hierarchicalNamespace={"enabled": False},
    )  # fmt: skip


def _rfc3339(seconds: float) -> str:
    return (
        datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
