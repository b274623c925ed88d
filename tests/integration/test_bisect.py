"""A package version with a planted fault is found between two stacks, with real images and suites."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from small_stacks import ROOT
from small_wheels import make_wheel
from waits import run_program

pytestmark = [pytest.mark.integration, pytest.mark.slow]

CHECK = "test_image.py::test_nothing_runs_unasked_when_python_starts"
# The smallest stacks that the suites accept, on the real base: they have no torch. The suites run under the
# tool's own pytest, whose header asks for the metadata of the image's.
MATRIX = """
schema: 1
publish: oci:dist
packages: {{psutil: 7.2.2, pytest: 9.2.0, pyyaml: 6.0.3}}
policy: {{certifies: {{cpu: smoke, amd: standard, nvidia: standard}}}}
runtimes:
  cpu: {{vendor: cpu, tested_on: [{{device: CPU, count: 1}}]}}
systems:
  debian12: {{bootstrap: bookworm, packages: [ca-certificates, python3.11, python3.11-venv]}}
stacks:
  - {{id: cpu-old, runtime: cpu, python: 3.11, os: debian12, packages: {old}}}
  - {{id: cpu-new, runtime: cpu, python: 3.11, os: debian12, packages: {new}}}
"""
NAMES = ("planted-a", "planted-b")  # the fault is in the second: it is looked for, and then tried alone


def plant(wheel: Path) -> None:
    """The fault: the package runs code whenever Python starts."""
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("planted_b_start.pth", "import sys; sys.planted = True\n")


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A checkout of two stacks that differ in two packages; the new version of one has a fault."""
    made = {
        (name, version): make_wheel(
            tmp_path / "wheels", name.replace("-", "_"), version=version, word=f"{name} {version}"
        )
        for name in NAMES
        for version in ("1.0", "2.0")
    }
    plant(made["planted-b", "2.0"])
    root = tmp_path / "checkout"
    (root / "images").mkdir(parents=True)
    for path in (ROOT / "images").iterdir():
        if path.is_file():
            shutil.copy(path, root / "images")
    shutil.copytree(ROOT / "images" / "parts", root / "images" / "parts")
    for name in ("tests", "trainers"):
        (root / name).symlink_to(ROOT / name)
    (ROOT / "build" / "bases").mkdir(parents=True, exist_ok=True)
    (root / "build").mkdir()
    (root / "build" / "bases").symlink_to(ROOT / "build" / "bases")
    old, new = (json.dumps(dict.fromkeys(NAMES, version)) for version in ("1.0", "2.0"))
    (root / "matrix.yaml").write_text(MATRIX.format(old=old, new=new))
    return root


def stackcheck(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"XDG_CONFIG_HOME": str(root / "config"), "STACKCHECK_WHEEL_CACHE": "off"}
    env |= {"PIP_FIND_LINKS": str(root.parent / "wheels")}
    done = run_program(
        [sys.executable, "-m", "stackcheck", *arguments, "--root", str(root)], env=env, cwd=ROOT
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_the_package_with_the_fault_is_named_with_real_images(checkout, engine):
    try:
        _search(checkout)
    finally:
        for path in checkout.glob("build/**/image.json"):
            engine.remove(json.loads(path.read_text())["reference"])


def _search(checkout: Path) -> None:
    before = {path.name for path in (checkout / "images").iterdir()}
    for verb in ("lock", "render"):
        done = stackcheck(checkout, verb)
        assert done.returncode == 0, done.stderr
    search = (
        "bisect",
        "--good",
        "cpu-old",
        "--bad",
        "cpu-new",
        "--check",
        CHECK,
        "--tier",
        "smoke",
        "--json",
    )
    done = stackcheck(checkout, *search)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert (found["kind"], found["components"]) == ("one", ["planted-b"])
    assert [each["outcome"] for each in found["tried"]] == ["passes", "fails", "passes", "fails"]
    again = json.loads(stackcheck(checkout, *search).stdout)
    assert not any(each["new"] for each in again["tried"])
    assert {path.name for path in (checkout / "images").iterdir()} == before | {"cpu-old", "cpu-new"}
