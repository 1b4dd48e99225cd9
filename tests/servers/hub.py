"""A Hugging Face hub that serves local folders, and the host beside it from which it has the large files fetched.

    python tests/servers/hub.py --port 9000 --folder models

serves each `organisation/name` below the folder as a repository, from a process of its own.
"""

from __future__ import annotations

import base64
import datetime
import fnmatch
import hashlib
import hmac
import json
import re
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from servers.repository import LFS_SIZE, LFS_SUFFIXES, Blob, Commit, Repository, entry, isotime, tree
from servers.server import Call, Fault, Log, Reply, Server, json_reply, media, parser, route, serve

MODEL = "/api/models/([^/]+/[^/]+)"
FOLDERS = "(?:/(.+))?"  # what may follow
SORTS = {
    "lastModified": "lastModified",
    "createdAt": "createdAt",
    "downloads": "downloads",
    "likes": "likes",
    "trendingScore": "trendingScore",
}
# of a list
BRIEF = (
    "_id",
    "id",
    "modelId",
    "likes",
    "private",
    "downloads",
    "trendingScore",
    "tags",
    "createdAt",
    "pipeline_tag",
    "library_name",
)
FULL = (*BRIEF, "author", "sha", "lastModified", "gated", "disabled", "siblings")


class DeniedError(Exception):
    """An answer that isn't a success, as the hub gives it: in headers, since a HEAD has no body."""

    def __init__(self, status: int, code: str, message: str, commit: Commit | None = None) -> None:
        super().__init__(message)
        headers = (
            {"X-Error-Message": message}
            | ({"X-Error-Code": code} if code else {})
            | ({"X-Repo-Commit": commit.sha} if commit else {})
        )
        self.reply = json_reply(status, {"error": message}, headers)


