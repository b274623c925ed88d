"""AMD's path for real, where no AMD device is: Debian's own ROCm, built, looked into, and refused.

In: the stack `rocm5.7-debian13` of the matrix, from the package archive alone. Out: its verdict. hipcc makes
code for gfx90a and gfx942 in it, its libraries hold gfx90a; it has no torch and the host no GPU, so it must
end FAILED and leave nothing published. It takes minutes and gigabytes, and removes all that it made.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stackcheck.engine import host_setup
from stackcheck.engine.client import Engine

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
STACK = "rocm5.7-debian13"
REFUSED = 6
ABSENT = "vendor amd was named and no AMD device is visible"


@pytest.fixture(scope="module")
def refused(tmp_path_factory) -> Iterator[dict[str, Any]]:
    """What the main job says of the stack, and what it left."""
    host_setup.ensure_engine(lambda _line: None)
    # A checkout of its own: in this one other tests would wait for the lock of the build.
    root = tmp_path_factory.mktemp("rocm-stack")
    for name in ("matrix.yaml", "images", "tests", "trainers"):
        (root / name).symlink_to(ROOT / name)
    folder, target = root / "build" / STACK, root / "images-of-the-test"
    command = [sys.executable, "-m", "stackcheck", "images", STACK, "--anyway", "--json", "--root", str(root)]
    command += ["--to", f"oci:{target}"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.stdout, done.stderr
        yield {
            "exit": done.returncode,
            "row": json.loads(done.stdout)[0],
            "target": target,
            "log": done.stderr,
            "verdict": json.loads((folder / "verdict.json").read_text()),
            "result": json.loads((folder / "run" / "result.json").read_text()),
        }
    finally:
        image = folder / "image.json"
        engine = Engine.connect()
        if image.exists() and engine.has(reference := json.loads(image.read_text())["reference"]):
            engine.remove(reference)
        shutil.rmtree(root / "build", ignore_errors=True)


def test_it_is_refused_for_want_of_a_device_and_of_torch(refused):
    assert (refused["exit"], refused["row"]["state"]) == (REFUSED, "failed"), refused["log"]
    assert refused["verdict"]["status"] == "FAILED"
    reasons = refused["verdict"]["reasons"]
    assert ABSENT in reasons
    assert [reason for reason in reasons if "no torch, so it can never be certified" in reason]


def test_nothing_of_it_is_published(refused):
    assert refused["row"]["reference"] is None
    assert not refused["target"].exists()


def test_hipcc_makes_code_for_gfx90a_and_gfx942_in_it(refused):
    check = _check(refused, "test_static.py::test_the_vendor_compiler_makes_code_for_every_architecture")
    assert check["outcome"] == "passed", check["reason"]
    assert {"gfx90a", "gfx942"} <= set(check["metrics"][0]["conditions"]["archs"].split())


def test_its_libraries_hold_the_declared_architecture_and_tell_their_versions(refused):
    held = _check(refused, "test_static.py::test_kernel_libraries_hold_every_architecture")
    assert held["outcome"] == "passed", held["reason"]
    assert {"RCCL", "rocBLAS"} <= set(held["metrics"][0]["conditions"]["names"].split(", "))
    told = _check(refused, "test_image.py::test_the_vendor_libraries_that_load_are_the_installed_ones")
    assert told["outcome"] == "passed", told["reason"]
    assert told["metrics"][0]["conditions"]["the HIP runtime"] == "5.7"


def test_what_needs_no_device_passes_and_everything_else_says_why(refused):
    checks = refused["result"]["checks"]
    own = [check for check in checks if check["id"].startswith(("test_image.py", "test_static.py"))]
    assert {check["outcome"] for check in own} == {"passed", "skipped"}, own
    others = [check for check in checks if check not in own]
    assert {check["outcome"] for check in others} <= {"failed", "error"}
    assert all(check["reason"] for check in others)


def _check(refused: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [check for check in refused["result"]["checks"] if check["id"] == name]
    return dict(found)
