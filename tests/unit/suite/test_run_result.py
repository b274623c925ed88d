"""A run believes only its own result, and an earlier one is kept only if nothing changed."""

import contextlib
import dataclasses
import datetime as dt
import json
import os
from pathlib import Path
from typing import Any

import pytest

import result_files
from fake_runs import FakeEngine, healthy, make_plan, of_run, run
from result_files import DIGEST
from stackcheck.errors import ChecksFailedError, NothingSelectedError
from stackcheck.oci.documents import sha256
from stackcheck.suite import run as suite

pytestmark = pytest.mark.usefixtures("frozen_once")

HOUR, NONE = dt.timedelta(hours=1), dt.timedelta()


def test_another_tier_may_not_keep_the_result(tmp_path):
    run(make_plan(tmp_path), tmp_path)
    assert suite.earlier_result(make_plan(tmp_path, tier="standard"), tmp_path) is None


def test_a_run_that_dies_takes_the_earlier_result_along(tmp_path):
    run(make_plan(tmp_path), tmp_path)
    with pytest.raises(ChecksFailedError):
        run(make_plan(tmp_path), tmp_path, answer=lambda _told: None)
    assert suite.earlier_result(make_plan(tmp_path), tmp_path) is None


def test_a_container_without_a_result_fails_with_its_last_words(tmp_path):
    with pytest.raises(ChecksFailedError, match="without a result") as caught:
        run(make_plan(tmp_path), tmp_path, answer=lambda _told: None)
    assert "last words" in str(caught.value)


def test_the_log_lies_where_the_container_cannot_write(tmp_path):
    (spec,) = run(make_plan(tmp_path), tmp_path).specs
    (writable,) = [mount.source for mount in spec.mounts if not mount.read_only]
    assert (tmp_path / "container.log").read_text() == "last words\n"
    assert not (tmp_path / "container.log").is_relative_to(writable)


@pytest.mark.parametrize("what", ["link", "dangling", "device", "pipe", "folder"])
def test_a_result_that_is_no_file_of_the_run_is_refused_and_not_read(tmp_path, what):
    secret = tmp_path / "secret"
    secret.write_text("the host's own words")

    def plant(_told: dict[str, Any]) -> None:
        path = tmp_path / "run" / "result.json"
        targets = {"link": secret, "dangling": tmp_path / "nothing", "device": Path("/dev/zero")}
        if what == "pipe":
            os.mkfifo(path)
        elif what == "folder":
            path.mkdir()
        else:
            path.symlink_to(targets[what])
        # What a container did to make stackcheck print a file of the host as the end of its log.
        (tmp_path / "run" / "container.log").symlink_to(secret)

    with pytest.raises(ChecksFailedError) as caught:
        run(make_plan(tmp_path), tmp_path, answer=plant)
    assert "own words" not in str(caught.value)


@pytest.mark.parametrize(("code", "why"), suite.NO_CHECKS.items())
def test_an_expression_that_selects_nothing_is_no_fault_of_the_container(tmp_path, code, why):
    plan = dataclasses.replace(make_plan(tmp_path), only="nothing")
    engine: Any = FakeEngine(healthy, code)
    with pytest.raises(NothingSelectedError, match=why) as caught:
        suite.run(plan, engine, out=tmp_path, report=lambda _line: None)
    assert caught.value.got == "nothing"


@pytest.mark.parametrize("code", [2, 3, 4, 5, 126, 127, 134, 137, 139, 143])
@pytest.mark.parametrize("outcome", ["passed", "failed"])
def test_a_container_that_broke_off_is_refused_whatever_it_wrote(tmp_path, code, outcome):
    engine: Any = FakeEngine(lambda told: healthy(told).replace('"passed"', f'"{outcome}"'), code)
    plan = make_plan(tmp_path)
    with pytest.raises(ChecksFailedError, match="killed or ended early") as caught:
        suite.run(plan, engine, out=tmp_path, report=lambda _line: None)
    assert f"exit code {code}" in str(caught.value)
    assert ("SIGKILL" in str(caught.value)) == ("dmesg" in str(caught.value)) == (code == 137)
    assert suite.earlier_result(plan, tmp_path) is None


@pytest.mark.parametrize(
    ("outcome", "code", "fits"),
    [
        ("passed", 0, True),
        ("passed", 1, False),
        ("skipped", 0, True),
        ("failed", 1, True),
        ("failed", 0, False),
        ("error", 0, False),
        ("invalid", 1, True),
        ("invalid", 0, False),
    ],
)
def test_an_exit_code_that_contradicts_the_outcomes_is_refused(tmp_path, outcome, code, *, fits):
    engine: Any = FakeEngine(lambda told: healthy(told).replace('"passed"', f'"{outcome}"'), code)
    expectation = (
        contextlib.nullcontext() if fits else pytest.raises(ChecksFailedError, match="contradicts its result")
    )
    with expectation:
        suite.run(make_plan(tmp_path), engine, out=tmp_path, report=lambda _line: None)


