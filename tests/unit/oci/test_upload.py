"""Blobs in parts: what was sent or received is not sent again, and other bytes are never taken."""

from __future__ import annotations

import email.utils
import hashlib
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from small_registry import Answer, repository, reset, serving
from stackcheck.oci import transport, upload
from stackcheck.oci.documents import CHUNK_BYTES, Descriptor, IntegrityError, RegistryError, sha256

BODY = bytes(range(256)) * 10
BLOB = Descriptor(media_type="x", digest="sha256:" + hashlib.sha256(BODY).hexdigest(), size=len(BODY))


@pytest.fixture(autouse=True)
def small_parts(monkeypatch) -> None:
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


def test_a_large_blob_is_sent_in_parts_each_once():
    registry = sent(Registry(lambda *_: None))
    assert registry.stored == BODY
    assert registry.received == len(BODY)
    assert registry.step == 4  # one begin, three parts


def test_of_a_part_that_broke_off_only_the_rest_is_sent_again():
    def fault(registry: Registry, command: str, body: bytes) -> Answer | None:
        if command == "PATCH" and len(registry.held) == 1000 and len(body) == 1000:
            registry.held += body[:400]
            return 404, {}, b""
        return None

    registry = sent(Registry(fault))
    assert registry.stored == BODY
    assert registry.received == len(BODY) + 600


def test_a_part_whose_answer_was_lost_is_not_sent_again():
    def fault(registry: Registry, command: str, body: bytes) -> Answer | None:
        if command == "PATCH" and len(registry.held) == 1000:
            registry.held += body
            return 404, {}, b""
        return None

    registry = sent(Registry(fault))
    assert (registry.stored, registry.received) == (BODY, len(BODY))


def test_an_upload_that_the_registry_forgot_starts_again():
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


def test_a_registry_that_never_takes_a_part_is_a_clear_error():
    def fault(_registry: Registry, command: str, _body: bytes) -> Answer | None:
        return (403, {}, b"") if command == "PATCH" else None

    with pytest.raises(RegistryError, match="refused access"):
        sent(Registry(fault))


@pytest.mark.parametrize(
    ("text", "seconds"), [("3", 3.0), ("600", 30.0), ("soon", 0.0), ("-1", 0.0), ("", 0.0)]
)
def test_a_rate_limit_is_waited_for_as_far_as_we_wait_at_all(text, seconds):
    waits = limited(text)
    assert waits == [pytest.approx(max(seconds, 0.01))]


def test_a_rate_limit_may_name_a_time():
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


SENT = bytes(range(256)) * (5 * CHUNK_BYTES // 512)  # two and a half chunks


def broken(
    handler: BaseHTTPRequestHandler, *, breaks: bool, ranges: bool = True, by_reset: bool = False
) -> Answer:
    """The blob, or the asked part of it; where it `breaks`, three quarters of that."""
    first = int((handler.headers.get("Range") or "bytes=0-").removeprefix("bytes=").removesuffix("-"))
    part = SENT[first if ranges else 0 :]
    headers = {"Content-Length": str(len(part)), "Connection": "close"}
    status = 206 if first and ranges else 200
    if status == 206:
        headers["Content-Range"] = f"bytes {first}-{len(SENT) - 1}/{len(SENT)}"

    def body() -> Iterator[bytes]:
        yield part[: 3 * len(part) // 4] if breaks else part
        handler.close_connection = True
        if breaks and by_reset:
            handler.wfile.flush()
            reset(handler)

    return status, headers, body()


@pytest.mark.parametrize("by_reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("ranges", [True, False], ids=["with ranges", "without ranges"])
def test_a_blob_that_breaks_off_twice_is_resumed_and_not_begun_again(by_reset, ranges):
    asked: list[str | None] = []

    def answer(handler: BaseHTTPRequestHandler) -> Answer:
        asked.append(handler.headers.get("Range"))
        return broken(handler, breaks=len(asked) <= 2, ranges=ranges, by_reset=by_reset)

    with serving(answer) as (host, _):
        assert b"".join(repository(host).read_blob(sha256(SENT))) == SENT
    assert len(asked) == 3
    assert asked[0] is None
    if not by_reset:  # a reset may take back what was under way
        third = (2 if ranges else 1) * CHUNK_BYTES
        assert asked[1:] == [f"bytes={CHUNK_BYTES}-", f"bytes={third}-"]


def test_a_blob_that_breaks_off_each_time_is_asked_three_times_and_then_an_error():
    with serving(lambda handler: broken(handler, breaks=True)) as (host, seen):
        with pytest.raises(RegistryError, match="cannot be reached") as error:
            list(repository(host).read_blob(sha256(SENT)))
        assert len(seen) == 3
    assert "run the same command again" in str(error.value)


def test_another_part_than_the_one_asked_for_is_an_error_and_is_not_joined():
    def answer(handler: BaseHTTPRequestHandler) -> Answer:
        status, headers, body = broken(handler, breaks="Range" not in handler.headers)
        told = {"Content-Range": f"bytes 0-{len(SENT) - 1}/{len(SENT)}"} if status == 206 else {}
        return status, headers | told, body

    with serving(answer) as (host, _), pytest.raises(RegistryError, match="another part") as error:
        list(repository(host).read_blob(sha256(SENT)))
    assert "bytes 0-" in (error.value.got or "")


def test_a_resumed_blob_of_other_bytes_is_refused():
    def answer(handler: BaseHTTPRequestHandler) -> Answer:
        first = "Range" not in handler.headers
        status, headers, body = broken(handler, breaks=first)
        return status, headers, body if first else (part.replace(b"\1", b"\2") for part in body)

    with serving(answer) as (host, _), pytest.raises(IntegrityError):
        list(repository(host).read_blob(sha256(SENT)))
