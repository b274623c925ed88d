"""Faults of a whole run: who judges it comes last, and who listens is known to listen."""

import pytest

import planting
from harness import order
from harness.listener import Listener
from planted_suite import run_suite

pytestmark = pytest.mark.catches("the harness")


@pytest.mark.healthy
@pytest.mark.parametrize("workers", ["0", "2"])
def test_check_of_the_whole_run_comes_after_every_other_one(tmp_path, workers, suite_python) -> None:
    assert suite_python
    result = run_suite(
        tmp_path, "", "-n", workers, "--dist", "load", "-k", "judges or slow or after or invalid"
    )
    outcomes = {check["id"].rpartition("::")[2]: check["outcome"] for check in result["checks"]}
    assert outcomes.pop("test_judges_the_run") == "passed", result["output"]
    assert len(outcomes) == 3
    judged = next(check for check in result["checks"] if check["id"].endswith("judges_the_run"))
    assert judged["evidence"]["before"]
    assert judged["evidence"]["after"]


def test_check_that_never_ends_is_not_waited_for_without_end(tmp_path) -> None:
    ended = order.Ended(tmp_path / "ended")
    ended.add(0)
    assert ended.wait_for(1, stall_s=0.1)
    assert not ended.wait_for(2, stall_s=0.3)


def test_listener_that_cannot_start_is_known_as_gone(tmp_path) -> None:
    listener = Listener(tmp_path / "faults.jsonl")
    listener.start("no-such-vendor")
    heard = listener.heard()
    listener.stop()
    assert not heard.listening
    assert "no vendor" in heard.error


def test_listener_ends_with_the_run_that_started_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(planting.STUBS))
    listener = Listener(tmp_path / "faults.jsonl")
    listener.start("nvidia")
    assert listener.heard().listening
    listener.stop()
    assert not listener.heard().listening
