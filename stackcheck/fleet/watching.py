"""Objects of Kubernetes, listed once and then watched. In: a path of its API. Out: the objects now.

The API server sends what changes (https://kubernetes.io/docs/reference/using-api/api-concepts/), through
`kubectl get --raw`, so kubectl's configuration and credentials are the user's own.
"""

import json
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from stackcheck.errors import EngineError

WATCH_S = 300  # then the server ends the answer, and the next one goes on from there
PAUSE_S = 1.0  # after an answer that ended at once
LISTS = 6  # that fail in a row end a run: API servers are away for a minute while they are upgraded
LONGEST_PAUSE_S = 30.0
# No answer, no kubectl; a line or a page that is no JSON, or JSON of another shape.
BROKEN = (EngineError, OSError, ValueError, LookupError, TypeError, AttributeError)
PAGE = 500
GONE = 410  # the server has forgotten so old a version


class _GoneError(Exception):
    """Only a new list helps."""


@dataclass(kw_only=True)
class Watched:
    """The objects at one path."""

    path: str  # `/api/v1/…`
    query: str  # a selector: `labelSelector=…`
    ask: Callable[[str], str]  # kubectl with some words, to its end: the text of the answer
    command: tuple[str, ...]  # kubectl, for an answer that does not end
    _found: dict[str, dict[str, Any]] = field(default_factory=dict)
    _version: str = ""
    _error: EngineError | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _child: subprocess.Popen[str] | None = None
    _over: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """List the objects, and follow them from there until `close`.

        Raises:
            EngineError: The cluster does not answer.
        """
        self._list()
        threading.Thread(target=self._follow, daemon=True).start()

    def items(self) -> list[dict[str, Any]]:
        """The objects as the server described them last.

        Raises:
            EngineError: It does not answer any more.
        """
        with self._lock:
            if self._error:
                raise self._error
            return list(self._found.values())

    def close(self) -> None:
        """Ask for nothing more."""
        self._over.set()
        if self._child:
            self._child.kill()

    def _url(self, **more: str) -> str:
        words = [self.query, *(f"{name}={quote(value)}" for name, value in more.items() if value)]
        return f"{self.path}?{'&'.join(filter(None, words))}"

    def _list(self) -> None:
        found, after = dict[str, dict[str, Any]](), ""
        while True:
            page = json.loads(self.ask(self._url(limit=str(PAGE), **{"continue": after})))
            found |= {item["metadata"]["name"]: item for item in page["items"]}
            after = page["metadata"].get("continue", "")
            if not after:
                break
        with self._lock:
            self._found, self._version = found, page["metadata"]["resourceVersion"]

    def _follow(self) -> None:
        missed, failed = False, 0
        while not self._over.is_set():
            begun = time.monotonic()
            try:
                if missed:
                    self._list()
                    missed, failed = False, 0
                self._watch()
            except _GoneError:
                missed = True
            except BROKEN as error:  # only a list tells
                failed += missed
                missed = True
                if failed >= LISTS:
                    self._fail(error)
                    return
                self._over.wait(min(PAUSE_S * 2**failed, LONGEST_PAUSE_S) if failed else 0)
            self._over.wait(max(0.0, begun + PAUSE_S - time.monotonic()))

    def _fail(self, error: Exception) -> None:
        """Tell who asks next: what is known here would only grow older."""
        wrong = EngineError(
            "the cluster's answer cannot be read",
            where=self.path,
            got=f"{type(error).__name__}: {error}",
            expected=f"a list of objects, after {LISTS} attempts",
            next_step="kubectl cluster-info",
        )
        with self._lock:
            self._error = error if isinstance(error, EngineError) else wrong

    def _watch(self) -> None:
        """Take what one answer tells."""
        seconds = str(WATCH_S)
        url = self._url(
            watch="true", resourceVersion=self._version, allowWatchBookmarks="true", timeoutSeconds=seconds
        )
        with subprocess.Popen(
            (*self.command, "get", "--raw", url),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for stackcheck, which then closes this
        ) as self._child:
            if self._over.is_set():
                self._child.kill()
            try:
                for line in self._child.stdout or ():
                    self._take(json.loads(line))
            finally:
                self._child.kill()
            if self._child.wait() > 0:  # refused: 410 as the answer itself, or a server that is away
                raise _GoneError

    def _take(self, event: Mapping[str, Any]) -> None:
        kind, item = event["type"], event["object"]
        if kind == "ERROR":
            raise _GoneError(item.get("code", GONE))
        with self._lock:
            self._version = item["metadata"]["resourceVersion"]
            if kind == "DELETED":
                self._found.pop(item["metadata"]["name"], None)
            elif kind != "BOOKMARK":
                self._found[item["metadata"]["name"]] = item
