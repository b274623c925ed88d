"""Grouped products, as mixtures of experts need them: each group against its own product in float64.

Comes in: nothing. Goes out: the report of `cases.run`; `available` says whether there is such a kernel.
"""

from collections.abc import Iterable
from typing import Any

import torch

from workloads import cases, device, gemm, operands
from workloads.gates import Reading

# Rows per expert: none, one, odd, many.
GROUPS = (64, 0, 1, 127, 320)
INNER, OUTER = 128, 192


def available() -> bool:
    """`torch._grouped_mm` exists from torch 2.8 and has kernels for bf16 on newer parts only."""
    if not hasattr(torch, "_grouped_mm"):
        return False
    a = torch.ones(16, 16, dtype=torch.bfloat16, device=device())
    try:
        torch._grouped_mm(a, a[None], offs=torch.tensor([16], dtype=torch.int32, device=device()))
    except (RuntimeError, NotImplementedError):
        return False
    return True


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
