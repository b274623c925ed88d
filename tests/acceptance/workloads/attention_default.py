"""Which backend PyTorch's attention takes when none is named. In: architecture, versions. Out: its name.

Pure: the judge on the host asks it too, and compares it with what a run says. PyTorch puts cuDNN first on
sm_90 and sm_100 from 2.9 on (pytorch/pytorch#162073) and on sm_103 from 2.10 on (#170800). From 2.10 on it
does so only with a cuDNN newer than 9.15.0 (#169849, #171627), which torch's wheels have from 2.11 on, with
CUDA 12.8 or newer (huggingface/transformers#48163, pytorch/pytorch#193893). 2.5.0 had it first too, until
2.5.1 (#138522). Everywhere else, on AMD too, it is PyTorch's own FlashAttention.
"""

import re
from collections.abc import Mapping
from typing import Any

DEFAULT = "default"
RESOLVED = "resolved"  # the condition that says which backend the default was
CUDNN_FIRST = {"sm_90": (2, 9), "sm_100": (2, 9), "sm_103": (2, 10)}
GATED, NEW_CUDNN, NEW_CUDNN_CUDA = (2, 10), (2, 11), (12, 8)


def expected(arch: str, torch: str | None, cuda: str | None) -> str:
    """The backend of the problem that the speed checks measure: causal, bf16, grouped heads of 128.

    What is not known counts for cuDNN, the faster one, so that saying nothing lowers no bound.
    """
    first, version = CUDNN_FIRST.get(arch), _numbers(torch)
    if first is None:
        return "flash"
    if version[:3] == (2, 5, 0) and arch == "sm_90":
        return "cudnn"
    if version and version[:2] < first:
        return "flash"
    if version and version[:2] >= GATED:
        new = version[:2] >= NEW_CUDNN and (not cuda or _numbers(cuda)[:2] >= NEW_CUDNN_CUDA)
        return "cudnn" if new else "flash"
    return "cudnn"


def judged_by(conditions: Mapping[str, Any]) -> Mapping[str, Any]:
    """The conditions that select the bound: the default has the bound of the backend that it was."""
    if conditions.get("backend") != DEFAULT or RESOLVED not in conditions:
        return conditions
    return {**conditions, "backend": conditions[RESOLVED]}


def _numbers(version: str | None) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version or "")
    return tuple(int(part) for part in found[0].split(".")) if found else ()
