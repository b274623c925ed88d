"""A drawn call as words, and the calls that are like it and smaller. In: a `Call`."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from workloads.generated_judge import Call

SHOWN = 64  # elements of a tensor that is printed whole


def candidates(call: Call) -> Iterator[Call]:
    """Calls with less in them, to try whether they fail too."""
    if call.smaller is not None:
        yield from call.smaller()
        return
    if call.gradients:
        yield replace(call, gradients=False)
    if any(not one.is_floating_point() and one.dtype is not torch.bool for one in call.tensors()):
        return  # places in another operand: beyond its end, a kernel on a GPU ends the process
    for size in sorted({size for one in call.tensors() for size in one.shape if size > 1}, reverse=True):
        for less in {1, size // 2, size - 1}:
            yield call.mapped(functools.partial(_cut, size=size, less=less))


def _cut(leaf: Any, size: int, less: int) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    for n, one in enumerate(leaf.shape):
        leaf = leaf.narrow(n, 0, less) if one == size else leaf
    return leaf


def shown(call: Call) -> str:
    """The call as an expression."""
    if call.words:
        return f"generated.{call.words}"
    name = getattr(call.function, "__name__", type(call.function).__name__)
    args = [_words(one) for one in call.args] + [f"{key}={_words(one)}" for key, one in call.kwargs.items()]
    return f"{name}({', '.join(args)}){' with gradients' if call.gradients else ''}"


def _words(one: Any) -> str:
    """A tensor as an expression if it is small: its numbers, type and strides."""
    if isinstance(one, list | tuple):
        return f"[{', '.join(_words(each) for each in one)}]"
    if not isinstance(one, torch.Tensor):
        return repr(one)
    if one.numel() > SHOWN:
        return f"{one.dtype} {tuple(one.shape)} strides {one.stride()}"
    made = f"torch.tensor({one.tolist()}, dtype={one.dtype})"
    return made if one.is_contiguous() else f"{made} with strides {one.stride()}"
