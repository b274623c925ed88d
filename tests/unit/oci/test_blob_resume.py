"""A download of a blob that breaks off: resumed where it did, or a clear error; never other bytes."""

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

import pytest

from small_registry import Answer, repository, reset, serving
from stackcheck.oci.documents import CHUNK_BYTES, IntegrityError, RegistryError, sha256

BLOB = bytes(range(256)) * (5 * CHUNK_BYTES // 512)  # two and a half chunks


def broken(
    handler: BaseHTTPRequestHandler, *, breaks: bool, ranges: bool = True, by_reset: bool = False
) -> Answer:
    """The blob, or the asked part of it; where it `breaks`, three quarters of that."""
    first = int((handler.headers.get("Range") or "bytes=0-").removeprefix("bytes=").removesuffix("-"))
    part = BLOB[first if ranges else 0 :]
    headers = {"Content-Length": str(len(part)), "Connection": "close"}
    status = 206 if first and ranges else 200
    if status == 206:
        headers["Content-Range"] = f"bytes {first}-{len(BLOB) - 1}/{len(BLOB)}"

    def body() -> Iterator[bytes]:
        yield part[: 3 * len(part) // 4] if breaks else part
        handler.close_connection = True
        if breaks and by_reset:
            handler.wfile.flush()
            reset(handler)

    return status, headers, body()


@pytest.mark.parametrize("by_reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("ranges", [True, False], ids=["with ranges", "without ranges"])
def test_a_blob_that_breaks_off_twice_is_resumed_and_not_begun_again(by_reset: bool, ranges: bool) -> None:
    asked: list[str | None] = []

    def answer(handler: BaseHTTPRequestHandler) -> Answer:
        asked.append(handler.headers.get("Range"))
        return broken(handler, breaks=len(asked) <= 2, ranges=ranges, by_reset=by_reset)

    with serving(answer) as (host, _):
        assert b"".join(repository(host).read_blob(sha256(BLOB))) == BLOB
    assert len(asked) == 3
    assert asked[0] is None
    if not by_reset:  # a reset may take back what was under way
        third = (2 if ranges else 1) * CHUNK_BYTES
        assert asked[1:] == [f"bytes={CHUNK_BYTES}-", f"bytes={third}-"]


def test_a_blob_that_breaks_off_each_time_is_asked_three_times_and_then_an_error() -> None:
    with serving(lambda handler: broken(handler, breaks=True)) as (host, seen):
        with pytest.raises(RegistryError, match="cannot be reached") as error:
            list(repository(host).read_blob(sha256(BLOB)))
        assert len(seen) == 3
    assert "run the same command again" in str(error.value)


def test_another_part_than_the_one_asked_for_is_an_error_and_is_not_joined() -> None:
    asked: list[str | None] = []

    def answer(handler: BaseHTTPRequestHandler) -> Answer:
        asked.append(handler.headers.get("Range"))
        status, headers, body = broken(handler, breaks=len(asked) == 1)
        told = {"Content-Range": f"bytes 0-{len(BLOB) - 1}/{len(BLOB)}"} if status == 206 else {}
        return status, headers | told, body

    with serving(answer) as (host, _), pytest.raises(RegistryError, match="another part") as error:
        list(repository(host).read_blob(sha256(BLOB)))
    assert "bytes 0-" in (error.value.got or "")


def test_a_resumed_blob_of_other_bytes_is_refused() -> None:
    asked: list[str | None] = []

    def answer(handler: BaseHTTPRequestHandler) -> Answer:
        asked.append(handler.headers.get("Range"))
        status, headers, body = broken(handler, breaks=len(asked) == 1)
        return status, headers, body if len(asked) == 1 else (part.replace(b"\1", b"\2") for part in body)

    with serving(answer) as (host, _), pytest.raises(IntegrityError):
        list(repository(host).read_blob(sha256(BLOB)))