class Cdn(Server):
    """The other host: serves signed URLs until they expire, and wants no token.

    Attributes:
      blobs: by sha256.
      uploads: what was uploaded, by sha256; no revision has to refer to it.
      leaks: requests that carried a token. There should be none.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(host="localhost")
        self.clock = clock
        self.blobs: dict[str, Blob] = {}
        self.uploads: dict[str, Blob] = {}
        self.leaks: list[str] = []
        self._key = b"a key of this test server"

    def sign(self, path: str, expires: int) -> str:
        return hmac.new(self._key, f"{path} {expires}".encode(), hashlib.sha256).hexdigest()

    def link(self, name: str, blob: Blob, expires: float) -> str:
        """A URL that works until then."""
        self.blobs[blob.sha256] = blob
        path = f"/repos/{urllib.parse.quote(name)}/{blob.sha256}"
        return f"{self.url}{path}?{urllib.parse.urlencode({'Expires': int(expires), 'Signature': self.sign(path, int(expires))})}"

    def place(self, sha256: str, size: int) -> str:
        """A URL that takes the bytes with this hash."""
        path = f"/uploads/{sha256}"
        return f"{self.url}{path}?{urllib.parse.urlencode({'Expires': size, 'Signature': self.sign(path, size)})}"

    def _take(self, call: Call) -> Reply:
        """Keeps an uploaded file, if it is the one that was announced."""
        sha256 = call.path.removeprefix("/uploads/")
        size, signature = int(call.get("Expires") or 0), call.get("Signature") or ""
        if not hmac.compare_digest(signature, self.sign(call.path, size)):
            return _xml(
                403,
                "SignatureDoesNotMatch",
                "The request signature we calculated does not match the signature you provided.",
                sha256,
            )
        if len(call.body) != size or hashlib.sha256(call.body).hexdigest() != sha256:
            return _xml(400, "BadDigest", "The Content-SHA256 you specified did not match what we received.", sha256)
        self.uploads[sha256] = Blob(call.body, lfs=True)
        return Reply(200, b"", {}, "upload", sha256)

    def answer(self, call: Call) -> Reply:
        if call.method == "PUT":
            return self._take(call)
        where, _, sha256 = call.path.removeprefix("/repos/").rpartition("/")
        name = urllib.parse.unquote(where)
        if call.headers["Authorization"] or call.headers["Cookie"]:
            self.leaks.append(f"{call.method} {call.path}")
            return _xml(400, "InvalidArgument", "Only one auth mechanism allowed", name)
        expires, signature = int(call.get("Expires") or 0), call.get("Signature") or ""
        if not hmac.compare_digest(signature, self.sign(call.path, expires)):
            return _xml(
                403,
                "SignatureDoesNotMatch",
                "The request signature we calculated does not match the signature you provided.",
                name,
            )
        if self.clock() >= expires:
            return _xml(403, "AccessDenied", "Request has expired", name)
        return media(self.blobs[sha256].data, call, {"ETag": self.blobs[sha256].etag}, name)

    def refusal(self, fault: Fault) -> Reply:
        headers = {} if fault.retry_after is None else {"Retry-After": str(fault.retry_after)}
        reply = _xml(fault.status, "SlowDown", "Please reduce your request rate.", "")
        reply.headers = {**reply.headers, **headers}
        return reply


class FakeHub(Server):
    """A server of models.

    Attributes:
      repositories: by name.
      users: the tokens that are known; others are refused.
      cdn: the server of the files in LFS, with faults and a log of its own.
      expiry: seconds that its URLs work.
      page: entries of a page of a list, a tree or a history.
      resolve_cache: whether small files are redirected too, on this host, as the hub does now.
      renamed: the names that repositories have now, by their former ones.
      writers: the tokens that may make repositories.
      clock: what time it is; for the dates of commits and the URLs that expire.
    """

    SETTINGS = ("faults", "expiry", "page", "resolve_cache")

    def __init__(self, port: int = 0) -> None:
        super().__init__(port)
        self.clock: Callable[[], float] = time.time
        self.cdn = Cdn(lambda: self.clock())
        self.repositories: dict[str, Repository] = {}
        self.users: set[str] = set()
        self.writers: set[str] = set()
        self.expiry = 3600.0
        self.page = 1000
        self.renamed: dict[str, str] = {}
        self.resolve_cache = False
        self._routes = [
            ("GET", "/api/whoami-v2", self._whoami),
            ("GET", "/api/models", self._list),
            ("GET", MODEL, self._info),
            ("GET", MODEL + "/revision/([^/]+)", self._info),
            ("GET", MODEL + "/refs", self._refs),
            ("GET", MODEL + "/commits/([^/]+)", self._commits),
            ("GET", MODEL + "/tree/([^/]+)" + FOLDERS, self._tree),
            ("POST", MODEL + "/paths-info/([^/]+)", self._paths),
            ("GET", MODEL + "/auth-check", self._check),
            ("POST", "/api/repos/create", self._create),
            ("POST", "/api/validate-yaml", self._validate),
            ("POST", MODEL + "/branch/([^/]+)", self._branch),
            ("DELETE", MODEL + "/branch/([^/]+)", self._unbranch),
            ("GET", MODEL + "/discussions", self._discussions),
            ("POST", MODEL + "/discussions/([^/]+)/status", self._status),
            ("POST", MODEL + "/preupload/([^/]+)", self._preupload),
            ("POST", "/([^/]+/[^/]+).git/info/lfs/objects/batch", self._batch),
            ("POST", MODEL + "/commit/([^/]+)", self._receive),
            ("GET HEAD", "/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self._resolve),
            ("GET HEAD", "/api/resolve-cache/models/([^/]+/[^/]+)/([^/]+)/(.+)", self._cached),
        ]

    def start(self) -> None:
        super().start()
        self.cdn.start()

    def stop(self) -> None:
        super().stop()
        self.cdn.stop()
        self.errors += self.cdn.errors

    @property
    def traffic(self) -> Log:
        """The log of both servers. Files are `organisation/name/path` in it."""
        return Log([*self.log, *self.cdn.log])

    def control(self, call: Call) -> Reply:
        """The other server has an endpoint of its own."""
        reply = super().control(call)
        return json_reply(reply.status, json.loads(bytes(reply.body)) | {"cdn": self.cdn.url})

    def env(self, token: str | None = None) -> dict[str, str]:
        """The environment variables that send huggingface_hub here; it reads them when it is imported."""
        return {"HF_ENDPOINT": self.url, "HF_HUB_DISABLE_TELEMETRY": "1"} | ({"HF_TOKEN": token} if token else {})

    def held(self, name: str, branch: str = "main") -> dict[str, bytes]:
        """The files of a branch, but for git's own."""
        files = self.repositories[name].branches[branch].files
        return {file: bytes(blob.data) for file, blob in files.items() if file != ".gitattributes"}

    def add(
        self,
        name: str,
        folder: Path | None = None,
        files: Iterable[str] | None = None,
        *,
        gated: Literal[False, "auto", "manual"] = False,
        private: bool = False,
        card: Mapping[str, Any] | None = None,
        labels: Iterable[str] = ("transformers", "safetensors"),
    ) -> Repository:
        """Makes a repository, with a commit of the folder's files, or of some of them.

        Args:
          card: the metadata at the head of its README, such as `{"license": "mit"}`.
        """
        made = Repository(name, self._now(), gated, private, dict(card or {}), tuple(labels))
        made.commit(
            {".gitattributes": Blob(b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n", lfs=False)},
            "main",
            "initial commit",
            self._now(),
        )
        with self.lock:
            self.repositories[name] = made
        if folder is not None:
            self.commit(name, folder, files)
        return made

    def commit(
        self,
        name: str,
        folder: Path,
        files: Iterable[str] | None = None,
        *,
        remove: Iterable[str] = (),
        branch: str = "main",
        title: str = "Upload",
    ) -> str:
        """Commits a folder's files, or some of them, to a branch; returns the commit's hash. Files must not be written
        in place afterwards.
        """
        paths = (
            sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
            if files is None
            else list(files)
        )
        blobs: dict[str, Blob | None] = {path: Blob.of(folder / path) for path in paths}
        with self.lock:
            return self.repositories[name].commit(blobs | dict.fromkeys(remove), branch, title, self._now()).sha

    def allow(self, token: str, *names: str) -> str:
        """Makes a token known, with access to these repositories; returns it."""
        self.users.add(token)
        for name in names:
            self.repositories[name].readers.add(token)
        return token

    def answer(self, call: Call) -> Reply:
        for old, new in self.renamed.items():
            if match := re.match(rf"(/api/models)?/{old}(?=[/.]|$)", call.path):
                place = (
                    f"{match[1] or ''}/{new}{call.path[match.end() :]}?{urllib.parse.urlencode(call.query, doseq=True)}"
                )
                return Reply(307, b"Temporary Redirect", {"Location": place.rstrip("?")}, "renamed", old)
        function, parts = route(self._routes, call.method, call.path)
        try:
            token = self._token(call)
            with self.lock:
                reply = function(call, token, *parts)
        except DeniedError as e:
            reply = e.reply
        if reply.kind == "other":
            reply.kind = function.__name__.strip("_")
        reply.name = reply.name or "/".join([*parts[:1], *parts[2:]])
        return reply

    def refusal(self, fault: Fault) -> Reply:
        if fault.status != 429:
            return super().refusal(fault)
        seconds = fault.retry_after or 0
        limits = {"RateLimit": f'"api";r=0;t={seconds}', "RateLimit-Policy": '"fixed window";"api";q=1000;w=300'}
        wait = {} if fault.retry_after is None else {"Retry-After": str(seconds)}
        message = "We had to rate limit your IP. To continue using our service, create a HF account or login to your existing account."
        return json_reply(429, {"error": message}, limits | wait | {"X-Error-Message": message})

    def _now(self) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(self.clock(), datetime.UTC)

    # --- who may see what

    def _token(self, call: Call) -> str | None:
        """Raises DeniedError (401) for a token that isn't known."""
        match = re.fullmatch(r"Bearer (\S+)", call.headers["Authorization"] or "")
        if match and match[1] not in self.users:
            raise DeniedError(401, "", "Invalid credentials in Authorization header")
        return match[1] if match else None

    def _repository(self, token: str | None, name: str) -> Repository:
        """Raises DeniedError if there is none, or it is private: strangers aren't told which."""
        found = self.repositories.get(name)
        if found is None or (found.private and token not in found.readers):
            if token is not None:
                raise DeniedError(404, "RepoNotFound", "Repository not found")
            # Without a code, the stock client would know what is meant by the URL, but only at https:// addresses.
            raise DeniedError(401, "RepoNotFound", "Invalid username or password.")
        return found

    def _admit(self, token: str | None, repository: Repository) -> None:
        """Raises DeniedError if the files are gated; what a gated repository holds may be seen by all."""
        if not repository.gated or token in repository.readers:
            return
        restricted = f"Access to model {repository.name} is restricted"
        if token is None:
            raise DeniedError(
                401,
                "GatedRepo",
                f"{restricted}. You must have access to it and be authenticated to access it. Please log in.",
            )
        visit = f"https://huggingface.co/{repository.name}"
        raise DeniedError(
            403, "GatedRepo", f"{restricted} and you are not in the authorized list. Visit {visit} to ask for access."
        )

    def _commit(self, repository: Repository, revision: str) -> Commit:
        found = repository.find(revision)
        if found is None:
            raise DeniedError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return found

    # --- about models

    def _paged(self, call: Call, items: list[Any], size: int | None = None) -> Reply:
        """A page of a list, and where the next is."""
        size = min(self.page, size or self.page)
        start = int(call.get("cursor") or 0)
        query = urllib.parse.urlencode({**call.query, "cursor": start + size}, doseq=True)
        link = {"Link": f'<{self.url}{call.path}?{query}>; rel="next"'} if start + size < len(items) else {}
        return json_reply(200, items[start : start + size], link)

    def _whoami(self, call: Call, token: str | None) -> Reply:
        if token is None:
            raise DeniedError(401, "", "Invalid username or password.")
        writers = self.writers.union(*(repository.writers for repository in self.repositories.values()))
        role = "write" if token in writers else "read"
        return json_reply(
            200,
            dict(
                type="user",
                id="1",
                name="tester",
                auth=dict(type="access_token", accessToken=dict(displayName="test", role=role)),
            ),
        )

    def _list(self, call: Call, token: str | None) -> Reply:
        infos = []
        for repository in self.repositories.values():
            if repository.private and token not in repository.readers:
                continue
            info = repository.info(repository.head)
            if (author := call.get("author")) and info["author"] != author:
                continue
            if (search := call.get("search")) and search.lower() not in repository.name.lower():
                continue
            if not set(call.query.get("filter", [])) <= set(info["tags"]):
                continue
            if (gated := call.get("gated")) and (gated == "true") != bool(repository.gated):
                continue
            infos.append(info)
        field = SORTS[call.get("sort") or "trendingScore"]
        infos.sort(key=lambda info: info[field], reverse=call.get("direction") != "1")
        extra = [name for name, option in (("cardData", "cardData"), ("config", "config")) if call.get(option)]
        fields = (
            {"id", "_id", *call.query["expand"]}
            if "expand" in call.query
            else {*(FULL if call.get("full") else BRIEF), *extra}
        )
        limit = call.get("limit")
        items = [{name: value for name, value in info.items() if name in fields} for info in infos]
        return self._paged(call, items, int(limit) if limit else None)

    def _info(self, call: Call, token: str | None, name: str, revision: str = "main") -> Reply:
        repository = self._repository(token, name)
        commit = self._commit(repository, revision)
        info = repository.info(commit, blobs=bool(call.get("blobs")))
        wanted = call.query.get("expand")
        content = {key: value for key, value in info.items() if key in ("_id", "id", *wanted)} if wanted else info
        return json_reply(200, content, {"X-Repo-Commit": commit.sha})

    def _refs(self, call: Call, token: str | None, name: str) -> Reply:
        repository = self._repository(token, name)

        def listed(kind: str, refs: Mapping[str, Commit]) -> list[dict[str, str]]:
            return [dict(name=ref, ref=f"refs/{kind}/{ref}", targetCommit=commit.sha) for ref, commit in refs.items()]

        content = dict(branches=listed("heads", repository.branches), converts=[], tags=listed("tags", repository.tags))
        return json_reply(200, content | ({"pullRequests": []} if call.get("include_prs") else {}))

    def _commits(self, call: Call, token: str | None, name: str, revision: str) -> Reply:
        history = self._commit(self._repository(token, name), revision).history()
        items = [
            dict(id=one.sha, title=one.title, message="", date=isotime(one.date), authors=[{"user": "tester"}])
            for one in history
        ]
        return self._paged(call, items)

    def _tree(self, call: Call, token: str | None, name: str, revision: str, folder: str) -> Reply:
        commit = self._commit(self._repository(token, name), revision)
        found = tree(commit, folder, call.get("recursive") == "true", call.get("expand") == "true")
        if found is None:
            raise DeniedError(404, "EntryNotFound", f'{folder} does not exist on "{revision}"', commit)
        return self._paged(call, found)

    def _paths(self, call: Call, token: str | None, name: str, revision: str) -> Reply:
        commit = self._commit(self._repository(token, name), revision)
        form = urllib.parse.parse_qs(call.body.decode())
        expand = form.get("expand", [""])[-1].lower() == "true"
        found = []
        for path in form.get("paths", []):
            below = [blob for other, blob in commit.files.items() if other.startswith(f"{path}/")]
            if path in commit.files or below:
                found.append(entry(path, commit.files.get(path) or below, commit, expand))
        return json_reply(200, found)

    def _check(self, call: Call, token: str | None, name: str) -> Reply:
        self._admit(token, self._repository(token, name))
        return json_reply(200, {})

    # --- files

    def _resolve(self, call: Call, token: str | None, name: str, revision: str, path: str) -> Reply:
        """A file, or where it is."""
        repository = self._repository(token, name)
        self._admit(token, repository)
        commit = self._commit(repository, revision)
        blob = commit.files.get(path)
        if blob is None:
            raise DeniedError(404, "EntryNotFound", "Entry not found", commit)
        headers = {"X-Repo-Commit": commit.sha, "ETag": blob.etag, "Accept-Ranges": "bytes"}
        where = f"{name}/{path}"
        if blob.lfs:
            linked = {"X-Linked-Size": str(len(blob.data)), "X-Linked-ETag": blob.etag, "ETag": f'"{blob.oid}"'}
            location = self.cdn.link(where, blob, self.clock() + self.expiry)
            return Reply(
                302,
                f"Found. Redirecting to {location}".encode(),
                headers | linked | {"Location": location},
                "resolve",
                where,
            )
        if self.resolve_cache:
            location = f"/api/resolve-cache/models/{name}/{commit.sha}/{urllib.parse.quote(path)}?etag={urllib.parse.quote(blob.etag)}"
            linked = {"X-Linked-Size": str(len(blob.data)), "X-Linked-ETag": blob.etag}
            return Reply(307, b"Temporary Redirect", headers | linked | {"Location": location}, "resolve", where)
        return media(blob.data, call, headers, where)

    # --- uploads

    def _may_write(self, token: str | None, name: str) -> Repository:
        """Raises DeniedError for who may not commit."""
        repository = self._repository(token, name)
        if token is None or token not in repository.writers:
            raise DeniedError(
                401 if token is None else 403, "", "You don't have the rights to commit to this repository"
            )
        return repository

    def _create(self, call: Call, token: str | None) -> Reply:
        asked = json.loads(call.body)
        name = f"{asked['organization'] or 'tester'}/{asked['name']}"
        if token not in self.writers:
            raise DeniedError(
                401 if token is None else 403, "", "You don't have the rights to create a model under this namespace"
            )
        if name in self.repositories:
            return json_reply(409, {"error": "You already created this model repo", "url": f"{self.url}/{name}"})
        assert token is not None
        made = self.add(name, private=asked.get("visibility") == "private")
        made.readers.add(token)
        made.writers.add(token)
        return json_reply(200, {"url": f"{self.url}/{name}", "name": name, "id": name})

    def _validate(self, call: Call, token: str | None) -> Reply:
        bad = "license: [" in json.loads(call.body)["content"]
        return json_reply(
            400 if bad else 200, {"errors": [{"message": "license must be a string"}] if bad else [], "warnings": []}
        )

    def _branch(self, call: Call, token: str | None, name: str, branch: str) -> Reply:
        repository = self._may_write(token, name)
        if branch in repository.branches:
            raise DeniedError(409, "", "Reference already exists")
        start = json.loads(call.body or b"{}").get("startingPoint", "main")
        repository.branches[branch] = self._commit(repository, start)
        return json_reply(200, {})

    def _unbranch(self, call: Call, token: str | None, name: str, branch: str) -> Reply:
        repository = self._may_write(token, name)
        if repository.branches.pop(branch, None) is None:
            raise DeniedError(404, "RevisionNotFound", f"Invalid rev id: {branch}")
        return json_reply(200, {})

    def _discussions(self, call: Call, token: str | None, name: str) -> Reply:
        """A page of them, the newest first; the number of the page is counted from 0."""
        repository = self._repository(token, name)
        about = dict(isPullRequest=True, repo=dict(name=name, type="model"))
        found = [
            about
            | dict(author=dict(name=repository.authors.get(number, "tester")))
            | dict(title=repository.titles.get(number, made.title), num=number, createdAt=isotime(made.date))
            | dict(status=repository.statuses.get(number, "open"))
            for number, made in enumerate(repository.pulls, 1)
        ]
        wanted = call.get("status") or "all"
        found = [each for each in found if wanted == "all" or (each["status"] == "open") == (wanted == "open")][::-1]
        found = [] if call.get("type") == "discussion" else found
        size = min(self.page, 10)
        start = int(call.get("p") or 0) * size
        return json_reply(200, dict(discussions=found[start : start + size], count=len(found), start=start))

    def _status(self, call: Call, token: str | None, name: str, number: str) -> Reply:
        """Closes a pull request, or opens it again."""
        repository = self._may_write(token, name)
        status = repository.statuses[int(number)] = json.loads(call.body)["status"]
        event = dict(id=number, type="status-change", createdAt=isotime(self._now()), author=dict(name="tester"))
        return json_reply(200, {"newStatus": event | {"data": {"status": status}}})

    def _preupload(self, call: Call, token: str | None, name: str, revision: str) -> Reply:
        """Which files go to LFS: by name or size, as `.gitattributes` says; what git has of those that are there; and
        which `.gitignore` names, the repository's unless the client sends one.
        """
        repository = self._may_write(token, name)
        there = self._commit(repository, revision).files
        asked = json.loads(call.body)
        held = there.get(".gitignore")
        ignore = asked.get("gitIgnore") or (bytes(held.data).decode() if held else "")
        files = []
        for file in asked["files"]:
            ignored = any(fnmatch.fnmatch(file["path"], line) for line in ignore.splitlines())
            lfs = Path(file["path"]).suffix in LFS_SUFFIXES or file["size"] > LFS_SIZE
            blob = there.get(file["path"])
            oid = None if blob is None else blob.sha256 if blob.lfs else blob.oid
            files.append(dict(path=file["path"], uploadMode="lfs" if lfs else "regular", shouldIgnore=ignored, oid=oid))
        return json_reply(200, {"files": files})

    def _batch(self, call: Call, token: str | None, name: str) -> Reply:
        """Where to upload each object; nothing for those that are there."""
        self._may_write(token, name)
        objects = []
        for each in json.loads(call.body)["objects"]:
            actions = (
                {}
                if each["oid"] in self.cdn.uploads
                else {"actions": {"upload": {"href": self.cdn.place(each["oid"], each["size"]), "header": {}}}}
            )
            objects.append(each | actions)
        return json_reply(200, {"transfer": "basic", "objects": objects})

    def _receive(self, call: Call, token: str | None, name: str, revision: str) -> Reply:
        """A commit, as lines of JSON: all of it, or nothing."""
        repository = self._may_write(token, name)
        lines = [json.loads(line) for line in call.body.splitlines()]
        (header,) = (line["value"] for line in lines if line["key"] == "header")
        head, named = self._commit(repository, revision), header.get("parentCommit")
        if named and call.get("create_pr"):  # it begins there
            head = self._commit(repository, named)
        if named not in (None, head.sha):
            raise DeniedError(412, "", "A commit has happened since. Please refresh and try again.")
        files: dict[str, Blob | None] = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = Blob(base64.b64decode(value["content"]), lfs=False)
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.cdn.uploads:
                    raise DeniedError(400, "", f"LFS object {value['oid']} isn't there")
                files[value["path"]] = self.cdn.uploads[value["oid"]]
            elif line["key"] == "deletedFile":
                if value["path"] not in head.files:
                    raise DeniedError(404, "EntryNotFound", "A file with this name doesn't exist")
                files[value["path"]] = None
        reply = {"success": True}
        if call.get("create_pr"):
            made = repository.prepare(files, revision, header["summary"], self._now(), head)
            repository.pulls.append(made)
            reply |= {"pullRequestUrl": f"{self.url}/{name}/discussions/{len(repository.pulls)}"}
        else:
            made = repository.commit(files, revision, header["summary"], self._now())
        return json_reply(200, reply | {"commitUrl": f"{self.url}/{name}/commit/{made.sha}", "commitOid": made.sha})

    def _cached(self, call: Call, token: str | None, name: str, revision: str, path: str) -> Reply:
        """A small file, once more."""
        repository = self._repository(token, name)
        self._admit(token, repository)
        commit = self._commit(repository, revision)
        return media(
            commit.files[path].data,
            call,
            {"X-Repo-Commit": commit.sha, "ETag": commit.files[path].etag},
            f"{name}/{path}",
        )


def _xml(status: int, code: str, message: str, name: str) -> Reply:
    """An error as an object store says it."""
    body = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'
    return Reply(status, body.encode(), {"Content-Type": "application/xml"}, "refused", name)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--folder", type=Path, help="has a folder for each organisation, with one for each model")
    arguments = made.parse_args()
    server = FakeHub(arguments.port)
    for folder in sorted(arguments.folder.glob("*/*")) if arguments.folder else []:
        server.add(folder.relative_to(arguments.folder).as_posix(), folder)
    serve(server)


if __name__ == "__main__":
    main()
