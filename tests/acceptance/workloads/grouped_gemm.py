"""Grouped matrix products, as in mixtures of experts: each group against its own product in float64.

In: nothing. Out: the report of `cases.run`; `lacks` says why this machine does not have them.
"""

from collections.abc import Iterable
from typing import Any

import torch

from workloads import arch, attention_refusals, cases, device, gemm, operands
from workloads.gates import Reading

# Rows per expert: none, one, odd, many.
GROUPS = (64, 0, 1, 127, 320)
INNER, OUTER = 128, 192
OLDEST_SM = 80


def lacks() -> dict[str, str] | None:
    """The feature or package that grouped products need and that is absent; None if they must work.

    PyTorch 2.7 and 2.8 have it for compute capability 9.0 only; 2.9 for 8.0 and later, and as a loop on CPUs
    (pytorch/pytorch#161407, #161717); 2.10 made it public, and has the loop on ROCm too (#162419).
    """
    name = arch.name()
    if not hasattr(torch, "_grouped_mm"):
        reason = f"torch {torch.__version__} has no grouped product"
        return {"package": "torch>=2.7", "reason": reason}
    needed = (2, 7) if name == "sm_90" else (2, 10) if name.startswith("gfx") else (2, 9)
    if attention_refusals.release() < needed:
        came = ".".join(map(str, needed))
        reason = f"torch {torch.__version__} has no grouped product for {name}: it came with {came}"
        return {"package": f"torch>={came}", "reason": reason}
    if name.startswith("sm_") and int(name.removeprefix("sm_")) < OLDEST_SM:
        reason = f"the grouped product needs compute capability 8.0, this is {name}"
        return {"feature": "grouped product", "reason": reason}
    return None


def check() -> dict[str, Any]:
    """Experts with no rows, one row, many rows."""
    return cases.run([(f"rows per group {GROUPS}", _groups)])


def _groups() -> Iterable[Reading]:
    a = operands.normal(sum(GROUPS), INNER, dtype=torch.bfloat16, seed=1)
    b = operands.normal(len(GROUPS), INNER, OUTER, dtype=torch.bfloat16, seed=2)
    ends = torch.tensor(GROUPS, device=device()).cumsum(0).to(torch.int32)
    out = torch._grouped_mm(a, b.transpose(1, 2).contiguous().transpose(1, 2), offs=ends)
    start = 0
    for index, rows in enumerate(GROUPS):
        if rows:
            part = slice(start, start + rows)
            yield from gemm.judge(out[part], a[part], b[index], dtype="bf16", name=f"group {index} ")
        start += rows
