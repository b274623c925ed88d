"""The first hour ends with the first surprise, and what is packed has no identity of the host or its user."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from stackcheck import vendors
from stackcheck.cli import app
from stackcheck.engine import first_host

ROOT = Path(__file__).resolve().parents[3]
STACK = "rocm7.1.0-torch2.10.0-fa2.8.3-py3.12-ubuntu24.04"
PAGE = (ROOT / "docs/guides/first-amd-host.md").read_text(encoding="utf-8")


def test_the_steps_are_those_of_the_page_in_its_order():
    rows = dict(re.findall(r"^\| (\d+)\. [\w ,]+ \| (.+?) \| ", PAGE, re.MULTILINE))
    wanted = first_host.steps(STACK, ROOT)
    assert [step.number for step in wanted] == sorted(step.number for step in wanted)
    for step in wanted:
        assert f"stackcheck {step.arguments[0]}" in rows[str(step.number)]
    assert [step.arguments[0] for step in wanted].count("test") == first_host.RUNS


def at(exits: Sequence[int], calls: list[tuple[str, ...]], root: Path, verdict: Any = None) -> Any:
    """A runner whose n-th command ends so; a test leaves its result, whose reason names the machine."""

    def run(arguments: Sequence[str], _show: object) -> tuple[int, str]:
        calls.append(tuple(arguments))
        path = root / "build" / STACK / "run" / "result.json"
        if arguments[0] == "test" and verdict is not None:
            path.parents[1].mkdir(parents=True, exist_ok=True)
            (path.parents[1] / "verdict.json").write_text(json.dumps(verdict))
        if arguments[0] == "test":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(
                json.dumps({"run_id": len(calls), "checks": [{"reason": "at 10.1.2.3 on node-17"}]})
            )
        return exits[len(calls) - 1], "node-17 has GPU-a1b2c3d4e5f60700\n"

    return run


@pytest.mark.parametrize("stop", range(9))
def test_the_first_surprise_ends_the_hour(stop, tmp_path, monkeypatch):
    calls: list[tuple[str, ...]] = []
    (tmp_path / "build").mkdir()
    stale = tmp_path / "build/first-host-3.json"
    stale.write_text("{}")
    exits = [0] * stop + [9] + [0] * 9
    monkeypatch.setattr(first_host, "_run", at(exits, calls, tmp_path))
    monkeypatch.setattr(first_host, "_names", lambda: iter(("node-17",)))
    wanted = first_host.steps(STACK, tmp_path)
    done = [*first_host.follow(wanted, tmp_path, len)]
    told = first_host.document(done, wanted)
    assert len(calls) == len(done) == stop + 1
    assert told["surprise"] == wanted[stop].number
    # Also the result of the run that did not end well, and none of an earlier hour after step 6.
    runs = [call for call in calls if call[0] == "test"]
    assert len([one for one in told["results"] if one.get("run_id")]) == len(runs)
    assert not runs or "10.1.2.3" not in json.dumps(told)
    assert "node-17" not in json.dumps(told)
    assert "GPU-a1b2" not in json.dumps(told)


BOUNDS = {"only_bounds": True}
# Runs of the three tests, then of `judge`: 9 is UNFIT, 6 FAILED.
GO_ON = ([9, 9, 9, 9], [9, 0, 0, 9], [0, 9, 0, 0], [6, 6, 6, 6])


@pytest.mark.parametrize("ends", GO_ON, ids=str)
def test_only_bounds_are_no_surprise_and_the_machine_measures_its_own(ends, tmp_path, monkeypatch):
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(first_host, "_run", at([0, 0, 0, 0, *ends, 0], calls, tmp_path, BOUNDS))
    monkeypatch.setattr(vendors, "kernel_record", lambda: ({}, ()))
    for name in ("matrix.yaml", "images", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "build").mkdir()
    output = tmp_path / "told.json"
    done = CliRunner().invoke(app, ["first-host", STACK, "--record", str(output), "--root", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert calls[-1][0] == "baseline"
    assert re.search(r"surprise:? +none", done.output)
    again = f"stackcheck baseline {' '.join(calls[-1][1:4])} --write"
    assert again in " ".join(done.output.split())
    told = json.loads(output.read_text(encoding="utf-8"))
    assert (told["surprise"], len(told["results"])) == (None, 3)
    assert [step["only_bounds"] for step in told["steps"][4:8]] == [bool(end) for end in ends]


@pytest.mark.parametrize("verdict", [None, {"only_bounds": False}], ids=str)
@pytest.mark.parametrize("code", [6, 9])
def test_a_verdict_with_another_reason_ends_the_hour(verdict, code, tmp_path, monkeypatch):
    stale = tmp_path / "build" / STACK / "verdict.json"
    stale.parent.mkdir(parents=True)
    stale.write_text(json.dumps(BOUNDS))
    monkeypatch.setattr(first_host, "_run", at([0, 0, 0, 0, code], [], tmp_path, verdict))
    (*_, last) = first_host.follow(first_host.steps(STACK, tmp_path), tmp_path, len)
    assert (last.number, last.exit_code, last.is_surprise) == (7, code, True)


octet = st.integers(0, 255)
hexes = st.sampled_from("0123456789abcdef")
IDENTITIES = st.one_of(
    st.tuples(octet, octet, octet, octet).map(lambda four: ".".join(map(str, four))),
    st.lists(st.text(hexes, min_size=2, max_size=2), min_size=6, max_size=6).map(":".join),
    st.lists(st.text(hexes, min_size=1, max_size=4), min_size=8, max_size=8).map(":".join),
    st.sampled_from(["fe80::1", "2001:db8::ff00:42:8329", "fd00:1:2::3"]),
    st.uuids().map(str),
    st.uuids().map(lambda one: f"GPU-{one}"),
    st.text(hexes, min_size=16, max_size=16).map("GPU-{}".format),
)
PLACES = ("{}", "at {}: no answer", "[{}]", "--to={},x", '"{}"', "({})", "tcp://{}/", "{}.")


@given(IDENTITIES, st.sampled_from(PLACES))
def test_what_has_the_form_of_an_identity_is_removed(identity, place):
    cleaned = first_host.private({"checks": [{"reason": place.format(identity)}]}, ())
    assert identity not in json.dumps(cleaned)


@pytest.mark.parametrize(
    "text",
    [
        "torch 2.10.0 with ROCm 7.1.0, driver 6.19.14.31400000",
        "0000:05:00.0: on the PCI bus",
        "12:30:45 step 3",
        "sha256:0123456789abcdef",
        "vbios 022.040.003.041.000001",
        "test_devices.py::test_memory_is_healthy[8]",
    ],
)
def test_what_is_no_identity_stays(text):
    assert first_host.private([text], ("ode-1",)) == [text]


def test_what_a_verdict_rests_on_stays():
    result = {"software": {"rccl": "2.27.7.1"}, "driver": "6.12.12.1", "devices": [{"model": "MI300X"}]}
    assert first_host.private(result, ("MI300X",)) == result


def test_the_verb_ends_as_the_step_that_stopped_and_leaves_the_file(tmp_path, monkeypatch):
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(first_host, "_run", at([0, 11], calls, tmp_path))
    monkeypatch.setattr(vendors, "kernel_record", lambda: ({"module/amdgpu/version": "6.12.12"}, ()))
    output = tmp_path / "told.json"
    done = CliRunner().invoke(app, ["first-host", STACK, "--record", str(output), "--root", str(ROOT)])
    assert done.exit_code == 11, done.output
    assert "step 4 ended with exit code 11" in done.output
    told = json.loads(output.read_text(encoding="utf-8"))
    assert told["kernel_files"] == {"module/amdgpu/version": "6.12.12"}
    assert [step["arguments"] for step in told["steps"]] == [["doctor"], ["explain", STACK]]
    assert [call[-2] for call in calls] == ["--root", "--root"]


def test_a_command_is_this_tool_and_its_lines_are_shown(capsys):
    code, output = first_host._run(("explain", STACK, "--root", str(ROOT)), sys.stdout.write)
    assert code == 0
    assert "allowed" in output
    assert capsys.readouterr().out == output
