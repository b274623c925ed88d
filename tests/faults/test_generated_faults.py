"""Generated cases find faults that were drawn without them: a few in a whole run, and a share of many."""

import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from planting import TESTS, Fault

pytest.importorskip("torch", reason="the suites need torch")
import drawn_faults

sys.path.insert(0, str(TESTS / "acceptance"))

from workloads import generated, generated_judge

HERE = Path(__file__).parent
CHECK = "test_generated.py::test_generated"
COUNTS = {"operators": 300, "sizes": 16, "attention": 24}  # one small run on a processor
NIGHTS = int(os.environ.get("STACKCHECK_DRAWN_NIGHTS", "0"))
DRAWN = int(os.environ.get("STACKCHECK_DRAWN_FAULTS", "60"))
LEAST_FOUND = 3  # of 60 in one run, as when this was measured


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Take back what a library sets while cases run here: children of later tests fork without it only."""
    with mock.patch.dict(os.environ):
        yield


def planted(family: str, *fault: str, check: str = CHECK) -> Fault:
    """A fault below PyTorch's operators, in the process that draws the cases."""
    return Fault(
        " ".join(fault),
        f"{check}[{family}]",
        files={"drawn_faults.py": (HERE / "drawn_faults.py").read_text(encoding="utf-8")},
        patches={
            "workloads.generated:of_tier": "lambda **k: __import__('drawn_faults').under("
            f"{fault!r}, original, {{**k, 'tier': 'smoke'}})"
        },
        says="units from float64",
        tier="soak",
    )


FAULTS = (
    planted("operators", "mul", "float32", "an operand with gaps", "its last element is 0"),
    planted("sizes", "gelu", "float32", "more than 2^16 elements", "its last element is 0"),
    planted(
        "attention", "_scaled_dot_product_flash_attention_for_cpu", "bfloat16", "always", "one column is 0"
    ),
    Fault(
        "a compiled program that loses a step",
        f"{CHECK}[chains]",
        patches={
            "workloads.generated_chains:draw": "lambda *a: (lambda words, call, eager: (words, "
            "Call(**{**vars(call), 'function': lambda x, y: (x + y, y)}), eager))(*original(*a))",
            "workloads.generated:of_tier": "lambda **k: original(**{**k, 'tier': 'smoke'})",
        },
        says="units from float64",
        tier="soak",
    ),
)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_fault_is_caught(fault: Fault, plant) -> None:
    plant(fault)


def test_a_drawn_fault_is_found_and_nothing_else() -> None:
    """In one process and in seconds: a fault, and the same cases without it."""
    cases = [("operators", 0, number) for number in range(40)] + [
        ("attention", 0, number) for number in range(4)
    ]
    runs = watched(cases)
    assert found(None, cases) is None
    fault = drawn_faults.Drawn("mul", drawn_faults.TYPES[0], "always", "it is off by 4096 roundings")
    assert found(fault, runs[fault.operator, fault.dtype])


@pytest.mark.slow
def test_power(tmp_path: Path) -> None:
    """How many of the drawn faults one run finds, and how many nights with other seeds find."""
    cases = [
        (family, seed, n)
        for seed in range(1 + NIGHTS)
        for family, count in COUNTS.items()
        for n in range(count)
    ]
    runs, at, told = watched(cases), {}, []
    drawn = list(drawn_faults.faults(31, DRAWN))
    for fault in drawn:
        at[fault] = found(fault, runs[fault.operator, fault.dtype])
        told.append(
            f"{fault}: {at[fault] or 'not found'}, {len(runs[fault.operator, fault.dtype])} cases run it"
        )
    one = sum(case is not None and case[1] == 0 for case in at.values())
    later = sum(case is not None for case in at.values())
    told.append(f"{one} of {len(drawn)} in one run, {later} with {NIGHTS} nights more")
    (tmp_path / "power.txt").write_text("\n".join(told), encoding="utf-8")
    assert one >= LEAST_FOUND * len(drawn) // 60


def watched(cases: list[tuple[str, int, int]]) -> dict[tuple[str, object], list[tuple[str, int, int]]]:
    """Operator and type -> the cases that run it."""
    runs = defaultdict(list)
    for case in cases:
        with generated._plain(), drawn_faults.Watched() as seen:
            for call in _calls(case):
                generated_judge.results(call)
        for one in seen.seen:
            runs[one].append(case)
    return runs


def _calls(case: tuple[str, int, int]) -> Iterator[generated_judge.Call]:
    family, seed, number = case
    drawn = generated._drawn(family, generated.source(*case), seed * 1_000_003 + number, "small")
    call = drawn and generated._fitting(lambda: (generated_judge.results(drawn[1]), drawn[1])[1])
    if call:
        yield call


def found(fault: drawn_faults.Drawn | None, cases: list[tuple[str, int, int]]) -> tuple[str, int, int] | None:
    """The first case that fails with the fault planted."""
    for case in cases:
        with generated._plain():
            if fault is None:
                margin = generated.margin(*case)
            else:
                with fault.mode():
                    margin = generated.margin(*case)
        if margin is not None and margin > 1:
            return case
    return None
