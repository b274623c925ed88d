"""The wheel cache against a real pip and a real index: once is enough, and nothing damaged is handed on."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from small_wheels import index_of, locked_line, make_wheel, only_index
from stackcheck.errors import FileError
from stackcheck.files import requirements
from stackcheck.imaging import platforms
from stackcheck.imaging.wheels import wheel_cache

TARGET = platforms.InstallTarget(platform="linux/amd64", python="3.11", glibc=36)


def test_a_damaged_wheel_is_taken_away_and_said(tmp_path, monkeypatch):
    wheel = make_wheel(tmp_path / "index")
    wanted = requirements.read_packages(locked_line(wheel))
    cache = wheel_cache.WheelCache(tmp_path / "cache")
    said: list[str] = []
    with index_of(wheel) as (address, fetched):
        only_index(monkeypatch, address)
        cache.fill(wanted, TARGET, ())
        (path,) = cache.find(wanted, print).values()
        path.write_bytes(b"half a whe")
        assert cache.find(wanted, said.append) == {}
        assert said == [f"{wheel.name} in the wheel cache is damaged: removed"]
        cache.fill(wanted, TARGET, ())
        assert len(fetched) == 2
    assert len(cache.find(wanted, print)) == 1


def test_every_package_that_cannot_be_had_is_named_and_the_others_arrive(tmp_path, monkeypatch):
    folder = tmp_path / "index"
    fits = make_wheel(folder)
    other = make_wheel(folder, "other_machine", tag="cp311-cp311-manylinux_2_17_aarch64")
    newer = make_wheel(folder, "newer_glibc", tag="cp311-cp311-manylinux_2_39_x86_64")
    wanted = requirements.read_packages("".join(map(locked_line, (other, fits, newer))))
    cache = wheel_cache.WheelCache(tmp_path / "cache")
    with index_of(fits, other, newer) as (address, _):
        only_index(monkeypatch, address)
        refused = cache.fill(wanted, TARGET, ())
        assert {package.name for package in refused} == {"other-machine", "newer-glibc"}
        assert all("No matching distribution" in why for why in refused.values())
        assert [path.name for path in cache.find(wanted, print).values()] == [fits.name]
        arm = platforms.InstallTarget(platform="linux/arm64", python="3.11", glibc=36)
        assert {package.name for package in cache.fill(wanted, arm, ())} == {"newer-glibc"}


def test_what_a_stage_handed_over_comes_back_whole_or_not_at_all(tmp_path):
    output = tmp_path / "output"
    make_wheel(output / "deep")
    cache = wheel_cache.WheelCache(tmp_path / "cache")
    assert cache.handed_over("k" * 64, print) is None
    cache.keep("k" * 64, output)
    cache.keep("k" * 64, output)  # another machine was as fast
    assert cache.has("k" * 64)
    folder = cache.handed_over("k" * 64, print)
    assert folder
    assert [path.name for path in folder.rglob("*.whl")] == ["small_package-1.0-py3-none-any.whl"]
    (folder / "added").write_text("")
    said: list[str] = []
    assert cache.handed_over("k" * 64, said.append) is None
    assert "is damaged: removed" in said[0]
    assert not cache.has("k" * 64)


def forge(stage: Path, *_: object) -> None:
    """What another user of the folder can do: write any file, and list its hash."""
    (stage / "files" / "kernel.so").write_bytes(b"EVIL")
    (stage / "files.json").write_text(json.dumps(wheel_cache._hashes(stage / "files")))


def copy_a_seal(stage: Path, *_: object) -> None:
    """The seal of another stage is about that stage."""
    other = stage.with_name("b" * 64)
    shutil.rmtree(stage)
    shutil.copytree(other, stage)


def take_the_seal_away(stage: Path, *_: object) -> None:
    (stage / "files.json.seal").unlink()


def seal_with_another_secret(stage: Path, cache: wheel_cache.WheelCache, key: str) -> None:
    cache.__dict__["_secret"] = b"x" * 32
    (stage / "files.json.seal").write_text(cache._seal(key, (stage / "files.json").read_bytes()))


@pytest.mark.parametrize("attack", [forge, copy_a_seal, take_the_seal_away, seal_with_another_secret])
def test_a_stage_that_another_user_of_the_folder_wrote_is_not_used(attack, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "out").mkdir()
    cache = wheel_cache.WheelCache(tmp_path / "cache")
    for key in ("a" * 64, "b" * 64):
        (tmp_path / "out" / "kernel.so").write_bytes(key.encode())
        cache.keep(key, tmp_path / "out")
    key = "a" * 64
    assert cache.handed_over(key, print)
    attack(cache._stage(key), wheel_cache.WheelCache(tmp_path / "cache"), key)
    said: list[str] = []
    assert wheel_cache.WheelCache(tmp_path / "cache").handed_over(key, said.append) is None
    assert "removed" in said[0]
    assert wheel_cache.secret_path().stat().st_mode & 0o077 == 0


def test_a_secret_that_others_can_read_seals_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    cache = wheel_cache.WheelCache(tmp_path / "cache")
    assert not cache.has("a" * 64)
    wheel_cache.secret_path().chmod(0o644)
    with pytest.raises(FileError, match="secret of the wheel cache"):
        wheel_cache.WheelCache(tmp_path / "cache").has("a" * 64)


def test_a_folder_that_cannot_be_written_is_named_with_a_way_on(tmp_path):
    (tmp_path / "file").write_text("")
    cache = wheel_cache.WheelCache(tmp_path / "file" / "cache")
    with pytest.raises(FileError, match="cannot write the wheel cache") as caught:
        cache.keep("k" * 64, tmp_path)
    assert "--wheel-cache DIR, or off" in str(caught.value)


def test_an_index_that_never_answers_is_a_reason(tmp_path, monkeypatch):
    def hang(command: list[str], *, timeout: float, **_options: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(wheel_cache.subprocess, "run", hang)
    refused = wheel_cache.WheelCache(tmp_path).fill(
        requirements.read_packages(f"a==1 --hash=sha256:{'0' * 64}"), TARGET, ()
    )
    assert list(refused.values()) == ["pip did not end within 3600 s"]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"STACKCHECK_WHEEL_CACHE": "/srv/shared", "XDG_CACHE_HOME": "/c"}, Path("/srv/shared")),
        ({"STACKCHECK_WHEEL_CACHE": "off", "XDG_CACHE_HOME": "/c"}, None),
        ({"XDG_CACHE_HOME": "/c"}, Path("/c/stackcheck/wheel-cache")),
        ({"HOME": "/home/u"}, Path("/home/u/.cache/stackcheck/wheel-cache")),
    ],
)
def test_the_environment_says_where(variables, expected, monkeypatch):
    for name in ("STACKCHECK_WHEEL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert wheel_cache.default_folder() == expected


def test_an_interrupted_download_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(_wanted: object, folder: Path, *_more: object) -> None:
        (folder / "half-1.0-py3-none-any.whl").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(wheel_cache, "_pip", interrupt)
    cache = wheel_cache.WheelCache(tmp_path / "cache")
    with pytest.raises(KeyboardInterrupt):
        cache.fill(requirements.read_packages(f"half==1.0 --hash=sha256:{'0' * 64}"), TARGET, ())
    assert list(cache.folder.iterdir()) == []
