"""Timed jobs on planted H200s: a slow job fails its bound, one without timed steps or with a problem never
passes, and half an hour of training shows a machine that wears out.
"""

# ruff: noqa: E501 - a table of faults reads in rows
import json

import pytest

from planting import Fault
from unfit_runs import assert_unfit

LARGE = "test_training.py::test_throughput_8b"
FSDP2 = "test_training.py::test_throughput_fsdp2"
SOAK = "test_training_soak.py::test_training_at_full_power"
# tokens/s and GPU, as H200.json says of two; of four it says 10,812
HEALTHY_RATE = 10_844.0
FSDP2_RATE = 31_300.0  # of one
H100 = {"pci_device_id": 0x233010DE, "memory": 81559 << 20}
A100_40 = {"pci_device_id": 0x20B010DE, "memory": 40 << 30, "capability": [8, 0], "cores": 6912}
PREFLIGHT = {"problems": [], "copy": {"bytes": 1 << 32, "gb_per_s": 4200.0}, "collectives": []}


def record(layers: int | None = None, problems: tuple[str, ...] = (), **performance: object) -> dict:
    """The record of a timed job on rank 0."""
    rate = HEALTHY_RATE if layers is None else FSDP2_RATE
    speed = {
        "tokens_per_s_per_gpu": rate,
        "tokens_per_s_per_gpu_wall": rate,
        "tokens_per_s_per_gpu_by_minute": [rate] * 30,
        "timed_steps": 99,
        "power_w": 690.0,
    }
    shares = {"mfu_noncausal_percent": None, "mfu_noncausal_of_gemm_percent": None}
    return {
        "problems": list(problems),
        "phases_s": {},
        "losses": [12.5 - step / 100 for step in range(100)],
        "options": {"model": "llama", "size": "8b", "precision": "bf16", "layers": layers},
        "plan": {"seq_len": 8192, "global_batch": 8, "micro_batch": 2},
        "performance": {**speed, **shares, **performance},
        "memory": {"allocated_gib": 60.0, "reserved_gib": 61.0, "alloc_retries": 0, "least_gib": 59.0},
    }


def told(gemm: float = 800.0, **more: object) -> str:
    """What the ranks of the launch print."""
    product = {"tflops": gemm, "dtype": "bf16", "m": 8192, "n": 8192, "k": 8192}
    return json.dumps({"preflight": {**PREFLIGHT, "gemm": [product]}, **more})


def job(
    name: str,
    says: str,
    outcome: str = "failed",
    *,
    gemm: float = 800.0,
    ranks: int = 4,
    micro_batch: int = 2,
    nvml: dict[str, object] | None = None,
    **performance: object,
) -> Fault:
    """Return the 8B job's record only for the right number of ranks and samples."""
    text = told(gemm, records={"large": record(**performance), "fsdp2": record(8)})
    large = ["--micro-batch", str(micro_batch)]
    asked = f"json.loads(a[1][0])['large'][-2:] == {large} and k['nproc'] == {ranks}"
    patches = {"harness.launch:launch": f"lambda *a, **k: json.loads({text!r} if {asked} else '{{}}')"}
    return Fault(name, LARGE, outcome, says, vendor="nvidia", nvml=nvml or {}, patches=patches)


def fsdp2(
    name: str,
    says: str,
    outcome: str = "failed",
    *,
    devices: int = 1,
    problems: tuple[str, ...] = (),
    nvml: dict[str, object] | None = None,
    **performance: object,
) -> Fault:
    """Return the FSDP2 job's record if it was asked for, and the 8B job's on more than one device."""
    jobs = {"fsdp2": record(8, problems, **performance), **({"large": record()} if devices > 1 else {})}
    asked = f"list(json.loads(a[1][0])) == {list(jobs)} and k['nproc'] == {devices}"
    text = told(records=jobs)
    patches = {"harness.launch:launch": f"lambda *a, **k: json.loads({text!r} if {asked} else '{{}}')"}
    state = {"devices": devices, **(nvml or {})}
    return Fault(name, FSDP2, outcome, says, vendor="nvidia", nvml=state, patches=patches)


def soak(
    name: str,
    says: str,
    outcome: str = "failed",
    *,
    curve: tuple[str, ...] = (),
    losses: list[float] | None = None,
    **performance: object,
) -> Fault:
    """Return the records of half an hour."""
    long = record(8, **performance) | ({"losses": losses} if losses else {})
    verdict = {"problems": list(curve), "worst_share": 0.1, "worst_step": 3}
    text = told(records={"long": long, "tiny": {}}, curves={"tiny": verdict})
    patches = {"harness.launch:launch": f"lambda *a, **k: json.loads({text!r})"}
    return Fault(
        name, SOAK, outcome, says, vendor="nvidia", tier="soak", nvml={"devices": 1}, patches=patches
    )


