"""Witnesses: what a child computes from numbers that nobody knew before, compared outside the image.

In: one device, or n. Out: values, checked in float64 by the controller. The other checks believe figures
that a child judged; an image that only says what they want to hear fails here.
"""

import json
import random
import secrets

import pytest

from harness import clock, overdue, typed, witness
from harness import launch as launcher
from harness.calls import Launch, OnDevice, RecordMetric
from harness.leases import Lease
from harness.session import AcceptanceSession
from workloads import margins

RANKS = {"cpu": 2, "whole": False}  # `ranks` is every device of this run
TIMEOUT_S = 180


@pytest.fixture
def source() -> random.Random:
    """Numbers that cannot be known before the question is asked."""
    return random.Random(secrets.randbits(128))


@pytest.mark.gpus(1)
@pytest.mark.parametrize("family", witness.FAMILIES)
def test_witness(
    family: str, source: random.Random, on_device: OnDevice, record_metric: RecordMetric
) -> None:
    """Values and gradients of this family are those that the controller computes from the same numbers."""
    question = witness.FAMILIES[family]
    asked = question.draw(source)
    answer = on_device(f"workloads.witness:{family}", **asked)
    require(witness.worst(question.answer(**asked), answer), record_metric)


def test_witness_of_collectives(
    ranks: int, source: random.Random, launch: Launch, record_metric: RecordMetric
) -> None:
    """Sum, maximum, broadcast and gathering over all ranks are those of the numbers that each of them got.
    The ranks are torchrun's, and load torch anew, as a user's do.
    """
    asked = witness.draw_collectives(source, ranks)
    answer = launch("witness_ranks.py", json.dumps(asked), nproc=ranks, timeout_s=TIMEOUT_S, fresh=True)
    require(witness.worst(witness.collectives(**asked), answer), record_metric)


@pytest.mark.gpus(1, perf=True)
def test_witness_of_speed(
    source: random.Random, acceptance: AcceptanceSession, on_device: OnDevice, record_metric: RecordMetric
) -> None:
    """A chain of products has the values that the controller computes, and took the time by its own clock."""
    size = clock.CPU if acceptance.vendor == "cpu" else clock.GPU
    found = clock.clocked(source, on_device, size)
    record_metric("witness_tflops", found.tflops, unit="TFLOP/s")
    record_metric("witness_seconds", found.seconds, unit="s")
    record_metric("witness_said_seconds", found.said_s, unit="s")
    assert not found.problem, found.problem


@pytest.mark.gpus(1)
def test_witness_by_the_way_of_a_user(
    source: random.Random, acceptance: AcceptanceSession, lease: Lease, record_metric: RecordMetric
) -> None:
    """`python3 -c …`, found by the image's PATH, with the variables of a user's job, computes the same."""
    asked = {name: question.draw(source) for name, question in witness.FAMILIES.items()}
    program = typed.typed(source, asked)
    environment = acceptance.child_environment(lease.devices)
    folder = acceptance.result_dir / "children"
    limit_s = acceptance.limit_s(TIMEOUT_S)
    with overdue.failing():
        said = launcher.as_a_user(
            program.program, program.arguments, environment=environment, timeout_s=limit_s, folder=folder
        )
    told = program.understood(said)
    right = {name: question.answer(**asked[name]) for name, question in witness.FAMILIES.items()}
    require(max(witness.worst(values, told.get(name)) for name, values in right.items()), record_metric)


def require(distance: float, record_metric: margins.Record) -> None:
    """Record how near an answer came to its tolerance, and fail beyond it."""
    assert distance <= 1, f"the answer is {distance:.3g} tolerances from what the controller computed"
    margins.record(record_metric, distance, 1)
