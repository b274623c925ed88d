"""Kernels and collectives with planted faults: each check catches its mutants and passes the healthy case."""

import pytest

import planting
from workloads import speed_outliers

RUNS = {"kernel": 0, "compiler": 0, "collective": 2}  # and how many ranks
# A smaller count means that a mutant was lost.
LEAST = {"kernel": 120, "collective": 43, "compiler": 36}


@pytest.mark.parametrize("kind", sorted(RUNS))
def test_every_mutant_is_caught_and_what_is_healthy_passes(kind, suite_python, request, tmp_path):
    """By one process for each kind: importing torch for each mutant would take minutes."""
    assert suite_python
    answers = planting.program(f"{kind}_mutants.py", ranks=RUNS[kind], stacks=tmp_path)
    mutants = {name: told for name, told in answers.items() if not name.startswith("healthy")}
    for name, told in mutants.items():
        entry = {"name": name, "check": told["check"], "vendor": "cpu", "expected": "failed"}
        planting.tell(request.node, {**entry, "caught": bool(told["failing"])})
    assert len(mutants) >= LEAST[kind], f"{len(mutants)} mutants ran"
    assert not [name for name, told in mutants.items() if not told["failing"]], "these passed every gate"
    healthy = {name: told for name, told in answers.items() if name.startswith("healthy")}
    for name, told in healthy.items():
        entry = {"name": name, "check": told["check"], "vendor": "cpu", "expected": "passed"}
        planting.tell(request.node, {**entry, "caught": not told["failing"]})
    assert healthy
    assert not any(told["failing"] for told in healthy.values()), healthy


FAULTS = (
    planting.Fault(
        "a product with a zeroed element",
        "test_kernels.py::test_gemm",
        says="elements outside",
        tier="smoke",
        patches={
            "torch:mm": "lambda *a, **k: "
            "(o := original(*a, **k), o.view(-1)[-1].zero_() if o.dtype.itemsize < 8 else 0)[0]"
        },
    ),
    *(
        planting.Fault(
            "a clock that stands still",
            f"test_kernel_speed.py::{check}",
            says="not a number",
            patches={"workloads.timing:repeats": "lambda *a, **k: [float('nan')] * 5"},
        )
        for check in ("test_gemm_speed", "test_copy_speed", "test_attention_speed")
    ),
    planting.Fault(
        "a clock that stands still beside FlashAttention 4",
        "test_kernel_speed.py::test_flash_attention_4_speed",
        says="not a number",
        patches={
            "workloads.flash_package:is_v4": "lambda: True",
            "workloads.flash_package:rows": "lambda q, k, v, **options: q * 1.0",
            "workloads.timing:repeats": "lambda *a, **k: [float('nan')] * 5",
        },
    ),
    planting.Fault(
        "FlashAttention 4 far slower than torch's attention",
        "test_kernel_speed.py::test_flash_attention_4_speed",
        says="backward: ",
        patches={
            "workloads.flash_package:is_v4": "lambda: True",
            "workloads.flash_package:rows": "lambda q, k, v, **options: q + 0 * (k.sum() + v.sum())",
            "workloads.kernel_speed:package_backward": "lambda: [{**original()[0], 'value': 1e-9}]",
        },
    ),
    planting.Fault(
        "rank 1 keeps its own values",
        "test_collectives.py::test_all_reduce_values",
        says="rank 1",
        tier="smoke",
        patches={
            "torch.distributed:all_reduce": "lambda t, *a, **k: (m := t.clone(), w := original(t, *a, **k), "
            "t.copy_(m) if get_rank() == 1 else 0)[1]"
        },
    ),
)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_fault_fails_the_suite(fault, plant):
    plant(fault)


@pytest.mark.parametrize(
    ("curve", "dips"),
    [
        ({1 << 24: 250.0, 1 << 28: 341.0, 1 << 30: 355.0}, 0),
        ({1 << 24: 250.0, 1 << 28: 120.0, 1 << 30: 355.0}, 1),
        ({1 << 24: 250.0, 1 << 28: float("nan"), 1 << 30: 355.0}, 2),
        ({1 << 28: 341.0, 1 << 30: 330.0}, 0),
    ],
    ids=["healthy", "one slow size", "not a number", "three per cent"],
)
def test_a_slow_size_in_a_curve_is_found(curve, dips):
    assert len(speed_outliers.dips(curve)) == dips


def test_bus_bandwidth_is_nccl_tests_definition():
    # nccl-tests on 4 H200: all_reduce of 64 KiB in 21.5 us reads 4.57 GB/s
    assert speed_outliers.busbw_gb_per_s("all_reduce", 65_536, 21.5e-6, 4) == pytest.approx(4.57, rel=0.01)
    assert speed_outliers.busbw_gb_per_s("all_gather", 1000, 1e-6, 4) == pytest.approx(0.75)
