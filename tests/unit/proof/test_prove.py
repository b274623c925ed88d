"""What planted faults prove: recorded lines of tests/faults in, a verdict on the checks out."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from small_checkout import call
from stackcheck.cli.prove import app
from stackcheck.errors import ChecksFailedError
from stackcheck.proof import prove

ROOT = Path(__file__).resolve().parents[3]
CHECK = "test_devices.py::test_device_count"


def fault(**changes: object) -> dict[str, object]:
    told = {"test": "t", "name": "a GPU is missing", "check": CHECK, "vendor": "amd", "expected": "failed"}
    return told | {"state": "caught", "reason": None} | changes


def healthy(**changes: object) -> dict[str, object]:
    return {
        "test": "h",
        "name": "nothing",
        "check": CHECK,
        "vendor": "amd",
        "state": "passed",
        "reason": None,
    } | changes


def fault_run(**changes: object) -> prove.FaultRun:
    line = {"checks": [CHECK], "faults": [fault()], "healthy": [healthy()], "failed": []} | changes
    return prove.FaultRun.model_validate_json(json.dumps(line))


def test_everything_caught_and_nothing_healthy_failed_holds():
    proof = prove.join([fault_run(), fault_run(checks=None)])
    assert proof.holds
    assert (len(proof.faults), proof.caught, len(proof.healthy), proof.false_alarms) == (2, 2, 2, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"faults": [fault(), fault(state="missed")]},
        {"faults": [fault(), fault(state="not run")]},
        {"faults": []},
        {"healthy": [healthy(state="false alarm")]},
        {"healthy": [healthy(state="not run")]},
        {"healthy": []},
        {"failed": ["faults/test_x.py::test_y"]},
        {"checks": None},
        {"checks": [CHECK, "test_devices.py::test_new"]},
        {"faults": [fault(expected="skipped")]},  # a right skip shows no failure
    ],
    ids=lambda changes: json.dumps(changes)[:60],
)
def test_anything_less_does_not_hold(changes):
    assert not prove.join([fault_run(**changes)]).holds


def test_check_without_a_fault_is_named():
    assert prove.join([fault_run(checks=[CHECK, "test_x.py::test_new"])]).unproven == ("test_x.py::test_new",)


def test_fault_of_one_instance_counts_for_its_check():
    assert not prove.join([fault_run(faults=[fault(check=f"{CHECK}[bf16]")])]).unproven


def test_run_without_its_line_is_an_error_that_shows_its_end():
    seen = []
    reader = prove.FaultRunReader(seen.append)
    for line in ("collecting", "", "Segmentation fault"):
        reader(line)
    with pytest.raises(ChecksFailedError, match="ended without its result") as raised:
        reader.finished("pytest tests/faults")
    assert "Segmentation fault" in raised.value.got
    assert seen == ["collecting", "Segmentation fault"]


def test_line_of_another_form_is_refused():
    reader = prove.FaultRunReader(lambda _: None)
    reader('{"checks": [], "faults": [], "healthy": [], "failed": [], "more": 1}')
    with pytest.raises(ChecksFailedError):
        reader.finished("pytest")


PLANTED = """
import pytest

import planting

FAULTS = (
    planting.Fault("caught", "test_a.py::test_one"),
    planting.Fault("missed", "test_a.py::test_two"),
)

@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_fault(fault):
    assert fault.name == "caught"

@pytest.mark.catches("test_a.py::test_three", vendor="nvidia")
def test_by_mark():
    pass

@pytest.mark.healthy(check="test_a.py")
def test_healthy():
    pass

def test_many(request):
    for name, caught in (("one", True), ("two", False)):
        entry = {"name": name, "check": "test_a.py::test_four", "vendor": "cpu", "expected": "failed"}
        planting.tell(request.node, {**entry, "caught": caught})

@pytest.mark.catches("test_a.py::test_five")
def test_that_cannot_run_here():
    pytest.skip("no torch")

def test_bare():
    assert False
