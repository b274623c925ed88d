"""Trees of arguments and results: nested lists, tuples and dicts.

In: a tree. Out: its leaves, or another tree.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def leaves(tree: Any) -> Iterator[Any]:
    """The leaves of nested lists, tuples and dicts."""
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        for branch in tree:
            yield from leaves(branch)
    else:
        yield tree


def mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The same tree with changed leaves."""
    if isinstance(tree, Mapping):
        return {key: mapped(branch, change) for key, branch in tree.items()}
    if isinstance(tree, list | tuple):
        branches = [mapped(branch, change) for branch in tree]
        return type(tree)(*branches) if hasattr(tree, "_fields") else type(tree)(branches)
    return change(tree)


def numbers(tree: Any) -> list[torch.Tensor]:
    """The tensors of what a function returned; a complex one as its two parts."""
    given = [one.detach() for one in leaves(tree) if is_tensor(one)]
    return [torch.view_as_real(one.resolve_conj()) if one.is_complex() else one for one in given]


def kept(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function with copies of what it may change, such as the statistics of a normalization."""
    args, kwargs = mapped((args, kwargs), lambda one: one if _has_gradient(one) else copied(one))
    return function(*args, **kwargs)


def run(kernel: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """What a kernel gives below a dispatch mode: zeros without memory get some, for kernels there read it."""
    is_nowhere = kernel is torch.ops.aten._efficientzerotensor.default
    return torch.zeros(*args, **kwargs) if is_nowhere else kernel(*args, **kwargs)


def copied(leaf: Any) -> Any:
    """A copy of a tensor, and anything else as it is."""
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _has_gradient(one: Any) -> bool:
    return isinstance(one, torch.Tensor) and one.requires_grad


def is_tensor(one: object) -> bool:
    """Whether this is a tensor with strides."""
    return isinstance(one, torch.Tensor) and one.layout is torch.strided


def is_number(one: object) -> bool:
    """Whether this is a tensor of a floating type."""
    return isinstance(one, torch.Tensor) and one.is_floating_point()
