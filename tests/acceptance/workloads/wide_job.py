"""Jobs at full width beside a plain model: their flags, and how far thirty steps may go apart.

In: whether it is a CPU, an architecture. Out: flags of trainers/train.py, bounds. No torch.
"""

from collections.abc import Mapping
from typing import Any

OWN = ("--implementation", "fused", "--parallel", "zero1")
# Two layers of an 8B Llama; on a processor those of the tiny one.
WIDE = (
    *("--model", "llama", "--micro-batch", 1),
    *("--no-preflight", "--no-digest", "--no-backend-check"),
)
AT_WIDTH = ("--size", "8b", "--layers", 2, "--seq-len", 1024)
ON_CPU = ("--size", "tiny", "--portable")
# The samples are the same with any number of ranks.
CURVE = (
    *("--data", "text", "--global-batch", 2, "--steps", 30, "--lr-warmup", 5, "--weight-decay", 0.1),
    *("--precision", "bf16", "--log-every", 0),
)
# The two layouts that have an optimizer of their own.
CURVES: Mapping[str, tuple[object, ...]] = {
    "fsdp2": ("--no-compile",),
    "zero1": ("--reduce", "bf16", *OWN),
}
# Of an architecture, the largest relative error of each: the loss of a step; the way of a weight over all
# steps; and what the matrices lost of their start by decay. docs/reference/thresholds.md has the readings.
APART: Mapping[str, Mapping[str, float]] = {
    "": {"loss": 1e-3, "way": 0.05, "decay": 1e-4},
    "sm_90": {"loss": 0.2, "way": 0.2, "decay": 1e-5},
}
ELSEWHERE: Mapping[str, float] = {"loss": 0.3, "way": 0.3, "decay": 1e-4}  # not measured there


def flags(*, on_cpu: bool) -> tuple[object, ...]:
    """What all jobs at full width have in common."""
    return (*WIDE, *(ON_CPU if on_cpu else AT_WIDTH))


def curves(*, on_cpu: bool) -> dict[str, tuple[object, ...]]:
    """The flags of each job of thirty steps."""
    rate = "1e-3" if on_cpu else "1e-4"
    return {name: (*flags(on_cpu=on_cpu), *CURVE, "--lr", rate, *of) for name, of in CURVES.items()}


def most(arch: str) -> Mapping[str, float]:
    """How far apart a healthy job may be."""
    return APART.get(arch, ELSEWHERE)


def judged(found: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """What `most` judges, by step or weight, from what wide_curve returns."""
    return {
        "loss": {f"step {step}": abs(error) for step, error in enumerate(found["loss"], 1)},
        "way": found["way"],
        "decay": {"of all matrices": abs(found["decay"])},
    }
