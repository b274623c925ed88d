"""train.py with a value that is not finite in one kind of tensor, in its second step. In: KIND VALUE and
train.py's flags. Out: its record.

KIND: `weight` for that step alone; `attention`, `norm`, `mlp`: what that part of the first block makes in
forward; `dq`, `dk`, `dv`: the gradient of a product of attention.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "trainers"))

import torch

import train
from fused import ops
from models import llama

KIND, VALUE, *FLAGS = sys.argv[1:]
BAD, PARTS = float(VALUE), ("dq", "dk", "dv")
now = {"step": -1, "times": 0}
accumulate = train.accumulate


def spoiled(x: torch.Tensor) -> torch.Tensor:
    """The tensor, with one bad value; once in the second step."""
    if now["step"] != 1 or now["times"]:
        return x
    now["times"] = 1
    x = x.clone()
    x.view(-1)[x.numel() // 3] = BAD
    return x


def counted(run: Any, step: int) -> torch.Tensor:
    """A step, before which a weight may be spoiled."""
    now.update(step=step, times=0)
    if KIND != "weight" or step != 1:
        return accumulate(run, step)
    weight = (
        next(iter(run.job.model.parameters())) if not hasattr(run.job, "units") else run.job.units[1].weights
    )
    local = weight.to_local() if hasattr(weight, "to_local") else weight
    with torch.no_grad():
        before = local.clone()
        local.view(-1)[:2000].fill_(BAD)
    loss = accumulate(run, step)
    with torch.no_grad():
        local.copy_(before)
    return loss


class Attention(llama.Attention):
    """Llama's, whose parts are spoiled."""

    def forward(self, x: torch.Tensor, *context: Any) -> torch.Tensor:
        """As Llama's."""
        if KIND in PARTS:
            part = getattr(self, KIND[1])
            hook = part.register_forward_hook(lambda _m, _i, out: out.register_hook(spoiled) and None)
            out = super().forward(x, *context)
            hook.remove()
            return out
        out = super().forward(spoiled(x) if KIND == "norm" else x, *context)
        return spoiled(out) if KIND == "attention" else out


class SwiGLU(llama.SwiGLU):
    """Llama's, whose output is spoiled."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As Llama's."""
        out = super().forward(x)
        return spoiled(out) if KIND == "mlp" else out


def fused(name: str, at: int) -> None:
    """An operation of the fused layer, whose argument of this number is spoiled."""
    right = getattr(ops, name)

    def wrong(*given: Any) -> Any:
        return right(*given[:at], spoiled(given[at]), *given[at + 1 :])

    setattr(ops, name, wrong)


FUSED = {"norm": ("add_norm", 0), "mlp": ("swiglu", 0), "attention": ("norm_apply", 0)}
FUSED |= {part: ("rope_backward", number) for number, part in enumerate(PARTS)}
llama.Attention, llama.SwiGLU, train.accumulate = Attention, SwiGLU, counted
if "fused" in FLAGS and KIND in FUSED:
    fused(*FUSED[KIND])
sys.exit(train.main(FLAGS))
