"""Drawn models of transformers and options of torchao find faults of these packages, and pass without one."""

import os
import random
import sys

import pytest

from planting import TESTS, Fault

pytest.importorskip("torch", reason="the suites need torch")
pytest.importorskip("transformers", reason="an image without it skips the check")
pytest.importorskip("torchao", reason="an image without it skips the check")

import drawn_package_faults

sys.path.insert(0, str(TESTS / "acceptance"))

from workloads import generated, generated_left, generated_torchao, generated_transformers
from workloads import transformers_models as models

CHECK = "test_generated.py::test_generated_packages"
TURNS = int(os.environ.get("STACKCHECK_DRAWN_TURNS", "8"))
DRAWN = int(os.environ.get("STACKCHECK_DRAWN_FAULTS", "10"))
FAULT_SEED = int(os.environ.get("STACKCHECK_DRAWN_SEED", "32"))
LEAST_FOUND = 4  # of 10


def planted(
    name: str, package: str, place: str, becomes: str, *, another: bool = False, **more: str
) -> Fault:
    """A fault of a package below the workload, in a few cases of it."""
    few = {"family": package, "seed": 0, "least": 40, "most": 40}
    patches = {
        place: becomes,
        "workloads.generated:SHRINKS": "0",
        "workloads.transformers_models:table": "lambda: ('llama', 'mixtral', 'gemma2', 'qwen3')",
        "workloads.generated:of_soak": f"lambda **_: {{'least': 0, **check(**{few!r})}}",
    }
    return Fault(name, f"{CHECK}[{package}]", patches=patches, tier="soak", another=another, **more)


FAULTS = (
    planted(
        "packed sequences that see each other",
        "transformers",
        "transformers.masking_utils:find_packed_sequence_indices",
        "lambda *a, **k: None",
        says="rows=packed",
    ),
    planted(
        "a loss that is a thousandth too large",
        "transformers",
        "transformers.loss.loss_utils:fixed_cross_entropy",
        "lambda *a, **k: original(*a, **k) * 1.001",
        says="units from float64",
        another=True,
    ),
    planted(
        "states of an optimizer that are rounded down",
        "torchao",
        "torchao.optim.subclass_8bit:quantize_8bit_with_qmap",
        "lambda x, table: (original(x, table).int() - 1).clamp(0).to(original(x, table).dtype)",
        says="exp_avg",
    ),
    planted(
        "nothing", "torchao", "torchao.optim.subclass_8bit:get_qmap_signed", "original", outcome="passed"
    ),
)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_fault_is_caught(fault, plant):
    plant(fault)


@pytest.mark.slow
def test_some_drawn_faults_are_found():
    """Of what strikes one number of one module, in one condition, in a few turns."""
    named = [name for name in models.table() if is_made(name)]
    faults = drawn_package_faults.draw(FAULT_SEED, DRAWN, named)
    found = [drawn_package_faults.turn(fault, range(300, 300 + TURNS)) for fault in faults]
    assert sum(first is not None for _, first in found) >= LEAST_FOUND, list(zip(faults, found, strict=True))


def is_made(name: str) -> bool:
    """Whether the package makes a model of this architecture so small."""
    try:
        models.begun(name, models.SMALLEST)
    except generated_left.RefusedError:
        return False
    return True


def test_a_real_fault_is_seen_and_known(monkeypatch):
    """Reentrant checkpoints lose gradients where layers share keys; other checkpoints do not."""
    sizes = tuple((dict(models.SMALLEST) | {"layers": 3}).items())
    case = generated_transformers.Case(
        "gemma4_text", sizes, (9,), rows="padded right", checkpoint="reentrant"
    )
    assert generated_transformers.known(case)
    monkeypatch.setattr(generated, "SHRINKS", 0)
    for kind, wrong in (("reentrant", True), ("not reentrant", False)):
        call = generated_transformers.made(case._replace(checkpoint=kind), 0)
        assert (generated._judged(call, 16.0)[0] > 1) is wrong


@pytest.mark.parametrize("error", [TypeError, ValueError, KeyError])
@pytest.mark.parametrize("part", ["_share", "_nearest", "_products", "_whole", "_data"])
def test_a_judge_of_torchao_that_breaks_refuses_nothing(part, error, monkeypatch):
    """The package alone refuses: what a judge raises would pass all that is wrong."""

    def raising(*_, **__):
        raise error("it is broken")

    monkeypatch.setattr(generated_torchao, part, raising)
    with pytest.raises(error):
        [generated_torchao.one(0, number) for number in range(len(generated_torchao.table()))]


@pytest.mark.parametrize("error", [TypeError, ValueError, KeyError])
@pytest.mark.parametrize("part", ["draw", "known", "made"])
def test_drawing_a_model_that_breaks_refuses_nothing(part, error, monkeypatch):
    def raising(*_, **__):
        raise error("it is broken")

    monkeypatch.setattr(models, "table", lambda: ("llama",))
    monkeypatch.setattr(generated_transformers, part, raising)
    with pytest.raises(error):
        generated_transformers.drawn(random.Random(0), 0, 0)
