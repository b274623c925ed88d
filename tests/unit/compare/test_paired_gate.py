"""`certify --against`: a certified image gates another one by a pair; the certificate says what was found."""

import datetime as dt
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import result_files
from small_checkout import CHECKS, CPU_STACK, FakeEngine, call, verify

pytestmark = pytest.mark.usefixtures("own_home", "no_disk_flushes", "small_checkout")

Capsys = pytest.CaptureFixture[str]
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
def certified(own_home: None, fake_engine: FakeEngine, capsys: Capsys) -> None:  # noqa: ARG001  # the folder first
    """A certified image in the target."""
    fake_engine.answer = suites(0.0, 0.0005)
    done = call(capsys, "images", CPU_STACK)
    assert done.code == 0, done.err


@pytest.mark.usefixtures("certified")
def test_an_image_as_fast_as_the_reference_is_certified_and_says_so(
    capsys: Capsys, fake_engine: FakeEngine
) -> None:
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
def test_a_slower_image_is_refused_and_cannot_be_published(
    capsys: Capsys, fake_engine: FakeEngine, small_checkout: Path
) -> None:
    fake_engine.answer = suites(0.0, 0.0005)
    assert call(capsys, "certify", CANDIDATE).code == 0  # bounds alone let it pass
    fake_engine.answer = suites(0.02, 0.0005)
    done = call(capsys, "certify", CANDIDATE, "--against", REFERENCE, "--force")
    assert done.code == 6
    assert "gemm_tflops of test_kernels.py::test_gemm: 2." in done.err
    assert call(capsys, "publish", CANDIDATE).code == 8
    assert list((small_checkout / "build").glob("*/statements/*.json"))


@pytest.mark.usefixtures("certified")
def test_a_node_on_which_nothing_can_be_told_signs_nothing(
    capsys: Capsys, fake_engine: FakeEngine, small_checkout: Path
) -> None:
    assert call(capsys, "certify", CANDIDATE).code == 0
    fake_engine.answer = suites(0.0, 0.05)
    done = call(capsys, "certify", CANDIDATE, "--against", REFERENCE, "--force")
    assert done.code == 9
    assert "too noisy" in done.err
    assert call(capsys, "publish", CANDIDATE).code == 2  # the earlier verdict is gone
    (folder,) = (small_checkout / "build").glob("registry*candidate*")
    assert not list(folder.glob("statements/*.json"))
