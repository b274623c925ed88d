"""Calls of a module that has weights of its own, with gradients for the weights that it was made from.

In: what loads the module, weights by name, its inputs. Out: what it gives.

A module that was loaded, copied or read from a file has leaves of its own. Backward asks for their gradients,
and gives them to the operands that they were made from.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from workloads import generated_trees

Load = Callable[[Mapping[str, torch.Tensor]], nn.Module]


def called(load: Load, weights: Mapping[str, torch.Tensor], inputs: tuple[Any, ...]) -> Any:
    """The tensors that a loaded module gives for these inputs."""
    leaves = list(generated_trees.leaves(inputs))
    return _Kept.apply((load, list(weights), inputs), *weights.values(), *leaves)


def _learns(one: Any) -> bool:
    return isinstance(one, torch.Tensor) and one.requires_grad


class _Kept(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, what: tuple[Load, list[str], Any], *given: Any) -> Any:
        """Load the module and call it with leaves of its own."""
        load, names, inputs = what
        needed, count = ctx.needs_input_grad[1:], len(names)
        its = load(dict(zip(names, given, strict=False)))
        leaves = [
            one.detach().requires_grad_(needs) if generated_trees.is_number(one) else one
            for one, needs in zip(given[count:], needed[count:], strict=True)
        ]
        places = iter(leaves)
        with torch.set_grad_enabled(any(needed)):
            out = its(*generated_trees.mapped(inputs, lambda _: next(places)))
        own = dict(its.named_parameters())
        ctx.inputs = [*(own[name] for name in names), *leaves]
        ctx.roots = [one for one in generated_trees.leaves(out) if isinstance(one, torch.Tensor)]
        found = tuple(one.detach().clone() for one in ctx.roots)
        pairs = zip(found, ctx.roots, strict=True)
        ctx.mark_non_differentiable(*(one for one, root in pairs if not root.requires_grad))
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """The gradients of the module's own weights, and of its inputs."""
        pairs = [(one, grad) for one, grad in zip(ctx.roots, grads, strict=True) if one.requires_grad]
        roots, weights = zip(*pairs, strict=True)
        asked = [one for one in ctx.inputs if _learns(one)]
        found = iter(torch.autograd.grad(roots, asked, weights, allow_unused=True))
        return None, *(next(found) if _learns(one) else None for one in ctx.inputs)
