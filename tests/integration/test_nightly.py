"""Real nights on the stack that needs no GPU: a real registry, engine, image and suites; the driver is made.

A processor has no driver, so the driver that "comes" on the last day is the one double: vendors.cpu.driver.
The image is certified with all suites; the two nights leave out those that take most of their time.
"""

import json
import os
import shutil
import sys
import uuid
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from stackcheck.history.history import open_history
from stackcheck.history.runs import Query
from stackcheck.matrix import resolve
from stackcheck.suite import inputs
from waits import run_program

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
DRIVER = "6.99.1"
PLAIN = "from stackcheck.cli import main; main()"
WITH_DRIVER = f"from stackcheck.vendors import cpu; cpu.driver = lambda: {DRIVER!r}; {PLAIN}"

LONG = ("test_static.py", "test_training.py", "test_training_soak.py")  # the last one is a part of the second


def lay_out_shorter_suites(tests: Path) -> None:
    """The suites of this checkout without the long ones, and the list of the checks that are left."""
    left_out = shutil.ignore_patterns(*LONG, "__pycache__")
    shutil.copytree(ROOT / "tests" / "acceptance", tests / "acceptance", ignore=left_out)
    for name in inputs.SUITE_FILES:
        shutil.copy(ROOT / "tests" / name, tests)
    file = tests / "acceptance" / "checks.json"
    listing = {
        devices: {check: tier for check, tier in checks.items() if check.partition("::")[0] not in LONG}
        for devices, checks in json.loads(file.read_text()).items()
    }
    file.write_text(json.dumps(listing))


class Operator:
    """Somebody with a key of their own, a checkout for the nights, and a registry."""

    def __init__(self, folder: Path, registry: str) -> None:
        self.target = f"{registry}/nights/{uuid.uuid4().hex}"
        self.root = folder / "checkout"
        self.summary = folder / "summary.md"
        self.env = {
            **os.environ,
            "XDG_CONFIG_HOME": str(folder / "config"),
            "GITHUB_STEP_SUMMARY": str(self.summary),
            "PYTHONPATH": str(ROOT),
        }
        self.root.mkdir()
        for name in ("matrix.yaml", "images", "trainers"):
            (self.root / name).symlink_to(ROOT / name)
        lay_out_shorter_suites(self.root / "tests")

    def take_over_the_build(self) -> str:
        """The image as this checkout built it; a night refuses to renew with fewer checks than certified."""
        (stack,) = resolve.load_stacks(ROOT, ("cpu-*",))
        done = self.call("build", stack.id, "--root", ROOT)
        assert done[0] == 0, done
        built, own = ROOT / "build" / stack.id, self.root / "build" / stack.id
        own.mkdir(parents=True)
        shutil.copy(built / "image.json", own)
        (own / "oci").symlink_to(built / "oci")
        (self.root / "build" / "bases").symlink_to(ROOT / "build" / "bases")
        return stack.id

    def call(self, *arguments: str | Path, program: str = PLAIN) -> tuple[int, Any]:
        """Exit code and JSON of one command."""
        done = run_program([sys.executable, "-c", program, *map(str, arguments), "--json"], env=self.env)
        assert "Traceback" not in done.stderr, done.stderr
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)

    def night(self, *options: str, program: str = PLAIN) -> tuple[int, Any]:
        return self.call("nightly", "--from", self.target, "--root", self.root, *options, program=program)

    def verify(self, stack: str, driver: str) -> tuple[int, str | None]:
        """Exit code of `verify` for a driver, and when the verdict was given."""
        command = [sys.executable, "-m", "stackcheck", "verify", f"{self.target}:{stack}", "--json"]
        done = run_program([*command, "--device-model", "CPU", "--driver", driver], env=self.env)
        return done.returncode, json.loads(done.stdout).get("verified_at")


def actions(plan: dict[str, Any]) -> list[str]:
    return [image["outcome"]["action"] for image in plan["images"]]


def test_nights_renew_the_certificate_and_widen_it_to_a_new_driver(
    tmp_path,
    registry,
    engine,  # noqa: ARG001  # it has to be there
):
    operator = Operator(tmp_path, registry)
    stack = operator.take_over_the_build()
    code, (built,) = operator.call("images", stack, "--to", operator.target, "--root", operator.root)
    assert (code, built["state"]) == (0, "certified"), built
    _, first = operator.verify(stack, "none")

    code, plan = operator.night("--dry-run")
    assert (code, [image["reasons"] for image in plan["images"]]) == (0, [["the first night on this host"]])
    assert operator.verify(stack, "none") == (0, first)  # nothing was run

    code, plan = operator.night()
    assert (code, actions(plan)) == (0, ["renew"]), plan["line"]
    _, renewed = operator.verify(stack, "none")
    assert renewed is not None
    assert first is not None
    assert renewed > first

    code, plan = operator.night()
    assert (code, plan["images"], [skip["for_here"] for skip in plan["skipped"]]) == (0, [], [True])
    assert "nothing was due" in plan["line"]

    assert operator.verify(stack, DRIVER)[0] == 7
    code, plan = operator.night(program=WITH_DRIVER)
    assert (code, actions(plan)) == (0, ["widen"]), plan["line"]
    assert plan["changes"] == [f"driver none -> {DRIVER}"]
    assert operator.verify(stack, DRIVER)[0] == 0
    assert operator.verify(stack, "none") == (0, renewed)  # the old certificate is as it was

    runs = open_history(operator.root).runs(Query(newest_first=False))
    assert [(run.status, run.driver, run.stack, run.image) for run in runs] == [
        ("PASSED", None, stack, built["digest"]),  # of `images`
        ("PASSED", None, stack, built["digest"]),
        ("PASSED", DRIVER, stack, built["digest"]),
    ]
    assert not any(run.simulated for run in runs)
    folder = operator.root / "build" / "nightly"
    suite = ET.parse(folder / "junit.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("1", "0", "0")
    assert json.loads((folder / "night.json").read_text())["exit_code"] == 0
    assert operator.summary.read_text().count("## stackcheck nightly") == 3  # three nights that were played
