"""Records of train.py as its judges read them, without a run."""

from typing import Any

import loss_curve

HOW = {"pack": None, "precision": "fp32", "parallel": "fsdp2", "implementation": "native"}


def record_of(losses: list[float], first_step: int = 0, **job: Any) -> dict[str, Any]:
    """The record of a sound run with these losses. `job`: its options and its plan, by name."""
    options = dict.fromkeys(loss_curve.OPTIONS) | {"steps": len(losses)} | HOW
    plan = dict.fromkeys(loss_curve.PLAN, 1)
    return {
        "options": options | {name: value for name, value in job.items() if name not in plan},
        "plan": plan | {name: job[name] for name in plan if name in job},
        "losses": losses,
        "gradient_norms": losses,
        "problems": [],
        "first_step": first_step,
        "software": {"torch": "2.13"},
        "device": {"model": "CPU"},
        "world_size": 1,
        "performance": {"unit": "tokens", "tokens_per_s_per_gpu": 1000.0},
    }
