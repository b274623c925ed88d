"""Two images in turn on one node: the slower one is named; a noisy node says so, an unfit one nothing."""

import datetime as dt
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import result_files
from small_checkout import CHECKS, CPU_STACK, FOREIGN, FakeEngine, call

pytestmark = pytest.mark.usefixtures("own_home", "no_disk_flushes", "small_checkout")

Capsys = pytest.CaptureFixture[str]
SPEED = CHECKS[-1]


def speed(loss: float, noise: float, outcome: str = "passed") -> Callable[[dict[str, Any]], str]:
    """What the suites write: a speed that is lower in the foreign image, with the noise of a node."""
    chance = random.Random(5)

    def write(told: dict[str, Any]) -> str:
        now = dt.datetime.now(dt.UTC).isoformat()
        slow = 1 - loss if told["stack_id"] is None else 1.0
        value = 800.0 * slow * chance.gauss(1, noise)
        figure = result_files.metric("gemm_tflops", value, unit="TFLOP/s", repeats=[value] * 5)
        latency = result_files.metric("latency", 1e3 / value, unit="us", repeats=[1.0], direction=None)
        ended = {} if outcome == "passed" else {"reason": "because"}
        check = result_files.check(SPEED, outcome, metrics=[figure, latency], **ended)
        same = result_files.told_again(told)
        return json.dumps(result_files.result(check, **same, started=now, finished=now))

    return write


@pytest.mark.parametrize(("loss", "code"), [(0.0, 0), (0.02, 6), (0.05, 6)])
def test_a_slower_image_is_named(fake_engine: FakeEngine, capsys: Capsys, loss: float, code: int) -> None:
    fake_engine.answer = speed(loss, noise=0.001)
    done = call(capsys, "compare", "--paired", CPU_STACK, FOREIGN, "--json")
    assert done.code == code
    found = json.loads(done.out)["metrics"]
    assert {each["name"]: each["pair"]["verdict"] for each in found} == dict.fromkeys(
        ("gemm_tflops", "latency"), "slower" if loss else "equal"
    )
    assert all(abs(each["pair"]["loss"] - loss) < 0.004 for each in found)
    assert all(len(each["a"]) == len(each["b"]) == len(each["itself"][1]) == 5 for each in found)


def test_the_runs_take_turns_and_choose_their_checks(
    fake_engine: FakeEngine, capsys: Capsys, small_checkout: Path
) -> None:
    fake_engine.answer = speed(0.0, noise=0.0)
    call(capsys, "compare", "--paired", CPU_STACK, FOREIGN, "--checks", "gemm or copy")
    images = ["A" if "cpu-torch" in spec.image else "B" for spec in fake_engine.runs]
    assert "".join(images) == "A" * 10 + "ABBAABBAAB"
    commands = [vars(spec.beside)["command"] for spec in fake_engine.runs]
    assert all(command[-1] == "-k=gemm or copy" for command in commands)
    assert "--tier=standard" in commands[0]
    written = json.loads((small_checkout / "build" / "paired" / "result.json").read_text())
    assert written["rounds"] == 5


@pytest.mark.parametrize(("outcome", "code"), [("failed", 6), ("invalid", 9)])
def test_a_check_that_misses_its_bound_is_compared_and_an_unfit_machine_is_not(
    fake_engine: FakeEngine, capsys: Capsys, outcome: str, code: int
) -> None:
    fake_engine.answer = speed(0.05, noise=0.0, outcome=outcome)
    done = call(capsys, "compare", "--paired", CPU_STACK, FOREIGN, "--rounds", "3")
    assert done.code == code
    assert ("B is slower than A" in done.err) == (outcome == "failed")
