"""Two images in turn on one node: the slower one is named; `certify --against` gates a certified image so."""

import datetime as dt
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

import result_files
from small_checkout import CHECKS, CPU_STACK, FOREIGN, FakeEngine, call, verify

pytestmark = pytest.mark.usefixtures("own_home", "no_disk_flushes", "small_checkout")

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
def test_a_slower_image_is_named(fake_engine, capsys, loss, code):
    fake_engine.answer = speed(loss, noise=0.001)
    done = call(capsys, "compare", "--paired", CPU_STACK, FOREIGN, "--json")
    assert done.code == code
    found = json.loads(done.out)["metrics"]
    assert {each["name"]: each["pair"]["verdict"] for each in found} == dict.fromkeys(
        ("gemm_tflops", "latency"), "slower" if loss else "equal"
    )
    assert all(abs(each["pair"]["loss"] - loss) < 0.004 for each in found)
    assert all(len(each["a"]) == len(each["b"]) == len(each["itself"][1]) == 5 for each in found)


def test_the_runs_take_turns_and_choose_their_checks(fake_engine, capsys, small_checkout):
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
    fake_engine, capsys, outcome, code
):
    fake_engine.answer = speed(0.05, noise=0.0, outcome=outcome)
    done = call(capsys, "compare", "--paired", CPU_STACK, FOREIGN, "--rounds", "3")
    assert done.code == code
    assert ("B is slower than A" in done.err) == (outcome == "failed")


REFERENCE = f"oci:dist:{CPU_STACK}"
CANDIDATE = "registry.example.org/team/candidate:2"


def suites(loss: float, noise: float) -> Callable[[dict[str, Any]], str]:
    """Every check passes; the speed of an image of no stack is lower."""
    chance = random.Random(7)

    def write(told: dict[str, Any]) -> str:
        now = dt.datetime.now(dt.UTC).isoformat()
        value = 800.0 * (1 - loss if told["stack_id"] is None else 1) * chance.gauss(1, noise)
        figure = result_files.metric(
            "gemm_tflops",
            value,
            unit="TFLOP/s",
            repeats=[value] * 5,
            verdict="recorded",
            bound=None,
            direction=None,
            source=None,
        )
        checks = [result_files.check(name, devices=[], metrics=[figure]) for name in CHECKS]
        same = result_files.told_again(told)
        return json.dumps(result_files.result(*checks, **same, started=now, finished=now))

    return write


@pytest.fixture
def certified(own_home: None, fake_engine: FakeEngine, capsys) -> None:  # noqa: ARG001  # the folder first
    """A certified image in the target."""
    fake_engine.answer = suites(0.0, 0.0005)
    done = call(capsys, "images", CPU_STACK)
    assert done.code == 0, done.err


@pytest.mark.usefixtures("certified")
def test_an_image_as_fast_as_the_reference_is_certified_and_says_so(capsys, fake_engine):
    before = len(fake_engine.runs)
    done = call(capsys, "certify", CANDIDATE, "--against", REFERENCE, "--json")
    assert done.code == 0, done.err
    assert len(fake_engine.runs) - before == 1 + 20
    found = json.loads(done.out)["against"]
    assert (found["equal"], found["slower"], found["runs"]) == (len(CHECKS), 0, 5)
    published = json.loads(call(capsys, "publish", CANDIDATE, "--json").out)["reference"]
    shown = verify(capsys, published)
    assert f"{len(CHECKS)} equal" in shown.out
    assert "oci:dist@sha256:" in shown.out
    signed = json.loads(verify(capsys, published, "--json").out)["certificate"]["against"]
    assert signed == found


@pytest.mark.usefixtures("certified")
def test_a_slower_image_is_refused_and_cannot_be_published(capsys, fake_engine, small_checkout):
    fake_engine.answer = suites(0.0, 0.0005)
    assert call(capsys, "certify", CANDIDATE).code == 0  # bounds alone let it pass
    fake_engine.answer = suites(0.02, 0.0005)
    done = call(capsys, "certify", CANDIDATE, "--against", REFERENCE, "--force")
    assert done.code == 6
    assert "gemm_tflops of test_kernels.py::test_gemm: 2." in done.err
    assert call(capsys, "publish", CANDIDATE).code == 8
    assert list((small_checkout / "build").glob("*/statements/*.json"))


@pytest.mark.usefixtures("certified")
def test_a_node_on_which_nothing_can_be_told_signs_nothing(capsys, fake_engine, small_checkout):
    assert call(capsys, "certify", CANDIDATE).code == 0
    fake_engine.answer = suites(0.0, 0.05)
    done = call(capsys, "certify", CANDIDATE, "--against", REFERENCE, "--force")
    assert done.code == 9
    assert "too noisy" in done.err
    assert call(capsys, "publish", CANDIDATE).code == 2  # the earlier verdict is gone
    (folder,) = (small_checkout / "build").glob("registry*candidate*")
    assert not list(folder.glob("statements/*.json"))
