"""The limits of a container follow the memory of the engine's host, and what its daemon can limit."""

import dataclasses
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from stackcheck.engine import container, output
from stackcheck.engine.container import Mount, RunSpec
from stackcheck.errors import ChecksFailedError

GIB = 1 << 30
MIB = 1 << 20
SPEC = RunSpec(image="x", command=("true",), tmpfs={"/tmp": "rw,exec", "/scratch": "rw"}, pids=512)


def test_each_tmpfs_has_a_size_of_its_own_and_memory_no_swap_on_top() -> None:
    """The kernel's own limit of a tmpfs is half of the memory today: only the words show that we ask."""
    found = container._limits({"MemTotal": 64 * GIB, "PidsLimit": 1, "MemoryLimit": 1, "SwapLimit": 1}, SPEC)
    assert found["tmpfs"] == {"/tmp": f"rw,exec,size={32 * GIB}", "/scratch": f"rw,size={32 * GIB}"}
    assert found["mem_limit"] == found["memswap_limit"] < 64 * GIB
    assert found["pids_limit"] == 512


@pytest.mark.parametrize("lacks", ["PidsLimit", "MemoryLimit", "SwapLimit"])
def test_a_limit_that_the_daemon_cannot_hold_is_not_asked_for(lacks: str) -> None:
    info: dict[str, Any] = {"MemTotal": GIB, "PidsLimit": True, "MemoryLimit": True, "SwapLimit": True}
    name = {"PidsLimit": "pids_limit", "MemoryLimit": "mem_limit", "SwapLimit": "memswap_limit"}[lacks]
    whole = container._limits(info, SPEC)
    assert container._limits(info | {lacks: False}, SPEC) == {k: v for k, v in whole.items() if k != name}


def printed(chunks: Iterable[bytes]) -> list[str]:
    lines: list[str] = []
    output.read(((chunk, None) for chunk in chunks), lines.append, "a test")
    return lines


@pytest.mark.parametrize(
    "chunks",
    [
        [b"x" * MIB] * 17,  # one line without an end
        [b"\n" * MIB] * 2,  # nothing but lines
        [b"x" * (MIB - 1) + b"\n"] * 257,
        [b"x\r" * (MIB // 2)] * 17,  # a bar that is drawn again and again, in one line
        [b"x" * 10 + b"\n"] * (output.LINES + 1),
        [b"\0" * 7 * MIB + b"\n"] * 37,
    ],
    ids=["one line", "line breaks", "bytes", "carriage returns", "small chunks", "nulls"],
)
def test_no_way_to_print_without_an_end_is_read_to_its_end(chunks: list[bytes]) -> None:
    with pytest.raises(ChecksFailedError, match="printed too much"):
        printed(itertools.chain(chunks, itertools.repeat(b"never read")))


def test_a_line_in_a_thousand_chunks_is_one_line_and_each_stream_has_its_own() -> None:
    assert printed([b"ab"] * 1000 + [b"\r\n", b"", b"end"]) == ["ab" * 1000, "end"]
    lines: list[str] = []
    frames = [(b"out ", None), (None, b"err "), (b"1\n", b"1\n"), (None, b"2")]
    output.read(frames, lines.append, "a test")
    assert lines == ["out 1", "err 1", "2"]


class Killed:
    killed = False

    def kill(self) -> None:
        self.killed = True


@pytest.mark.parametrize(("added", "ends"), [(0, False), (3000, False), (5 << 20, True)])
def test_a_container_that_writes_too_much_is_refused(added: int, tmp_path: Path, *, ends: bool) -> None:
    own, children = tmp_path / "run", tmp_path / "children"
    for folder in (own, children):
        folder.mkdir()
    mounts = (Mount(source=own, target="/b", read_only=False),)
    spec = dataclasses.replace(SPEC, mounts=mounts, quota_bytes=4 << 20, quota_folders=(children,))
    quota = container._Quota(Killed(), spec)  # type: ignore[arg-type]
    (children / "added").write_bytes(b"x" * added)
    if not ends:
        quota.check()
        return
    with pytest.raises(ChecksFailedError, match="wrote too much") as caught:
        quota.check()
    assert str(children) in str(caught.value)
