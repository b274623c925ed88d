"""The limits of a container follow the memory of the engine's host, and what its daemon can limit."""

from __future__ import annotations

from typing import Any

import pytest

from stackcheck.engine import container
from stackcheck.engine.container import RunSpec

GIB = 1 << 30
SPEC = RunSpec(image="x", command=("true",), tmpfs={"/tmp": "rw,exec", "/scratch": "rw"}, pids=512)


def test_each_tmpfs_has_a_size_of_its_own_and_memory_no_swap_on_top() -> None:
    """The kernel's own limit of a tmpfs is half of the memory today: only the words show that we ask."""
    found = container._limits({"MemTotal": 64 * GIB, "PidsLimit": 1, "MemoryLimit": 1, "SwapLimit": 1}, SPEC)
    assert found["tmpfs"] == {"/tmp": f"rw,exec,size={32 * GIB}", "/scratch": f"rw,size={32 * GIB}"}
    assert found["mem_limit"] == found["memswap_limit"] < 64 * GIB
    assert found["pids_limit"] == 512


@pytest.mark.parametrize("lacks", ["PidsLimit", "MemoryLimit", "SwapLimit"])
def test_a_limit_that_the_daemon_cannot_hold_is_not_asked_for(lacks: str) -> None:
    info: dict[str, Any] = {"MemTotal": GIB, "PidsLimit": True, "MemoryLimit": True, "SwapLimit": True}
    name = {"PidsLimit": "pids_limit", "MemoryLimit": "mem_limit", "SwapLimit": "memswap_limit"}[lacks]
    whole = container._limits(info, SPEC)
    assert container._limits(info | {lacks: False}, SPEC) == {k: v for k, v in whole.items() if k != name}
