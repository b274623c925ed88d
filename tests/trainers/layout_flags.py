"""Layouts of ranks by name. In: names. Out: how many ranks, and flags for eight samples a step."""

from typing import Any

import pytest

LAYOUTS: dict[str, tuple[Any, ...]] = {
    "fsdp2": (2,),
    "fsdp2-accumulated": (2, "--micro-batch", "1"),
    "fsdp2-reduced-each-time": (2, "--micro-batch", "1", "--reduce-each"),
    "fsdp2-kept-gathered": (2, "--no-reshard"),
    "hsdp": (4, "--replicas", "2", "--micro-batch", "2"),
    "hybrid-shard": (4, "--parallel", "hybrid_shard", "--replicas", "2", "--micro-batch", "2"),
    "full-shard": (2, "--parallel", "full_shard"),
    "shard-grad-op": (2, "--parallel", "shard_grad_op"),
    "no-shard": (2, "--parallel", "no_shard"),
    "zero1": (2, "--parallel", "zero1"),
    "zero1-accumulated": (2, "--parallel", "zero1", "--micro-batch", "2"),
    "tensor": (2, "--tp", "2", "--micro-batch", "8"),
    "pipeline": (2, "--pp", "2", "--micro-batch", "2"),
    "recompute": (2, "--recompute", "full"),
    "recompute every other block": (2, "--recompute", "half"),
    "chunked-loss": (2, "--loss-chunks", "4"),
}
# Each has code of its own; the other layouts differ from one of them in a setting.
OWN_CODE = {"fsdp2", "full-shard", "zero1", "tensor", "pipeline"}


def each(names: Any = LAYOUTS, quick: set[str] = OWN_CODE) -> pytest.MarkDecorator:
    """A test of each of these layouts, slow but for the quick ones."""
    marks = {name: () if name in quick else pytest.mark.slow for name in names}
    return pytest.mark.parametrize("layout", [pytest.param(name, marks=marks[name]) for name in names])
