"""The 8B job on stand-ins of two H200s: a slow job fails its bound, one that nobody timed never passes."""

import json

import pytest

from planting import Fault

CHECK = "test_training.py::test_throughput_8b"
HEALTHY_RATE = 10_844.0  # tokens/s and GPU, as H200.json says of two


def record(**performance: object) -> dict[str, object]:
    """What the job would say on rank 0."""
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
        "plan": {"seq_len": 8192, "global_batch": 2},
        "performance": {**speed, **shares, **performance},
    }


def job(name: str, says: str, outcome: str = "failed", gemm: float = 800.0, **performance: object) -> Fault:
    product = {"tflops": gemm, "dtype": "bf16", "m": 8192, "n": 8192, "k": 8192}
    copy = {"bytes": 1 << 32, "gb_per_s": 4200.0}
    preflight = {"problems": [], "gemm": [product], "copy": copy, "collectives": []}
    told = json.dumps({"preflight": preflight, "records": {"large": record(**performance)}})
    patches = {"harness.launch:launch": f"lambda *a, **k: __import__('json').loads({told!r})"}
    return Fault(name, CHECK, outcome, says, vendor="nvidia", nvml={}, patches=patches)


FAULTS = (
    job(
        "an 8B job at half its rate", "train_tokens_per_s_per_gpu 5422", tokens_per_s_per_gpu=HEALTHY_RATE / 2
    ),
    job("an 8B job of two steps", "", timed_steps=1),
    job("an 8B job on a slow machine", "gemm_tflops 400", "invalid", gemm=400.0),
)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_fault_of_the_large_job_is_caught(fault: Fault, plant) -> None:
    plant(fault)


def test_healthy_large_job_passes(plant) -> None:
    plant(job("nothing", "", "passed"))
