"""Images whose Python is none, on a real daemon: refused before they start, or their result is not read.

The images hold a shell and no torch. What an image with a real Python can do is in test_hostile_images.py.
"""

import contextlib
import hashlib
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import shell_image
import small_stacks
import small_subjects
from fake_files import dpkg
from stackcheck.engine.client import Engine
from stackcheck.errors import ChecksFailedError
from stackcheck.suite import run as suite
from stackcheck.suite.results import RunResult

pytestmark = pytest.mark.integration

# A result wherever a container may write; the controller's own lies where it cannot.
FORGE = r"""
forge() {
    for place in /stackcheck/out/result.json /stackcheck/out/../run/result.json /tmp/result.json; do
        echo '{"schema": 1, "state": "finished", "checks": []}' > "$place"
    done
}
"""
LIAR = f"#!/bin/bash\n{FORGE}\nforge\n".encode()
HONEST = b'#!/bin/bash\nexport -p\necho "I run"\nexit 3\n'


@contextlib.contextmanager
def started(
    engine: Engine,
    folder: Path,
    files: Mapping[str, bytes],
    settings: Mapping[str, Any] | None = None,
    accepted: tuple[str, ...] = (),
) -> Iterator[RunResult]:
    """The result of a run in an image of these files; `accepted`: digests of a Python of no package."""
    reference = f"stackcheck-test/faked:{uuid.uuid4().hex[:12]}"
    shell_image.make_layout(folder / "oci", programs=("bash", "sleep"), files=dict(files), settings=settings)
    engine.load(folder / "oci", reference)
    subject = small_subjects.subject_of(reference, folder, *accepted)
    plan = suite.plan(subject, tier="smoke", root=small_stacks.ROOT, out=folder / "out")
    try:
        yield suite.run(plan, engine, out=folder / "out", report=small_stacks.silent)
    finally:
        engine.remove(reference)


def refusal(
    engine: Engine,
    folder: Path,
    files: Mapping[str, bytes],
    settings: Mapping[str, Any] | None = None,
    accepted: tuple[str, ...] = (),
) -> str:
    with pytest.raises(ChecksFailedError) as caught, started(engine, folder, files, settings, accepted):
        pass
    return str(caught.value)


def as_python(body: bytes) -> dict[str, bytes]:
    """A program as the Python that a package installed."""
    return {"/usr/bin/python3": body, **dpkg(("/usr/bin/python3", body))}


def test_another_python_first_on_path_is_refused_before_it_runs(engine, tmp_path):
    files = {**as_python(HONEST), "/evil/bin/python3": LIAR}
    text = refusal(engine, tmp_path, files, {"Env": ["PATH=/evil/bin:/usr/bin:/bin"]})
    assert "belongs to no package" in text
    assert "/evil/bin/python3" in text
    assert not (tmp_path / "out" / "container.log").exists()


def test_the_entrypoint_and_the_health_check_of_an_image_do_not_run(engine, tmp_path):
    waiting = b"#!/bin/bash\necho started\nsleep 4\nexit 3\n"
    settings = {
        "Entrypoint": ["/evil"],
        "Env": ["PATH=/usr/bin:/bin"],
        "Healthcheck": {"Test": ["CMD", "/evil"], "Interval": 200_000_000},
    }
    text = refusal(engine, tmp_path, {**as_python(waiting), "/evil": LIAR}, settings)
    assert "killed or ended early" in text
    assert "started" in text


def test_variables_of_an_image_that_steer_or_hide_are_not_there(engine, tmp_path):
    hostile = (
        *("PYTHONPATH", "PYTHONHOME", "PYTHONPYCACHEPREFIX", "PYTEST_ADDOPTS", "LD_PRELOAD", "LD_AUDIT"),
        *("STACKCHECK_STACK_FILE", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"),
    )
    kept = ("LD_LIBRARY_PATH", "PYTORCH_VERSION")
    settings = {"Env": ["PATH=/usr/bin:/bin", *(f"{name}=/evil" for name in (*hostile, *kept))]}
    refusal(engine, tmp_path, as_python(HONEST), settings)
    lines = (tmp_path / "out" / "container.log").read_text().splitlines()
    there = {line.removeprefix("declare -x ").partition("=")[0] for line in lines if "=" in line}
    assert not there & set(hostile)
    assert {*kept, "PYTEST_DISABLE_PLUGIN_AUTOLOAD"} <= there


def test_a_container_that_was_killed_is_refused_and_what_it_wrote_is_no_result(engine, tmp_path):
    killed = f"#!/bin/bash\n{FORGE}\nforge\nkill -KILL $$\n".encode()
    text = refusal(engine, tmp_path, as_python(killed))
    assert "killed or ended early" in text
    assert "dmesg" in text
    assert (tmp_path / "out" / "run" / "inside" / "result.json").exists()
    assert not (tmp_path / "out" / "run" / "result.json").exists()


def digest(body: bytes) -> str:
    return "sha256:" + hashlib.sha256(body).hexdigest()


def test_a_wrapper_is_refused_though_its_digest_was_accepted(engine, tmp_path):
    settings = {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin"]}
    text = refusal(engine, tmp_path, {"/usr/local/bin/python3": LIAR}, settings, (digest(LIAR),))
    assert "a script cannot be accepted" in text
    assert not (tmp_path / "out" / "container.log").exists()


def test_an_accepted_python_accepts_neither_another_program_nor_another_library(engine, tmp_path):
    """The digests are those of an honest Python; one of its files is another one, in a place before it."""
    name = b"libpython3.11.so.1.0"
    honest, library, other = b"\x7fELF " + name + b"\0", b"\x7fELF library", b"\x7fELF another"
    files = {"/usr/local/bin/python3": honest, f"/usr/local/lib/{name.decode()}": library}
    settings = {"Env": ["PATH=/evil/bin:/usr/local/bin:/bin", "LD_LIBRARY_PATH=/evil/lib"]}
    accepted = (digest(honest), digest(library))
    for place in ("/evil/bin/python3", f"/evil/lib/{name.decode()}", f"/usr/local/lib/{name.decode()}"):
        text = refusal(engine, tmp_path, {**files, place: other}, settings, accepted)
        assert "belongs to no package" in text
        assert digest(other) in text
    assert not (tmp_path / "out" / "container.log").exists()


def test_a_library_that_an_image_loads_into_every_program_is_refused(engine, tmp_path):
    text = refusal(engine, tmp_path, {**as_python(LIAR), "/etc/ld.so.preload": b"/evil/lib.so\n"})
    assert "loads a library into every program" in text
    assert not (tmp_path / "out" / "container.log").exists()
