"""A Dataflow service that takes jobs and keeps them, as the stock client sends them by REST. It runs none: a job goes
through `states`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from servers.server import Call, Fault, Reply, Server, json_reply, route

JOBS = "/v1b3/projects/([^/]+)/locations/([^/]+)/jobs"
TOKEN = "/token"
ENDED = ("JOB_STATE_DONE", "JOB_STATE_FAILED", "JOB_STATE_CANCELLED")
TIME = "2026-01-01T00:00:00Z"


@dataclasses.dataclass
class Job:
    """A job.

    Attributes:
      sent: the request, to the byte.
      states: those that it still has to go through; the first is the current one.
    """

    id: str
    project: str
    region: str
    sent: bytes
    states: list[str]

    @functools.cached_property
    def request(self) -> dict[str, Any]:
        return json.loads(self.sent)

    @property
    def active(self) -> bool:
        return self.states[0] not in ENDED

    @property
    def resource(self) -> dict[str, Any]:
        """As the API describes it, without its environment."""
        about = {
            "projectId": self.project,
            "location": self.region,
            "id": self.id,
            "currentState": self.states[0],
            "createTime": TIME,
        }
        return about | {key: self.request[key] for key in ("name", "clientRequestId")}


class FakeDataflow(Server):
    """The service.

    Attributes:
      jobs: those that it took.
      states: what a new job goes through: the next one each time that it is asked for.
      message: what a job says when it fails.
      written: what the metrics say of the bytes that are written.
    """

    SETTINGS = ("faults", "states", "message", "written")

    def __init__(self, port: int = 0) -> None:
        super().__init__(port, "localhost")  # to which Beam's client speaks REST
        self.jobs: list[Job] = []
        self.states = ["JOB_STATE_DONE"]
        self.message = ""
        self.written = 0

    def env(self, folder: Path) -> dict[str, str]:
        """The environment variables that make Google's clients believe in an account, whose key is written to `folder`."""
        key = rsa.generate_private_key(65537, 2048).private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        account = dict(
            type="service_account", client_email="launcher@test.iam.gserviceaccount.com", private_key=key.decode(), private_key_id="1",
            project_id="test", token_uri=self.url + TOKEN,
        )  # fmt: skip
        file = folder / "account.json"
        file.write_text(json.dumps(account))
        return {"GOOGLE_APPLICATION_CREDENTIALS": str(file)}

    def answer(self, call: Call) -> Reply:
        one = f"{JOBS}/([^/]+)"
        routes = (
            ("POST", JOBS, self._create),
            ("GET", JOBS, self._list),
            ("GET", one, self._get),
            ("PUT", one, self._update),
            ("GET", f"{one}/messages", self._messages),
            ("GET", f"{one}/metrics", self._metrics),
            (
                "POST",
                TOKEN,
                lambda call: json_reply(
                    200, {"access_token": "for-a-test", "expires_in": 3600, "token_type": "Bearer"}, kind="token"
                ),
            ),
        )
        function, parts = route(routes, call.method, call.path)
        with self.lock:
            return function(call, *parts)

    def refusal(self, fault: Fault) -> Reply:
        return json_reply(
            fault.status, {"error": {"code": fault.status, "message": "a fault that was asked for", "status": "FAULT"}}
        )

    def _create(self, call: Call, project: str, region: str) -> Reply:
        """Takes a job; where one of that name is at work it is answered with that one, as the real service does."""
        job = Job(f"2026-01-01_00_00_00-{len(self.jobs) + 1}", project, region, call.body, list(self.states))
        known = [other for other in self.jobs if other.active and other.request["name"] == job.request["name"]]
        if known:
            return json_reply(200, known[0].resource, kind="refused")
        self.jobs.append(job)
        return json_reply(200, job.resource, kind="create", name=job.id)

    def _list(self, call: Call, project: str, region: str) -> Reply:
        """The jobs of a name, only the active ones where that is asked for."""
        name, active = call.get("name"), call.get("filter") in ("3", "ACTIVE")
        there = (
            job for job in self.jobs if (job.project, job.region) == (project, region) and (job.active or not active)
        )
        return json_reply(
            200, {"jobs": [job.resource for job in there if name in (None, job.request["name"])]}, kind="list"
        )

    def _find(self, *place: str) -> Job:
        return next(job for job in self.jobs if (job.project, job.region, job.id) == place)

    def _get(self, call: Call, *place: str) -> Reply:
        job = self._find(*place)
        reply = json_reply(200, job.resource, kind="get", name=job.id)
        if len(job.states) > 1:
            job.states.pop(0)
        return reply

    def _update(self, call: Call, *place: str) -> Reply:
        job = self._find(*place)
        job.states = ["JOB_STATE_CANCELLED"]
        return json_reply(200, job.resource, kind="update", name=job.id)

    def _messages(self, call: Call, *place: str) -> Reply:
        failed = self._find(*place).states[0] == "JOB_STATE_FAILED"
        message = {"id": "1", "time": TIME, "messageText": self.message, "messageImportance": "JOB_MESSAGE_ERROR"}
        return json_reply(200, {"jobMessages": [message] if failed else []}, kind="messages")

    def _metrics(self, call: Call, *place: str) -> Reply:
        name = {"origin": "user", "name": "bytes", "context": {"namespace": "WriteChunks", "step": "s1"}}
        updates = [
            {"name": name, "scalar": self.written},
            {"name": name | {"context": name["context"] | {"tentative": "true"}}, "scalar": 2 * self.written},
        ]
        return json_reply(200, {"metrics": updates}, kind="metrics")