FAULTS = (
    job("an 8B job at half its rate", "train_tokens_per_s_per_gpu 5422", tokens_per_s_per_gpu=HEALTHY_RATE / 2),
    job("an 8B job of two steps", "", timed_steps=1),
    job("a slow GEMM of the image before an 8B job", "gemm_tflops 400", gemm=400.0),
    job("a slow GEMM on a hot device", "hardware thermal", "invalid", gemm=400.0, nvml={"reasons": 0x40}),
    job("a slow GEMM at clocks that were set", "application clocks", "invalid", gemm=400.0, nvml={"reasons": 2}),
    job("a slow GEMM under a lowered cap", "power cap 400", "invalid", gemm=400.0, nvml={"cap": 400000}),
    job("a slow GEMM beside another job", "since before the run", "invalid", gemm=400.0, nvml={"processes": [4321]}),
    job("an 8B job at half its rate under a lowered cap", "power cap 400", "invalid", nvml={"cap": 400000}, tokens_per_s_per_gpu=HEALTHY_RATE / 2),
    job("an 8B job of two at half its rate", "train_tokens_per_s_per_gpu 5422", ranks=2, nvml={"devices": 3}, tokens_per_s_per_gpu=HEALTHY_RATE / 2),
    job("an 8B job on four H100s has no bound yet", "add an entry", micro_batch=1, nvml=H100),
    *(
        fsdp2(
            f"an FSDP2 job of {devices} at 80 % of its rate",
            "train_fsdp2_tokens_per_s_per_gpu 2.504e+04",
            devices=devices,
            tokens_per_s_per_gpu=0.8 * FSDP2_RATE,
        )
        for devices in (1, 2, 4)
    ),
    fsdp2("an FSDP2 job of two steps", "steps were timed", timed_steps=2),
    fsdp2("an FSDP2 job whose gradient is zero", "norm is zero", problems=("a gradient norm is zero",)),
    soak("a machine that slows down in half an hour", "4.0% slower, 3% allowed", tokens_per_s_per_gpu_by_minute=[FSDP2_RATE] * 25 + [0.96 * FSDP2_RATE] * 5),
    soak("half an hour that ended early", "8 whole minutes", tokens_per_s_per_gpu_by_minute=[1.0] * 8),
    soak("half an hour on an idle chip", "rank 0 drew 120 W", power_w=120.0),
    soak("half an hour without a power reading", "energy was not read", power_w=None),
    soak("half an hour without learning", "the last losses are", losses=[12.5] * 99),
    soak("a hot machine that trains wrong", "outside the band", curve=("outside the band at 7 steps",)),
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_fault_of_a_timed_job_is_caught(fault, plant):
    result = plant(fault)
    if fault.outcome == "invalid":
        assert_unfit(result)


@pytest.mark.parametrize(
    "fault",
    [
        job("nothing", "", "passed"),
        fsdp2("nothing", "", "passed"),
        fsdp2("nothing", "", "passed", devices=2),
        soak("nothing", "", "passed"),
    ],
    ids=str,
)
def test_healthy_timed_job_passes(fault, plant):
    plant(fault)


@pytest.mark.parametrize(
    ("fault", "state", "says"),
    [
        (job, {"devices": 1}, "needs 2 devices, 1 visible"),
        (job, {**H100, "devices": 2}, "needs 95.6 GiB of memory on each device, which has 79.6 GiB"),
        (fsdp2, A100_40, "needs 60.8 GiB of memory on each device, which has 40.0 GiB"),
    ],
    ids=["one device", "two small ones", "one small one"],
)
def test_timed_job_that_cannot_fit_is_a_skip_that_says_so(fault, state, says, plant):
    plant(fault("nothing", says, "skipped", nvml=state))


@pytest.mark.healthy
@pytest.mark.parametrize(("ranks", "allocated_gib"), [(2, 115.9), (4, 97.2)])
def test_needs_of_the_large_job_are_those_of_its_records(ranks, allocated_gib):
    from workloads.large_job import OUTSIDE_TORCH_GIB, large_gib

    assert large_gib(ranks, 2) - OUTSIDE_TORCH_GIB == pytest.approx(allocated_gib, abs=0.1)


@pytest.mark.healthy
def test_needs_of_the_fsdp2_job_are_those_of_its_record():
    from workloads.large_job import OUTSIDE_TORCH_GIB, fsdp2_gib

    assert fsdp2_gib(1) - OUTSIDE_TORCH_GIB == pytest.approx(57.8, abs=0.1)