"""


@pytest.fixture
def planted(tmp_path) -> Path:
    """A checkout of which tests/faults has the real plumbing and made-up faults."""
    faults = tmp_path / "tests" / "faults"
    faults.mkdir(parents=True)
    for name in ("conftest.py", "planting.py", "warm_python.py", "proof.py"):
        (faults / name).write_bytes((ROOT / "tests/faults" / name).read_bytes())
    (faults / "test_planted.py").write_text(PLANTED, encoding="utf-8")
    for path in prove.FABRICATED_HOSTS:
        (tmp_path / path).write_text("def test_nothing():\n    pass\n", encoding="utf-8")
    settings = "[pytest]\naddopts = --strict-markers -p no:hypothesispytest\npythonpath = faults\n"
    (tmp_path / "tests" / "pytest.ini").write_text(settings, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("only", "names"),
    [
        ("test_three", {"by mark"}),
        ("test_a.py::test_*e", None),
        ("miss", {"missed"}),
        ("test_by_mark", {"by mark"}),
        ("no such", set()),
    ],
)
def test_only_chooses_by_check_fault_or_test(planted, only, names):
    answer = prove.here(prove.in_torch(1, only=only), root=planted, report=lambda _: None)
    found = {fault.name for fault in answer.faults}
    assert found == names if names is not None else {"caught", "by mark"} <= found
    assert answer.failed == ()


def test_a_part_holds_by_its_own_checks_alone():
    two = fault_run(checks=[CHECK, "test_x.py::test_new"], healthy=[])
    assert prove.join([two], "device_count").holds
    assert not prove.join([two], "test_new").holds  # no fault for that check
    assert not prove.join([two]).holds
    missed = fault_run(faults=[fault(state="missed")], healthy=[])
    assert not prove.join([missed], "device_count").holds


def test_each_way_of_planting_is_told(planted):
    lines = []
    answer = prove.here(prove.in_torch(1), root=planted, report=lines.append)
    states = {(fault.name, fault.check.rpartition("_")[2], fault.state) for fault in answer.faults}
    assert states == {
        ("caught", "one", "caught"),
        ("missed", "two", "missed"),
        ("by mark", "three", "caught"),
        ("one", "four", "caught"),
        ("two", "four", "missed"),
        ("that cannot run here", "five", "not run"),
    }
    assert [(run.name, run.state) for run in answer.healthy] == [("healthy", "passed")]
    assert [name.rpartition("::")[2] for name in answer.failed] == ["test_bare"]
    assert any("4 passed" in line for line in lines)


def test_part_that_needs_torch_runs_on_the_python_that_has_it(monkeypatch):
    pythons, quick = [], []

    def recorded(arguments: Sequence[str], *, python: str, **_: object) -> prove.FaultRun:
        pythons.append(python)
        quick.append("not slow" in arguments)
        return fault_run()

    monkeypatch.setenv(prove.SUITE_PYTHON, "/bin/sh")
    monkeypatch.setattr(prove, "here", recorded)
    monkeypatch.setattr(prove, "beside", lambda *_, **__: contextlib.nullcontext(fault_run))
    for options in ((), ("--quick",)):
        CliRunner().invoke(app, ["--here", "--root", str(ROOT), *options])
    assert pythons == ["/bin/sh", "/bin/sh"]
    assert quick == [False, True]


@pytest.mark.parametrize("python", ["/nowhere/python", ""])
def test_a_python_that_cannot_be_run_is_exit_2_before_anything_runs(monkeypatch, capsys, python):
    for run in ("here", "beside"):
        monkeypatch.setattr(prove, run, lambda *_, **__: pytest.fail("a proof was run"))
    monkeypatch.setenv(prove.SUITE_PYTHON, python)
    done = call(capsys, "prove", "--here", "--root", ROOT)
    assert done.code == 2
    assert f"where: {prove.SUITE_PYTHON}\n  got: {python or 'an empty value'}" in done.err


def test_an_image_that_is_refused_is_refused_before_anything_runs(tmp_path, monkeypatch, capsys):
    for run in ("here", "beside"):
        monkeypatch.setattr(prove, run, lambda *_, **__: pytest.fail("a proof was run"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert call(capsys, "key").code == 0
    for reference, code in ((f"oci:{tmp_path / 'dist'}:nope", 7), ("nope", 2)):
        done = call(capsys, "prove", "--image", reference, "--root", ROOT)
        assert (done.code, done.out) == (code, "")
        assert done.err.startswith("error: ")


def test_a_run_beside_another_is_reported_whole_after_it(planted):
    lines = []
    with prove.beside(prove.on_fabricated_hosts(1), root=planted, report=lines.append) as amd:
        lines.append("the other one")
        answer = amd()
    assert (answer.faults, answer.failed) == ((), ())
    assert lines[0] == "the other one"
    assert any(f"{len(prove.FABRICATED_HOSTS)} passed" in line for line in lines)


def test_a_run_is_ended_with_the_tool(tmp_path):
    (tmp_path / "sleeper.py").write_text("print('up', flush=True)\nimport time\ntime.sleep(600)\n")

    def interrupted(_line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prove.here(["sleeper.py"], root=tmp_path, report=interrupted)
    with pytest.raises(KeyboardInterrupt), prove.beside(["sleeper.py"], root=tmp_path, report=print):
        interrupted("")
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert f"{sys.executable} sleeper.py" not in listed
