"""The limits of a container follow the memory of the host; sources and packages of apt."""

import dataclasses
import itertools
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from stackcheck.engine import apt, container, host_setup, output
from stackcheck.engine.container import Mount, RunSpec
from stackcheck.errors import ChecksFailedError, EngineError

GIB = 1 << 30
MIB = 1 << 20
SPEC = RunSpec(image="x", command=("true",), tmpfs={"/tmp": "rw,exec", "/scratch": "rw"}, pids=512)


def test_each_tmpfs_has_a_size_of_its_own_and_memory_no_swap_on_top():
    """The kernel's own limit of a tmpfs is half of the memory today: only the words show that we ask."""
    found = container._limits({"MemTotal": 64 * GIB, "PidsLimit": 1, "MemoryLimit": 1, "SwapLimit": 1}, SPEC)
    assert found["tmpfs"] == {"/tmp": f"rw,exec,size={32 * GIB}", "/scratch": f"rw,size={32 * GIB}"}
    assert found["mem_limit"] == found["memswap_limit"] < 64 * GIB
    assert found["pids_limit"] == 512


@pytest.mark.parametrize("lacks", ["PidsLimit", "MemoryLimit", "SwapLimit"])
def test_a_limit_that_the_daemon_cannot_hold_is_not_asked_for(lacks):
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
def test_no_way_to_print_without_an_end_is_read_to_its_end(chunks):
    with pytest.raises(ChecksFailedError, match="printed too much"):
        printed(itertools.chain(chunks, itertools.repeat(b"never read")))


def test_a_line_in_a_thousand_chunks_is_one_line_and_each_stream_has_its_own():
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
def test_a_container_that_writes_too_much_is_refused(added, tmp_path, *, ends):
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


ASSETS = Path(__file__).parents[1] / "assets" / "apt"


@pytest.fixture
def etc_apt(tmp_path) -> Path:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "preferences.d").mkdir()
    return tmp_path


@pytest.fixture
def deb822(etc_apt: Path) -> Path:
    shutil.copy(ASSETS / "debian12.sources", etc_apt / "sources.list.d")
    return etc_apt


def test_only_enabled_binary_stanzas_count(deb822):
    assert [source.uris for source in apt.sources(deb822)] == [
        ("http://mirror.example.org/debian",),
        ("http://mirror.example.org/debian-security",),
    ]


def test_one_line_sources_keep_their_keyring(etc_apt):
    shutil.copy(ASSETS / "debian12.list", etc_apt / "sources.list")
    shutil.copy(ASSETS / "debian12.list", etc_apt / "sources.list.d" / "switched-off.list.disabled")
    assert apt.sources(etc_apt) == (
        apt.AptSource(
            uris=("http://mirror.example.org/debian",),
            suites=("bookworm",),
            components=("main", "contrib"),
            signed_by="/usr/share/keyrings/own.gpg",
        ),
    )


def test_another_suite_comes_from_the_hosts_own_mirror(deb822):
    source = apt.for_suite("trixie", folder=deb822)
    assert source.text() == (
        "Types: deb\nURIs: http://mirror.example.org/debian\nSuites: trixie\nComponents: main\n"
        "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n"
    )


def test_a_host_without_its_own_archive_is_told_what_to_write(etc_apt):
    with pytest.raises(EngineError) as caught:
        apt.for_suite("trixie", folder=etc_apt)
    assert "a source with a suite of Debian" in str(caught.value)


def test_the_second_source_is_pinned_away_but_for_the_engine(deb822, monkeypatch):
    monkeypatch.setattr(apt, "host_release", lambda: {"VERSION_CODENAME": "bookworm"})
    before = apt.sources(deb822)
    host_setup.add_pinned_source("trixie", ("docker.io", "docker-cli"), folder=deb822)
    pins = (deb822 / "preferences.d" / "stackcheck-engine").read_text()
    assert "Package: docker.io docker-cli\nPin: release n=trixie\nPin-Priority: 990" in pins
    assert "Package: *\nPin: release n=trixie\nPin-Priority: -1" in pins
    assert apt.sources(deb822) == before  # what this tool wrote is never taken for the host's own


def test_apts_files_are_read_in_any_encoding(tmp_path):
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d" / "key.gpg").write_bytes(b"\x99\xff")
    (tmp_path / "sources.list").write_bytes(b"# f\xfcr uns\ndeb http://host/debian bookworm main\n")
    assert [source.suites for source in apt.sources(tmp_path)] == [("bookworm",)]
