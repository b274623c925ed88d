"""Generated cases find faults that were drawn without them: a few in a whole run, and a share of many."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from planting import TESTS, Fault

pytest.importorskip("torch", reason="the suites need torch")
import drawn_faults
import generated_power

sys.path.insert(0, str(TESTS / "acceptance"))

from workloads import generated, generated_operators

HERE = Path(__file__).parent
CHECK = "test_generated.py::test_generated"
TURNS = int(os.environ.get("STACKCHECK_DRAWN_TURNS", "1"))  # cases of each operator and type in one run
NIGHTS = int(os.environ.get("STACKCHECK_DRAWN_NIGHTS", "0"))
DRAWN = int(os.environ.get("STACKCHECK_DRAWN_FAULTS", "60"))
FAULT_SEED = int(os.environ.get("STACKCHECK_DRAWN_SEED", "31"))
LEAST_FOUND = 18  # of 60 by one turn of one run


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Take back what a library sets while cases run here: children of later tests fork without it only."""
    with mock.patch.dict(os.environ):
        yield


def planted(family: str, *fault: str) -> Fault:
    """A fault below PyTorch's operators, in the processes that judge the cases; a few of them are enough."""
    count = 200 if family == "operators" else 24
    processes = 2 if family == "operators" else 1
    few = f"dict(family={family!r}, seed=0, least={count}, most={count}, processes={processes})"
    return Fault(
        " ".join(fault),
        f"{CHECK}[{family}]",
        files={"drawn_faults.py": (HERE / "drawn_faults.py").read_text(encoding="utf-8")},
        patches={
            "workloads.generated:of_soak": "lambda **_: {'least': 0, **__import__('drawn_faults').under("
            f"{fault!r}, __import__('workloads.generated', fromlist=['check']).check, {few})}}"
        },
        says="units from float64",
        tier="soak",
    )


def in_compiled(name: str, seed: int, says: str, place: str, planted: str, *, another: bool = True) -> Fault:
    """A fault of a compiler, of recomputation or of random numbers, and the drawn case that meets it."""
    return Fault(
        name,
        f"{CHECK}[compiled]",
        files={"compiled_faults.py": (HERE / "compiled_faults.py").read_text(encoding="utf-8")},
        patches={
            place: planted
            if place.endswith((":compiled", ":checkpoint", ":dropout"))
            else f"lambda *_: {planted}",
            "workloads.generated:of_soak": f"lambda **_: {{'least': 0, **check('compiled', {seed}, 1, 1)}}",
        },
        says=says,
        tier="soak",
        another=another,
    )


FAULTS = (
    planted("operators", "mul", "float32", "an operand with gaps", "its last element is 0"),
    planted("sizes", "gelu", "float32", "more than 2^16 elements", "its last element is 0"),
    planted(
        "attention", "_scaled_dot_product_flash_attention_for_cpu", "bfloat16", "always", "one column is 0"
    ),
    in_compiled(
        "a compiled part without its gradient",
        9,
        "units from float64",
        "workloads.generated_compiled:backend",
        "__import__('compiled_faults').no_gradient_of_a_part",
        another=False,
    ),
    in_compiled(
        "a view compiled as a copy",
        10,
        "units from float64",
        "workloads.generated_compiled:backend",
        "__import__('compiled_faults').views_are_copies",
    ),
    in_compiled(
        "a compiled optimizer without its last tensor",
        1,
        "units from float64",
        "workloads.generated_compiled:compiled",
        "lambda step, name, whole=True, **k: original("
        "step if whole else __import__('compiled_faults').skips_the_last(step), name, whole=whole, **k)",
    ),
    in_compiled(
        "recomputation draws another mask",
        4,
        "the gradient is that of other random numbers",
        "workloads.generated_compiled:checkpoint",
        "functools.partial(original, preserve_rng_state=False)",
        another=False,
    ),
    in_compiled(
        "a mask that repeats every 4 elements",
        4,
        "a mask repeats after",
        "torch.nn.functional:dropout",
        "lambda x, p=0.5, training=True, inplace=False: x * original(torch.ones_like(x).flatten()[::4], p)"
        ".repeat_interleave(4)[:x.numel()].view(x.shape)",
    ),
    in_compiled(
        "dropout of a tenth more",
        4,
        "was asked for",
        "torch.nn.functional:dropout",
        "lambda x, p=0.5, training=True, inplace=False: original(x, 1.1 * p, training, inplace)",
    ),
)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_fault_is_caught(fault: Fault, plant) -> None:
    plant(fault)


