"""A Google Cloud Storage that lives in memory: the JSON API as the stock clients use it.

    python tests/servers/gcs.py --port 9000 --folder buckets

serves the folder's sub-folders as buckets, from a process of its own. A folder is read once; nothing is written to it.
"""

from __future__ import annotations

import base64
import dataclasses
import email
import itertools
import json
import re
import sys
import time
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from servers.objects import Object, RefusedError, bucket_resource, conditions_of, multipart, refused, settable
from servers.server import Call, Fault, Reply, Server, json_reply, media, parser, route, serve

CHUNK = 1 << 18  # bytes; a chunk of a resumable upload is a multiple, but for the last
PAGE = 1000  # entries of a list at most
BUCKET, OBJECT = "/storage/v1/b/([^/]+)", "/storage/v1/b/([^/]+)/o/([^/]+)"


def glob_of(text: str | None) -> re.Pattern[str] | None:
    """A `matchGlob` as a pattern: `*` and `?` within a name, `**` across, `{a,b}` one of them, a backslash in front of
    what is meant as it is.
    """
    if text is None:
        return None
    kinds = {"**": ".*", "*": "[^/]*", "?": "[^/]", "{": "(?:", "}": ")", ",": "|"}
    parts = re.findall(r"\\.|\*\*|.", text, re.DOTALL)
    depth, made = 0, ""
    for part in parts:
        made += (
            kinds[part]
            if part in kinds and (part != "," or depth)
            else re.escape(part.removeprefix("\\") if len(part) == 2 else part)
        )
        depth += {"{": 1, "}": -1}.get(part, 0)
    return re.compile(made, re.DOTALL)


@dataclasses.dataclass
class Upload:
    """A resumable upload that isn't done, or is."""

    bucket: str
    settings: dict[str, Any]
    call: Call
    data: bytearray = dataclasses.field(default_factory=bytearray)
    done: Reply | None = None


