"""Packages that a stage unpacks: found by hash, asked for by name where a folder lacks them."""

import hashlib
from pathlib import Path

import pytest

from stackcheck.engine import apt, apt_archive
from stackcheck.errors import EngineError
from stackcheck.imaging.wheels import wheel_supply


def pinned(data: bytes) -> wheel_supply.Pinned:
    return wheel_supply.Pinned(
        name="amd-smi-lib", path="pool/a/x_1_amd64.deb", sha256=hashlib.sha256(data).hexdigest()
    )


def test_a_file_of_the_right_name_and_another_hash_is_none(tmp_path: Path) -> None:
    (tmp_path / "x_1_amd64.deb").write_bytes(b"other")
    assert wheel_supply.find([pinned(b"right")], [tmp_path], None) == {}
    (tmp_path / "x_1_amd64.deb").write_bytes(b"right")
    assert list(wheel_supply.find([pinned(b"right")], [tmp_path], None).values()) == [
        tmp_path / "x_1_amd64.deb"
    ]


def test_the_cache_is_looked_into_by_hash(tmp_path: Path) -> None:
    one = pinned(b"right")
    place = tmp_path / "wheels" / one.sha256 / one.file
    place.parent.mkdir(parents=True)
    place.write_bytes(b"right")
    assert wheel_supply.find([one], [], tmp_path) == {one: place}


def test_a_host_without_apt_says_where_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    source = apt.AptSource(
        uris=("https://me:hunter2@m.example.org/amd",), suites=("noble",), components=("main",)
    )
    with pytest.raises(EngineError, match="this host has no apt") as caught:
        apt_archive.find(source, "amd-smi-lib")
    assert "hunter2" not in str(caught.value)
    assert "m.example.org" in str(caught.value.where)
