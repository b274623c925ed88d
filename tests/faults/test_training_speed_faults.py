"""The 8B job on planted H200s: a slow job fails its bound, and a job without timed steps never passes."""

import json

import pytest

from planting import Fault

CHECK = "test_training.py::test_throughput_8b"
HEALTHY_RATE = 10_844.0  # tokens/s and GPU, as H200.json says of two; of four it says 10,812
H100 = {"pci_device_id": 0x233010DE, "memory": 81559 << 20}


def record(**performance: object) -> dict[str, object]:
    """The record of the job on rank 0."""
    speed = {
        "tokens_per_s_per_gpu": HEALTHY_RATE,
        "tokens_per_s_per_gpu_wall": HEALTHY_RATE,
        "timed_steps": 99,
    }
    shares = {"mfu_noncausal_percent": None, "mfu_noncausal_of_gemm_percent": None}
    return {
        "problems": [],
        "phases_s": {},
        "options": {"model": "llama", "size": "8b", "precision": "bf16", "layers": None},
        "plan": {"seq_len": 8192, "global_batch": 8, "micro_batch": 2},
        "performance": {**speed, **shares, **performance},
    }


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
    """Return the record only for the right number of ranks and samples."""
    product = {"tflops": gemm, "dtype": "bf16", "m": 8192, "n": 8192, "k": 8192}
    copy = {"bytes": 1 << 32, "gb_per_s": 4200.0}
    preflight = {"problems": [], "gemm": [product], "copy": copy, "collectives": []}
    told = json.dumps({"preflight": preflight, "records": {"large": record(**performance)}})
    flags = json.dumps(["--micro-batch", str(micro_batch)])[1:-1]
    asked = f"{flags!r} in a[1][0] and k['nproc'] == {ranks}"
    patches = {"harness.launch:launch": f"lambda *a, **k: json.loads({told!r} if {asked} else '{{}}')"}
    return Fault(name, CHECK, outcome, says, vendor="nvidia", nvml=nvml or {}, patches=patches)


FAULTS = (
    job(
        "an 8B job at half its rate", "train_tokens_per_s_per_gpu 5422", tokens_per_s_per_gpu=HEALTHY_RATE / 2
    ),
    job("an 8B job of two steps", "", timed_steps=1),
    job("an 8B job on a slow machine", "gemm_tflops 400", "invalid", gemm=400.0),
    job(
        "an 8B job of two at half its rate",
        "train_tokens_per_s_per_gpu 5422",
        ranks=2,
        nvml={"devices": 3},
        tokens_per_s_per_gpu=HEALTHY_RATE / 2,
    ),
    job("an 8B job on four H100s has no bound yet", "add an entry", micro_batch=1, nvml=H100),
)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_fault_of_the_large_job_is_caught(fault: Fault, plant) -> None:
    plant(fault)


def test_healthy_large_job_passes(plant) -> None:
    plant(job("nothing", "", "passed"))


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"devices": 1}, "needs 2 devices, 1 visible"),
        ({**H100, "devices": 2}, "needs 95.6 GiB of memory on each device, which has 79.6 GiB"),
    ],
    ids=["one device", "two small ones"],
)
def test_large_job_that_cannot_fit_is_a_skip_that_says_so(state, says, plant) -> None:
    plant(job("nothing", says, "skipped", nvml=state))


@pytest.mark.healthy
@pytest.mark.parametrize(("ranks", "allocated_gib"), [(2, 115.9), (4, 97.2)])
def test_needs_of_the_large_job_are_those_of_its_records(ranks: int, allocated_gib: float) -> None:
    from workloads.large_job import OUTSIDE_TORCH_GIB, large_gib

    assert large_gib(ranks, 2) - OUTSIDE_TORCH_GIB == pytest.approx(allocated_gib, abs=0.1)
