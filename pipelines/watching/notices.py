"""Telling of every change of a state: a line in the log (`shell.JsonMessages` has its facts), and to webhooks and
Pub/Sub topics.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import requests
import tenacity

from weightbeam.formats.text.installing import install
from weightbeam.formats.text.printable import printable
from weightbeam.pipelines.terminal.errors import Refused
from weightbeam.pipelines.watching.records import SETTLED, Record, State

ATTEMPTS = 4
TIMEOUT = 10.0  # seconds of silence in an attempt
LONGEST = 30.0  # seconds that all of an attempt may take
MOST = 8  # attempts for one webhook that wait for an answer without an end, each a thread and a connection

_log = logging.getLogger("weightbeam.watch")


def text_of(record: Record) -> str:
    """A record as a sentence."""
    commit, target = record.get("commit"), record.get("target")
    what = record["repo"] + (f"@{commit[:12]}" if commit else "") + (f" for {target}" if target else "")
    where = f" in {record['checkpoint']}" if record["state"] == State.PUBLISHED and record.get("checkpoint") else ""
    return f"{what}: {record['state']}{where}" + (f": {record['reason']}" if record.get("reason") else "")


def _escaped(text: str) -> str:
    """A text as chats take it that read mentions and links between `<` and `>` (docs.slack.dev, "Formatting message
    text").
    """
    return printable(text, lines=True).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def note(record: Record) -> None:
    """Logs a state; on a terminal the next one takes its line, where there is nothing more to say of it."""
    passing = record["state"] not in (*SETTLED, State.FAILED) and not record.get("reason")
    level = logging.WARNING if record["state"] in (State.FAILED, State.HELD) else logging.INFO
    _log.log(level, text_of(record), extra={"facts": dict(record), "passing": passing})


def inform(message: str) -> None:
    """Logs what is no state, and nothing to worry about."""
    _log.info(message)


def warn(message: str) -> None:
    """Logs what isn't a state of a release."""
    _log.warning(message)


class Notices:
    """Where changes of states are told: webhooks (`https://…`) and topics (`projects/…/topics/…`)."""

    def __init__(self, sinks: Sequence[str]):
        self._webhooks = [sink for sink in sinks if "://" in sink]
        self._topics = [sink for sink in sinks if "://" not in sink]
        self._publisher: Any = _publisher() if self._topics else None

    def tell(self, record: Record) -> None:
        """Logs and sends a record. What can't be sent is logged, and stops nothing: the record is in the output."""
        note(record)
        message = {"text": _escaped(text_of(record)), **record}
        for number, url in enumerate(self._webhooks, 1):
            try:
                _post(url, message)
            except Exception as e:  # of the URL, or of the connection; its text has the URL, which may be a secret
                why = type(e).__name__ if (status := _status(e)) is None else f"answered {status}"
                warn(f"webhook {number} of notify wasn't told of {text_of(record)}: {why}")
        for topic in self._topics:
            try:
                attributes = {
                    name: str(record[name]) for name in ("state", "repo", "commit", "target") if name in record
                }
                self._publisher.publish(topic, json.dumps(message).encode(), **attributes).result(timeout=60)
            except Exception as e:  # of gRPC, of the credentials, or of the time that it took
                warn(f"{topic} wasn't told of {text_of(record)}: {type(e).__name__}: {e}")


def _publisher() -> Any:
    try:
        from google.cloud.pubsub_v1 import PublisherClient  # only now: it isn't needed elsewhere
    except ImportError as e:
        raise Refused(f"notify: a Pub/Sub topic needs google-cloud-pubsub: {install('gcp')}") from e
    from google.auth.exceptions import DefaultCredentialsError

    try:
        return PublisherClient()
    except DefaultCredentialsError as e:
        raise Refused(
            "notify: a Pub/Sub topic needs Google credentials; `gcloud auth application-default login` makes them"
        ) from e


class _Session(requests.Session):
    """Follows no redirect: it is nobody's word that the message has come. `allow_redirects=False` has requests read the
    answer whole, to say where it would go.
    """

    def get_redirect_target(self, resp: requests.Response) -> None:
        return None


def _status(error: BaseException) -> int | None:
    """What the receiver answered; None where it didn't."""
    answer = error.response if isinstance(error, requests.RequestException) else None
    return None if answer is None else answer.status_code


def _is_passing(error: BaseException) -> bool:
    if (status := _status(error)) is not None:
        return status in (408, 429) or status >= 500
    return isinstance(error, requests.RequestException | TimeoutError)


_UNANSWERED: dict[str, list[threading.Thread]] = {}  # this process's attempts, by URL


@tenacity.retry(
    retry=tenacity.retry_if_exception(_is_passing),
    wait=tenacity.wait_exponential_jitter(initial=0.5, max=10, jitter=0.5),
    stop=tenacity.stop_after_attempt(ATTEMPTS),
    reraise=True,
)
def _post(url: str, message: Record) -> None:
    """Delivers a message; of the answer only the head is read.

    Raises:
      requests.RequestException: it can't be delivered, or the answer is no success.
      TimeoutError: there was no answer in `LONGEST`, or to as many attempts as may wait for one.
    """
    waiting = _UNANSWERED[url] = [thread for thread in _UNANSWERED.get(url, ()) if thread.is_alive()]
    if len(waiting) >= MOST:
        raise TimeoutError
    answer: Future[requests.Response] = Future()

    def attempt() -> None:
        try:
            with _Session() as session:
                found = session.post(url, json=dict(message), timeout=TIMEOUT, stream=True)
                found.close()
            answer.set_result(found)
        except Exception as e:
            answer.set_exception(e)

    # on its own: an answer of a byte each second never falls silent
    waiting.append(threading.Thread(target=attempt, name="webhook", daemon=True))
    waiting[-1].start()
    found = answer.result(LONGEST)
    if not 200 <= found.status_code < 300:
        raise requests.HTTPError(response=found)
