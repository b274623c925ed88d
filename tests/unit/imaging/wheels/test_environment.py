"""Wheels made from an environment are what RECORD says, or refused; packages that a stage unpacks."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from stackcheck.engine import apt
from stackcheck.errors import BuildError, ConfigurationError, EngineError, FileError
from stackcheck.files import atomic, origins
from stackcheck.imaging.wheels import environment, wheel_supply
from stackcheck.imaging.wheels.environment import Made
from waits import run_program

SCRIPT = b"#!python\nprint('hello')\n"
FILES = {
    "thing/__init__.py": b"WORD = 'made here'\n",
    "thing/data,with comma.bin": bytes(range(256)),
    "thing_start.pth": b"# read by every interpreter\n",
    "thing-1.2.data/scripts/greet": SCRIPT,
    "thing-1.2.data/data/share/thing/table.txt": b"1 2 3\n",
    "thing-1.2.data/headers/thing.h": b"#define THING\n",
    "thing-1.2.dist-info/entry_points.txt": b"[console_scripts]\nthing = thing:main\n",
}


def make(folder: Path, name: str = "thing", version: str = "1.2", requires: str = "") -> Path:
    """A wheel as an index has it, compressed."""
    info = f"{name}-{version}.dist-info"
    members = dict(FILES) if name == "thing" else {f"{name}.py": b""}
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    members[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}".encode()
    members[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    lines = [f'"{n}",sha256={encoded(data)},{len(data)}' for n, data in members.items()]
    members[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,"]).encode()
    path = folder / f"{name}-{version}-py3-none-any.whl"
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in members.items():
            entry = zipfile.ZipInfo(member, (2020, 2, 2, 0, 0, 0))
            entry.external_attr = (0o100755 if "/scripts/" in member else 0o100644) << 16
            archive.writestr(entry, data)
    return path


def encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def install(python: Path, *wheels: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--no-index",
        "--no-deps",
        "-q",
    ]
    subprocess.run([*command, *map(str, wheels)], check=True, timeout=120, capture_output=True)


def content(wheel: Path) -> Mapping[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        assert {entry.compress_type for entry in archive.infolist()} == {zipfile.ZIP_STORED}
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """An environment with three packages that pip installed."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / "bin" / "python"
    wheels = folder / "wheels"
    install(
        python, make(wheels, requires="needed>=1"), make(wheels, "needed", "1.0"), make(wheels, "other", "3")
    )
    return python


@pytest.fixture
def python(original: Path, tmp_path) -> Path:
    """A copy of it that a test may damage."""
    subprocess.run(["cp", "-a", original.parents[1], tmp_path / "env"], check=True)
    return tmp_path / "env" / "bin" / "python"


def packages(python: Path) -> Path:
    (found,) = (python.parents[1] / "lib").glob("python*/site-packages")
    return found


def fill(folder: Path, python: Path, *wanted: str) -> Made:
    return environment.fill(folder, python, wanted=wanted, report=print)


def test_a_wheel_made_again_installs_the_same_files_and_is_the_same_file_in_every_run(original, tmp_path):
    made = fill(tmp_path / "a", original)
    again = fill(tmp_path / "b", original)
    assert made.written == (
        "needed-1.0-py3-none-any.whl",
        "other-3-py3-none-any.whl",
        "thing-1.2-py3-none-any.whl",
    )
    assert [w.sha256 for w in made.origins.wheels] == [w.sha256 for w in again.origins.wheels]
    found = content(tmp_path / "a" / "thing-1.2-py3-none-any.whl")
    assert {name: found[name] for name in FILES} == FILES
    assert not [name for name in found if name.endswith((".pyc", "INSTALLER", "REQUESTED", "bin/thing"))]
    venv.create(tmp_path / "second", with_pip=False)
    second = tmp_path / "second" / "bin" / "python"
    install(second, tmp_path / "a" / "thing-1.2-py3-none-any.whl")  # pip holds it to its new RECORD's form
    greeted = run_program([second.with_name("greet")], check=True, timeout=60)
    assert greeted.stdout == "hello\n"
    assert (tmp_path / "second/share/thing/table.txt").read_bytes() == b"1 2 3\n"
    for name in ("thing/__init__.py", "thing_start.pth"):
        assert (packages(second) / name).read_bytes() == FILES[name]