@pytest.mark.slow
def test_a_drawn_fault_is_found_and_nothing_else() -> None:
    """In one process and in seconds: a fault, and the same cases without it."""
    cases = [("operators", 0, number) for number in range(60)] + [
        ("attention", 0, number) for number in range(4)
    ]
    fault = drawn_faults.Drawn("mul", drawn_faults.TYPES[0], "always", "it is off by 4096 roundings")
    assert generated_power.found(None, cases) is None
    assert generated_power.found(
        fault, [one for one in cases if generated_power.touched(one, [fault]).struck]
    )


def test_every_operator_has_a_turn_before_any_has_two() -> None:
    rows = generated_operators.rows()
    for seed in (0, 740_000):
        turns = [
            [generated_operators.draw(seed, turn * len(rows) + n) for n in range(len(rows))]
            for turn in (0, 1)
        ]
        for drawn in turns:
            assert {(one.operator, one.dtype) for one in drawn} == set(rows)
        assert [(one.operator, one.dtype) for one in turns[0]] != [
            (one.operator, one.dtype) for one in turns[1]
        ]
        same = {(one.operator, one.dtype): (one.sizes, one.numbers) for one in turns[0]}
        assert all(same[one.operator, one.dtype] != (one.sizes, one.numbers) for one in turns[1])


def test_another_seed_draws_other_cases() -> None:
    cases = [[str(generated_operators.draw(seed, n)) for n in range(50)] for seed in (0, 1, 0)]
    assert cases[0] == cases[2]
    assert not set(cases[0]) & set(cases[1])


def test_a_clock_that_is_over_takes_nothing_from_the_least() -> None:
    """Neither in one process nor in two, and never more than the most."""
    for processes in (1, 2):
        assert generated.check("sizes", 0, 5, 9, seconds=0, processes=processes)["drawn"] == 5
        assert generated.check("sizes", 0, 2, 4, seconds=1000, processes=processes)["drawn"] == 4


def test_fewer_cases_than_the_least_are_refused() -> None:
    report = {"family": "sizes", "seed": 0, "drawn": 4, "least": 5, "judged": 4, "worst": 0.0, "failed": []}
    with pytest.raises(AssertionError, match="only 4 of at least 5"):
        generated.require(report, lambda *_, **__: None, 0.5)


@pytest.mark.parametrize(
    "what",
    [
        "os._exit(3)",
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in ("os.kill(os.getpid(), 11)", "sum(range(10**15))")
        ),
    ],
)
def test_a_case_that_ends_its_process_or_does_not_end_is_named(what: str) -> None:
    """What ends a process cannot say who it was, so what started it does."""
    program = (
        "import os; from workloads import generated; generated.MOST_S = 5; "
        f"generated._one = lambda family, seed, number, sizes: {what} if number == 3 else None; "
        "generated.check('sizes', 7, 6, 6, processes=2)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=TESTS / "acceptance",
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 1
    assert "generated.repeat('sizes', 7, 3, 'small')" in ended.stderr


@pytest.mark.slow
def test_power(tmp_path: Path) -> None:
    """How many of the drawn faults one run finds, and how many nights with other seeds find."""
    drawn = list(drawn_faults.faults(FAULT_SEED, DRAWN))
    counts = {"operators": TURNS * len(generated_operators.rows()), "sizes": 16, "attention": 24}
    power = generated_power.measure(drawn, range(1 + NIGHTS), counts, len(os.sched_getaffinity(0)))
    told = [
        f"{fault}: {one.case or 'not found'}, {one.touched} cases run it"
        for fault, one in power.faults.items()
    ]
    one, later = power.within(range(1)), power.within(range(1 + NIGHTS))
    told.append(f"{one} of {len(drawn)} in one run, {later} with {NIGHTS} nights more")
    (tmp_path / "power.txt").write_text("\n".join(told), encoding="utf-8")
    assert one >= LEAST_FOUND * len(drawn) // 60