class FakeGcs(Server):
    """A server of buckets.

    Attributes:
      objects: by bucket and name. A bucket exists if it is here.
      forbidden, read_only: beginnings of `bucket/object` that nobody may touch, or write.
      rewrite_bytes: how much one call of a server-side copy copies at most; None copies whole objects.
      clock: what time it is.
    """

    SETTINGS = ("faults", "forbidden", "read_only", "rewrite_bytes")

    def __init__(self, *buckets: str, port: int = 0, host: str = "127.0.0.1") -> None:
        super().__init__(port, host)
        self.objects: dict[str, dict[str, Object]] = {bucket: {} for bucket in buckets}
        self.forbidden: list[str] = []
        self.read_only: list[str] = []
        self.rewrite_bytes: int | None = None
        self.clock: Callable[[], float] = time.time
        self._generations = itertools.count(1_700_000_000_000_000)
        self._numbers = itertools.count()
        self._uploads: dict[str, Upload] = {}
        self._rewrites: dict[str, tuple[Object, int]] = {}
        self._routes = [
            ("GET", "/storage/v1/b", self._buckets),
            ("POST", "/storage/v1/b", self._make_bucket),
            ("GET", BUCKET, self._bucket),
            ("DELETE", BUCKET, self._remove_bucket),
            ("GET", BUCKET + "/storageLayout", self._layout),
            ("GET", BUCKET + "/o/?", self._list),
            ("POST", f"/(?:resumable/)?upload{BUCKET}/o/?", self._upload),
            ("PUT DELETE", f"/(?:resumable/)?upload{BUCKET}/o/?", self._continue),
            ("GET HEAD", f"(?:/download)?{OBJECT}", self._read),
            ("PATCH PUT", OBJECT, self._patch),
            ("DELETE", OBJECT, self._delete),
            ("POST", OBJECT + "/(?:rewriteTo|copyTo)/b/([^/]+)/o/([^/]+)", self._copy),
            ("POST", OBJECT + "/moveTo/o/([^/]+)", self._move),
            ("POST", OBJECT + "/compose", self._compose),
            ("POST", "/batch(?:/storage/v1)?", self._batch),
        ]

    def env(self) -> dict[str, str]:
        """The environment variables that send every client here."""
        return {
            "STORAGE_EMULATOR_HOST": self.url,  # google-cloud-storage, gcsfs
            "TENSORSTORE_GCS_HTTP_URL": self.url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "x",  # TensorStore asks for no other
            "GOOGLE_CLOUD_PROJECT": "test",  # nobody looks for one
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # asks over gRPC whether a bucket is zonal
        }

    def load(self, folder: Path) -> None:
        """Takes a folder's sub-folders as buckets."""
        for bucket in sorted(path for path in folder.iterdir() if path.is_dir()):
            self.objects[bucket.name] = {}
            for path in sorted(path for path in bucket.rglob("*") if path.is_file()):
                self.put(bucket.name, path.relative_to(bucket).as_posix(), path.read_bytes())

    def put(
        self, bucket: str, name: str, data: bytes, settings: Mapping[str, Any] | None = None, components: int = 0
    ) -> Object:
        """Makes a new generation, as if by another client."""
        with self.lock:
            now = self.clock()
            made = Object(
                bucket, name, data, next(self._generations), (now, now), settings=settings or {}, components=components
            )
            self.objects[bucket][name] = made
        return made

    def answer(self, call: Call) -> Reply:
        function, parts = route(self._routes, call.method, call.path)
        try:
            self._admit(call.method not in ("GET", "HEAD") and function != self._copy, parts[:2])
            reply = function(call, *parts)
        except RefusedError as e:
            reply = dataclasses.replace(e.reply)
        if reply.kind == "other":
            reply.kind = function.__name__.strip("_")
        if name := call.get("name"):  # of an upload
            parts = [*parts[:1], name]
        reply.name = reply.name or "/".join(parts[:2])
        return reply

    def refusal(self, fault: Fault) -> Reply:
        reason = {429: "rateLimitExceeded", 503: "backendError"}.get(fault.status, "fault")
        headers = {} if fault.retry_after is None else {"Retry-After": str(fault.retry_after)}
        return refused(fault.status, reason, "a fault that was asked for", headers)

    def _admit(self, writes: bool, parts: list[str]) -> None:
        """Refuses what is forbidden, and buckets that don't exist; `parts` are bucket and object.

        Raises:
          RefusedError: 403 or 404.
        """
        path = "/".join(parts)
        if any(path.startswith(prefix) for prefix in (*self.forbidden, *(self.read_only if writes else ()))):
            raise RefusedError(
                403, "forbidden", f"anonymous caller does not have permission to access {path} (or it may not exist)."
            )
        if parts and parts[0] not in self.objects:
            raise RefusedError(404, "notFound", "The specified bucket does not exist.")

    def _find(self, bucket: str, name: str, generation: str | None = None) -> Object:
        """Raises RefusedError (404) if there is no such object."""
        found = self.objects[bucket].get(name)
        if found is None or generation not in (None, str(found.generation)):
            raise RefusedError(404, "notFound", f"No such object: {bucket}/{name}")
        return found

    def _check(self, conditions: Mapping[str, str | None], found: Object | None, reading: bool = False) -> None:
        """Raises RefusedError (412, or 304 where something is read) if a condition doesn't hold."""
        have = {"Generation": found.generation if found else 0, "Metageneration": found.metageneration if found else 0}
        for field, value in have.items():
            match, other = conditions.get(f"if{field}Match"), conditions.get(f"if{field}NotMatch")
            if match is not None and int(match) != value:
                raise RefusedError(
                    412, "conditionNotMet", "At least one of the pre-conditions you specified did not hold."
                )
            if other is not None and int(other) == value:
                raise RefusedError(
                    304 if reading else 412,
                    "conditionNotMet",
                    "At least one of the pre-conditions you specified did not hold.",
                )

    def _write(
        self,
        conditions: Mapping[str, str | None],
        bucket: str,
        name: str,
        data: bytes,
        settings: Mapping[str, Any],
        components: int = 0,
    ) -> Object:
        """Makes a generation if the conditions hold; one at a time."""
        with self.lock:
            self._check(conditions, self.objects[bucket].get(name))
            return self.put(bucket, name, data, settings, components)

    # --- buckets

    def _buckets(self, call: Call) -> Reply:
        return json_reply(
            200, {"kind": "storage#buckets", "items": [bucket_resource(bucket) for bucket in sorted(self.objects)]}
        )

    def _make_bucket(self, call: Call) -> Reply:
        name = json.loads(call.body)["name"]
        with self.lock:
            if name in self.objects:
                raise RefusedError(
                    409,
                    "conflict",
                    "Your previous request to create the named bucket succeeded and you already own it.",
                )
            self.objects[name] = {}
        return json_reply(200, bucket_resource(name))

    def _bucket(self, call: Call, bucket: str) -> Reply:
        return json_reply(200, bucket_resource(bucket))

    def _remove_bucket(self, call: Call, bucket: str) -> Reply:
        with self.lock:
            if self.objects[bucket]:
                raise RefusedError(409, "conflict", "The bucket you tried to delete is not empty.")
            del self.objects[bucket]
        return Reply(204)

    def _layout(self, call: Call, bucket: str) -> Reply:
        layout = dict(
            kind="storage#storageLayout",
            bucket=bucket,
            location="US",
            locationType="multi-region",
            hierarchicalNamespace={"enabled": False},
        )
        return json_reply(200, layout)

    def _list(self, call: Call, bucket: str) -> Reply:
        prefix, delimiter = call.get("prefix") or "", call.get("delimiter")
        first, end = call.get("startOffset") or "", call.get("endOffset")
        if any(f"{bucket}/{prefix}".startswith(path) for path in self.forbidden):
            raise RefusedError(
                403, "forbidden", f"anonymous caller does not have storage.objects.list access to {bucket}."
            )
        pattern = glob_of(call.get("matchGlob"))
        after = base64.urlsafe_b64decode(call.get("pageToken") or "").decode()
        with self.lock:
            found = sorted(self.objects[bucket].values(), key=lambda one: one.name.encode())
        entries: dict[str, Object | None] = {}  # None for a prefix
        for one in found:
            if not one.name.startswith(prefix) or one.name < first or (end and one.name >= end):
                continue
            if pattern and not pattern.fullmatch(one.name):
                continue
            head, separator, _ = one.name[len(prefix) :].partition(delimiter) if delimiter else (one.name, "", "")
            name = prefix + head + separator if separator else one.name
            if name > after:
                entries[name] = None if separator else one
        limit = min(PAGE, int(call.get("maxResults") or PAGE))
        page = dict(itertools.islice(entries.items(), limit))
        content: dict[str, Any] = {"kind": "storage#objects"}
        if items := [one.resource for one in page.values() if one]:
            content["items"] = items
        if prefixes := [name for name, one in page.items() if one is None]:
            content["prefixes"] = prefixes
        if len(entries) > limit:
            content["nextPageToken"] = base64.urlsafe_b64encode(list(page)[-1].encode()).decode()
        return json_reply(200, content, kind="list", name=f"{bucket}/{prefix}")

    # --- objects

    def _read(self, call: Call, bucket: str, name: str) -> Reply:
        found = self._find(bucket, name, call.get("generation"))
        self._check(conditions_of(call), found, reading=True)
        if call.get("alt") != "media":
            return json_reply(200, found.resource, kind="stat")
        headers = {
            "Content-Type": found.resource["contentType"],
            "ETag": found.resource["etag"],
            "X-Goog-Generation": str(found.generation),
            "X-Goog-Metageneration": str(found.metageneration),
            "X-Goog-Hash": ",".join(f"{kind.removesuffix('Hash')}={value}" for kind, value in found.hashes.items()),
            "X-Goog-Stored-Content-Length": str(len(found.data)),
            "X-Goog-Stored-Content-Encoding": "identity",
            "X-Goog-Storage-Class": "STANDARD",
        }
        return media(found.data, call, headers, f"{bucket}/{name}")

    def _patch(self, call: Call, bucket: str, name: str) -> Reply:
        with self.lock:
            found = self._find(bucket, name, call.get("generation"))
            self._check(conditions_of(call), found)
            settings = dict(found.settings) | json.loads(call.body or b"{}")
            changed = dataclasses.replace(
                found, settings=settings, metageneration=found.metageneration + 1, times=(found.times[0], self.clock())
            )
            self.objects[bucket][name] = changed
        return json_reply(200, changed.resource)

    def _delete(self, call: Call, bucket: str, name: str) -> Reply:
        with self.lock:
            self._check(conditions_of(call), self._find(bucket, name, call.get("generation")))
            del self.objects[bucket][name]
        return Reply(204)

    def _copy(self, call: Call, bucket: str, name: str, to_bucket: str, to_name: str) -> Reply:
        self._admit(True, [to_bucket, to_name])
        source = self._find(bucket, name, call.get("sourceGeneration"))
        self._check(conditions_of(call, "ifSource"), source)
        self._check(conditions_of(call), self.objects[to_bucket].get(to_name))
        token = call.get("rewriteToken")
        if token is not None and self._rewrites.get(token, (None,))[0] is not source:
            raise RefusedError(400, "invalid", "Invalid rewrite token.")
        size = len(source.data)
        done = min(size, (self._rewrites[token][1] if token else 0) + (self.rewrite_bytes or size))
        progress = dict(
            kind="storage#rewriteResponse", totalBytesRewritten=str(done), objectSize=str(size), done=done == size
        )
        if done < size:
            token = f"rewrite-{next(self._numbers)}"
            self._rewrites[token] = source, done
            return json_reply(200, progress | {"rewriteToken": token})
        settings = dict(source.settings) | json.loads(call.body or b"{}")
        made = self._write(conditions_of(call), to_bucket, to_name, source.data, settable(settings), source.components)
        return json_reply(200, made.resource if "/copyTo/" in call.path else progress | {"resource": made.resource})

    def _move(self, call: Call, bucket: str, name: str, to_name: str) -> Reply:
        self._admit(True, [bucket, to_name])
        with self.lock:
            source = self._find(bucket, name, call.get("sourceGeneration"))
            self._check(conditions_of(call, "ifSource"), source)
            made = self._write(conditions_of(call), bucket, to_name, source.data, source.settings, source.components)
            if name != to_name:
                del self.objects[bucket][name]
        return json_reply(200, made.resource)

    def _compose(self, call: Call, bucket: str, name: str) -> Reply:
        content = json.loads(call.body)
        sources = []
        for part in content["sourceObjects"]:
            sources.append(
                self._find(bucket, part["name"], None if part.get("generation") is None else str(part["generation"]))
            )
            self._check(part.get("objectPreconditions", {}), sources[-1])
        if not 1 <= len(sources) <= 32:
            raise RefusedError(400, "invalid", "The number of source components provided must be between 1 and 32.")
        data, components = b"".join(one.data for one in sources), sum(one.components or 1 for one in sources)
        made = self._write(
            conditions_of(call), bucket, name, data, settable(content.get("destination", {})), components
        )
        return json_reply(200, made.resource)

    # --- uploads

    def _upload(self, call: Call, bucket: str) -> Reply:
        kind = call.get("uploadType")
        if call.get("upload_id"):  # gcsfs sends chunks by POST
            return self._continue(call, bucket)
        if kind == "resumable":
            return self._begin(call, bucket)
        settings, data = multipart(call) if kind == "multipart" else (b"{}", call.body)
        return self._finish(call, bucket, json.loads(settings), data)

    def _finish(
        self, call: Call, bucket: str, settings: dict[str, Any], data: bytes, more: Mapping[str, str] | None = None
    ) -> Reply:
        """Makes the object, if it is whole."""
        name = call.get("name") or settings["name"]
        try:
            made = self._receive(call, bucket, name, settings, data, more or {})
        except RefusedError as e:
            return dataclasses.replace(e.reply, kind="write", name=f"{bucket}/{name}")
        return json_reply(200, made.resource, kind="write", name=f"{bucket}/{name}")

    def _receive(
        self, call: Call, bucket: str, name: str, settings: dict[str, Any], data: bytes, more: Mapping[str, str]
    ) -> Object:
        """Raises RefusedError if it may not be made, or isn't whole."""
        self._admit(True, [bucket, name])
        sent = dict(re.findall(r"(crc32c|md5)=([^,\s]+)", more.get("x-goog-hash") or call.headers["x-goog-hash"] or ""))
        wanted = {
            "crc32c": settings.get("crc32c") or sent.get("crc32c"),
            "md5": settings.get("md5Hash") or sent.get("md5"),
        }
        probe = Object(bucket, name, data, 0, (0, 0))
        for field, value in wanted.items():
            if value and value != getattr(probe, field):
                message = f"Provided {field} hash {json.dumps(value)} doesn't match calculated {field} hash {json.dumps(getattr(probe, field))}."
                raise RefusedError(400, "invalid", message)
        typed = {"contentType": call.headers["X-Upload-Content-Type"]} if call.headers["X-Upload-Content-Type"] else {}
        return self._write(conditions_of(call), bucket, name, data, typed | settable(settings))

    def _begin(self, call: Call, bucket: str) -> Reply:
        settings = json.loads(call.body or b"{}")
        name = call.get("name") or settings["name"]
        self._admit(True, [bucket, name])
        self._check(conditions_of(call), self.objects[bucket].get(name))
        number = f"upload-{next(self._numbers)}"
        self._uploads[number] = Upload(bucket, settings, call)
        where = f"{self.url}/upload/storage/v1/b/{bucket}/o?{urllib.parse.urlencode(dict(uploadType='resumable', name=name, upload_id=number))}"
        return Reply(200, b"", {"Location": where, "X-GUploader-UploadID": number}, "begin", f"{bucket}/{name}")

    def _continue(self, call: Call, bucket: str) -> Reply:
        """A chunk of a resumable upload, a question how far it is, or its end."""
        number = call.get("upload_id") or ""
        upload = self._uploads.get(number)
        if upload is None:
            raise RefusedError(404, "notFound", "Upload session not found.")
        if call.method == "DELETE":
            del self._uploads[number]
            return Reply(499, b"", {}, "cancel")
        with self.lock:
            if upload.done:
                return dataclasses.replace(upload.done, kind="query")
            match = re.fullmatch(
                r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)",
                call.headers["Content-Range"] or f"bytes 0-{len(call.body) - 1}/{len(call.body)}",
            )
            if match is None:
                raise RefusedError(400, "invalid", "Failed to parse Content-Range header.")
            first, total = match[1], None if match[3] == "*" else int(match[3])
            if first is not None:
                if int(first) > len(upload.data) or len(call.body) != int(match[2]) - int(first) + 1:
                    raise RefusedError(
                        400,
                        "invalid",
                        "Invalid request. The chunk doesn't begin where the upload is, or isn't as long as it says.",
                    )
                upload.data += call.body[len(upload.data) - int(first) :]
            if total is not None and len(upload.data) >= total:
                hashes = {"x-goog-hash": call.headers["x-goog-hash"] or ""}
                upload.done = self._finish(upload.call, upload.bucket, upload.settings, bytes(upload.data), hashes)
                return upload.done
            del upload.data[len(upload.data) // CHUNK * CHUNK :]  # only whole ones are kept
            held = {"Range": f"bytes=0-{len(upload.data) - 1}"} if upload.data else {}
            return Reply(308, b"", held, "query" if first is None else "chunk")

    def _batch(self, call: Call) -> Reply:
        """Answers the requests in a request."""
        answers = []
        for part in multipart(call, headers=True):
            outer, _, inner = part.replace(b"\r\n", b"\n").partition(b"\n\n")
            head, _, body = inner.partition(b"\n\n")
            line, _, fields = head.partition(b"\n")
            method, target, *_ = line.decode().split()
            url = urllib.parse.urlsplit(target)
            headers = email.message_from_bytes(fields + b"\n\n")
            reply = self.answer(
                Call(method, url.path, urllib.parse.parse_qs(url.query, keep_blank_values=True), headers, body)
            )
            number = (email.message_from_bytes(outer + b"\n\n")["Content-ID"] or "").strip("<>")
            said = "".join(f"{name}: {value}\r\n" for name, value in reply.headers.items())
            answers.append(
                f"--batch\r\nContent-Type: application/http\r\nContent-ID: <response-{number}>\r\n\r\nHTTP/1.1 {reply.status} Status\r\n"
                f"{said}Content-Length: {len(reply.body)}\r\n\r\n{bytes(reply.body).decode()}\r\n"
            )
        return Reply(
            200, ("".join(answers) + "--batch--").encode(), {"Content-Type": "multipart/mixed; boundary=batch"}
        )


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--folder", type=Path, help="its sub-folders become buckets")
    made.add_argument("--bucket", action="append", default=[], help="an empty bucket")
    arguments = made.parse_args()
    server = FakeGcs(*arguments.bucket, port=arguments.port, host=arguments.host)
    if arguments.folder:
        server.load(arguments.folder)
    serve(server)


if __name__ == "__main__":
    main()