def test_only_what_a_stack_needs_is_made_and_a_given_wheel_is_preferred(original, tmp_path):
    given = make(tmp_path / "house", "needed", "2.0")
    made = fill(given.parent, original, "thing==1.2", "absent>=1")
    assert made.written == ("thing-1.2-py3-none-any.whl",)
    assert (made.given, made.absent) == (("needed-2.0-py3-none-any.whl",), ("absent>=1",))
    told = origins.load_origins(given.parent)
    assert told is not None
    assert {wheel.file: wheel.origin for wheel in told.wheels} == {
        "needed-2.0-py3-none-any.whl": "given",
        "thing-1.2-py3-none-any.whl": "environment",
    }
    assert "1 wheels made from the distributions installed in an environment" in told.words()
    assert "their hashes are not those of an index" in told.words()
    assert fill(given.parent, original, "thing==1.2").origins == told  # a second run makes no given ones


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("change", "thing/__init__.py: 14 bytes, RECORD says 19 bytes"),
        ("same size", "RECORD says sha256="),
        ("remove", "thing/__init__.py: no such file, RECORD says a file"),
        ("no record", "it has no RECORD, so nothing says which files are its own"),
        ("no hash", "its RECORD lists a file without a hash: thing/__init__.py (none)"),
        ("outside", "its RECORD lists a file outside the environment: "),
        ("editable", "it is installed as editable"),
        ("no tag", "its file WHEEL names no tag"),
    ],
)
def test_what_is_not_as_it_was_installed_is_refused_by_name_and_nothing_is_left(
    python, tmp_path, damage, says
):
    site = packages(python)
    info, file = site / "thing-1.2.dist-info", site / "thing" / "__init__.py"
    record = info / "RECORD"
    {
        "change": lambda: file.write_bytes(b"WORD = 'other'"),
        "same size": lambda: file.write_bytes(b"WORD = 'made HERE'\n"),
        "remove": file.unlink,
        "no record": record.unlink,
        "no hash": lambda: record.write_text("thing/__init__.py,,\n"),
        "outside": lambda: record.write_text(f"../../../../out.txt,sha256={encoded(b'')},0\n"),
        "editable": lambda: (info / "direct_url.json").write_text(
            json.dumps({"url": "file:///src/thing", "dir_info": {"editable": True}})
        ),
        "no tag": lambda: (info / "WHEEL").write_text("Wheel-Version: 1.0\n"),
    }[damage]()
    with pytest.raises(BuildError, match="no wheel can be made from 1 of the distributions") as caught:
        fill(tmp_path / "house", python)
    assert "thing-1.2: " in str(caught.value.got)
    assert says in str(caught.value.got)
    assert "thing" in str(caught.value.next_step)
    assert [path.name for path in (tmp_path / "house").glob("*") if path.suffix == ".whl"] == []
    assert fill(tmp_path / "house", python, "other").written == (
        "other-3-py3-none-any.whl",
    )  # the rest is usable


def test_a_program_that_is_no_python_is_a_clear_error(tmp_path):
    with pytest.raises(ConfigurationError, match="packages of this Python interpreter cannot be listed"):
        fill(tmp_path / "house", Path("/bin/false"))
    with pytest.raises(ConfigurationError, match="packages of this Python interpreter cannot be listed"):
        fill(tmp_path / "house", tmp_path / "absent")


def test_a_full_disk_is_seen_before_the_first_byte(original, tmp_path, monkeypatch):
    usage = type(atomic.shutil.disk_usage("/"))
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda _path: usage(10, 10, 0))
    with pytest.raises(FileError, match="not enough room for the wheels") as caught:
        fill(tmp_path / "house", original)
    assert str(caught.value.got) == "0.00 GB free"
    assert not list((tmp_path / "house").glob("*.whl"))


def test_a_folder_that_cannot_be_written_is_exit_10(original, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError):
        fill(tmp_path / "file" / "house", original)


def test_a_script_keeps_a_first_line_that_names_no_installed_interpreter():
    replaced = [
        environment._INTERPRETER.sub(rb"#!\g<window>\n", line, count=1)
        for line in (b"#!/opt/venv/bin/python3.12\nx", b"#!/usr/bin/env python\nx", b"#!/bin/sh\nx")
    ]
    assert replaced == [b"#!python\nx", b"#!/usr/bin/env python\nx", b"#!/bin/sh\nx"]
    assert os.sep == "/"


def pinned(data: bytes) -> wheel_supply.Pinned:
    return wheel_supply.Pinned(
        name="amd-smi-lib", path="pool/a/x_1_amd64.deb", sha256=hashlib.sha256(data).hexdigest()
    )


def test_a_file_of_the_right_name_and_another_hash_is_none(tmp_path):
    (tmp_path / "x_1_amd64.deb").write_bytes(b"other")
    assert wheel_supply.find([pinned(b"right")], [tmp_path], None) == {}
    (tmp_path / "x_1_amd64.deb").write_bytes(b"right")
    assert list(wheel_supply.find([pinned(b"right")], [tmp_path], None).values()) == [
        tmp_path / "x_1_amd64.deb"
    ]


def test_the_cache_is_looked_into_by_hash(tmp_path):
    one = pinned(b"right")
    place = tmp_path / "wheels" / one.sha256 / one.file
    place.parent.mkdir(parents=True)
    place.write_bytes(b"right")
    assert wheel_supply.find([one], [], tmp_path) == {one: place}


def test_a_host_without_apt_says_where_to_go(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    source = apt.AptSource(
        uris=("https://me:hunter2@m.example.org/amd",), suites=("noble",), components=("main",)
    )
    with pytest.raises(EngineError, match="this host has no apt") as caught:
        apt.find(source, "amd-smi-lib")
    assert "hunter2" not in str(caught.value)
    assert "m.example.org" in str(caught.value.where)
