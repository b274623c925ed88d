"""Blobs in parts: what a registry has of one is not sent again, and a forgotten upload starts again."""

from __future__ import annotations

import email.utils
import hashlib
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from small_registry import Answer, repository, serving
from stackcheck.oci import transport, upload
from stackcheck.oci.documents import Descriptor, RegistryError

BODY = bytes(range(256)) * 10
BLOB = Descriptor(media_type="x", digest="sha256:" + hashlib.sha256(BODY).hexdigest(), size=len(BODY))


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "WHOLE_BYTES", 100)
    monkeypatch.setattr(upload, "PART_BYTES", 1000)


class Registry:
    """Uploads by parts, with relative addresses that change at each step, and faults."""

    def __init__(self, fault: Callable[[Registry, str, bytes], Answer | None]) -> None:
        self.fault, self.held, self.step, self.received = fault, bytearray(), 0, 0
        self.stored = b""

    def __call__(self, request: BaseHTTPRequestHandler) -> Answer:
        body: bytes = request.body  # type: ignore[attr-defined]
        self.received += len(body)
        answer = self.fault(self, request.command, body)
        return answer or getattr(self, f"on_{request.command.lower()}")(request, body)

    def at(self, status: int, **headers: str) -> Answer:
        self.step += 1
        return status, {"Location": f"/v2/a/b/blobs/uploads/u?_state={self.step}", **headers}, b""

    def on_post(self, _request: Any, _body: bytes) -> Answer:
        self.held.clear()
        return self.at(202)

    def on_patch(self, request: Any, body: bytes) -> Answer:
        first, _, last = request.headers["Content-Range"].partition("-")
        if int(first) != len(self.held) or int(last) - int(first) + 1 != len(body):
            return 416, {}, b""
        self.held += body
        return self.at(202)

    def on_get(self, _request: Any, _body: bytes) -> Answer:
        return self.at(204, Range=f"0-{max(len(self.held) - 1, 0)}")

    def on_put(self, _request: Any, body: bytes) -> Answer:
        self.stored = bytes(self.held) + body
        return 201, {}, b""


def sent(registry: Registry, body: bytes = BODY) -> Registry:
    with serving(registry) as (host, _seen):
        repository(host).write_blob(BLOB, lambda: [body[:700], body[700:]])
    return registry


def test_a_large_blob_is_sent_in_parts_each_once() -> None:
    registry = sent(Registry(lambda *_: None))
    assert registry.stored == BODY
    assert registry.received == len(BODY)
    assert registry.step == 4  # one begin, three parts


def test_of_a_part_that_broke_off_only_the_rest_is_sent_again() -> None:
    def fault(registry: Registry, command: str, body: bytes) -> Answer | None:
        if command == "PATCH" and len(registry.held) == 1000 and len(body) == 1000:
            registry.held += body[:400]
            return 404, {}, b""
        return None

    registry = sent(Registry(fault))
    assert registry.stored == BODY
    assert registry.received == len(BODY) + 600


def test_a_part_whose_answer_was_lost_is_not_sent_again() -> None:
    def fault(registry: Registry, command: str, body: bytes) -> Answer | None:
        if command == "PATCH" and len(registry.held) == 1000:
            registry.held += body
            return 404, {}, b""
        return None

    registry = sent(Registry(fault))
    assert (registry.stored, registry.received) == (BODY, len(BODY))


def test_an_upload_that_the_registry_forgot_starts_again() -> None:
    lost: list[str] = []

    def fault(registry: Registry, command: str, _body: bytes) -> Answer | None:
        if command == "PATCH" and len(registry.held) == 2000 and not lost:
            lost.append("x")
        if lost == ["x"] and command in {"PATCH", "GET"}:
            if command == "GET":
                lost.append("y")
            return 404, {}, b""
        return None

    assert sent(Registry(fault)).stored == BODY


def test_a_registry_that_never_takes_a_part_is_a_clear_error() -> None:
    def fault(_registry: Registry, command: str, _body: bytes) -> Answer | None:
        return (403, {}, b"") if command == "PATCH" else None

    with pytest.raises(RegistryError, match="refused access"):
        sent(Registry(fault))


@pytest.mark.parametrize(
    ("text", "seconds"), [("3", 3.0), ("600", 30.0), ("soon", 0.0), ("-1", 0.0), ("", 0.0)]
)
def test_a_rate_limit_is_waited_for_as_far_as_we_wait_at_all(text: str, seconds: float) -> None:
    waits = limited(text)
    assert waits == [pytest.approx(max(seconds, 0.01))]


def test_a_rate_limit_may_name_a_time() -> None:
    (wait,) = limited(email.utils.formatdate(time.time() + 20, usegmt=True))
    assert 10 < wait <= 20


def limited(text: str) -> list[float]:
    """How long a client waits where a registry answers 429 once."""
    waits: list[float] = []
    answers = iter([(429, {"Retry-After": text}, b""), (200, {}, b'{"tags": ["a"]}')])
    with serving(lambda _: next(answers)) as (host, _seen), pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport.time, "sleep", waits.append)
        assert repository(host).tags() == ("a",)
    return waits