@pytest.mark.parametrize("reported", [None, {"path": "/evil/python3"}, {"sha256": DIGEST}, {"package": None}])
def test_a_result_of_another_python_is_refused(tmp_path, reported):
    def other(told: dict[str, Any]) -> str:
        return json.dumps(of_run(told, interpreter=reported and told["interpreter"] | reported))

    with pytest.raises(ChecksFailedError, match="another Python"):
        run(make_plan(tmp_path), tmp_path, answer=other)


def test_a_result_that_never_finished_is_not_kept(tmp_path):
    def dying(told: dict[str, Any]) -> str:
        return json.dumps(of_run(told, checks=[], state="running", finished=None))

    plan = make_plan(tmp_path)
    run(plan, tmp_path, answer=dying)
    assert suite.earlier_result(plan, tmp_path) is None


DIFFERS = r"in result\.json differs from run\.json"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("run_id", "deadbeef", "belongs to a different run"),
        ("seen_devices", None, "which devices the suites saw"),
        ("tier", "soak", DIFFERS),
        ("stack_id", "another", DIFFERS),
        ("host", result_files.host("nvidia", *["H200"] * 8, driver="580.1"), DIFFERS),
        ("inputs", dict.fromkeys(("suites", "trainers", "thresholds", "matrix"), DIGEST), DIFFERS),
        ("image", {"reference": "x:1", "config_digest": DIGEST, "manifest_digest": None}, DIFFERS),
    ],
)
def test_a_result_about_something_else_than_the_run_is_refused(tmp_path, name, value, says):
    with pytest.raises(ChecksFailedError, match=says):
        run(make_plan(tmp_path), tmp_path, answer=lambda told: json.dumps(of_run(told, **{name: value})))


def test_a_result_that_was_edited_is_not_kept(tmp_path):
    plan, path = make_plan(tmp_path), tmp_path / "run" / "result.json"
    run(plan, tmp_path, answer=lambda told: healthy(told).replace('"passed"', '"failed"'))
    path.write_text(path.read_text().replace('"failed"', '"passed"'))
    assert suite.earlier_result(plan, tmp_path) is None


def keep_as_of(out: Path, started: dt.datetime, finished: dt.datetime) -> None:
    """Shift the times in the files that a run left."""
    result, key = out / "run" / "result.json", out / "key.json"
    times = {"started": started.isoformat(), "finished": finished.isoformat()}
    result.write_text(json.dumps(json.loads(result.read_text()) | times))
    digest = {"result": sha256(result.read_bytes())}
    key.write_text(json.dumps(json.loads(key.read_text()) | digest))


@pytest.mark.parametrize(("days", "kept"), [(6, True), (8, False)])
def test_a_result_is_kept_for_a_week(tmp_path, days, *, kept):
    plan = make_plan(tmp_path)
    run(plan, tmp_path)
    then = dt.datetime.now(dt.UTC) - dt.timedelta(days=days)
    keep_as_of(tmp_path, then, then)
    assert (suite.earlier_result(plan, tmp_path) is not None) == kept


@pytest.mark.parametrize(("started", "finished"), [(-1, 1), (1, 1), (1, -1)])
def test_a_result_from_the_future_is_not_kept(tmp_path, started, finished):
    plan, now = make_plan(tmp_path), dt.datetime.now(dt.UTC)
    run(plan, tmp_path)
    keep_as_of(tmp_path, now + started * HOUR, now + finished * HOUR)
    assert suite.earlier_result(plan, tmp_path) is None


@pytest.mark.parametrize(
    ("started", "finished"),
    [(-HOUR, -HOUR), (-HOUR, NONE), (NONE, HOUR), (HOUR, HOUR), (HOUR, NONE), (HOUR, None), (NONE, -HOUR)],
)
def test_times_that_the_image_made_up_are_refused(tmp_path, started, finished):
    def lying(told: dict[str, Any]) -> str:
        now = dt.datetime.now(dt.UTC)
        ended = None if finished is None else (now + finished).isoformat()
        state = "finished" if ended else "running"
        return json.dumps(of_run(told, started=(now + started).isoformat(), finished=ended, state=state))

    plan = make_plan(tmp_path)
    with pytest.raises(ChecksFailedError, match="lie outside the run"):
        run(plan, tmp_path, answer=lying)
    assert suite.earlier_result(plan, tmp_path) is None


def test_times_in_whole_milliseconds_are_those_of_the_run(tmp_path):
    def writing(told: dict[str, Any]) -> str:
        now = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
        return json.dumps(of_run(told, started=now, finished=now))

    plan = make_plan(tmp_path)
    run(plan, tmp_path, answer=writing)
    assert suite.earlier_result(plan, tmp_path) is not None
