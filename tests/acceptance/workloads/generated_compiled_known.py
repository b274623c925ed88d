"""Known faults of healthy compilers, and what nobody promises. In: a program, what a compiler gave.

Out: whether one of them explains all that is wrong: by the kernels of the program, and by how it is wrong
(docs/reference/trust.md).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from workloads import gates, generated_compiled_items, generated_judge, generated_trees

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from workloads.generated_judge import Call

    Given = Mapping[str, Any]

NEAR = {torch.float32: 8.0, torch.float16: 2.0, torch.bfloat16: 2.0}  # roundings from eager mode that pass


class Rule(NamedTuple):
    """Which kernels have a fault, and which numbers of a result it may get wrong."""

    meets: Callable[[str, Given], bool]
    may: Callable[[torch.Tensor], torch.Tensor]
    in_gradients: bool = True  # alone
    changed: bool = False  # only where a program changes what its caller gave


class Kernels(TorchDispatchMode):  # type: ignore[misc]
    """Notes the kernels that run in this context, with their arguments by name."""

    def __init__(self) -> None:
        """Nothing has run yet."""
        super().__init__()
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a kernel and note it."""
        names = [one.name for one in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        self.calls.append((str(func._schema.name).removeprefix("aten::"), given))
        return generated_trees.run(func, args, kwargs or {})


def _finds_largest(name: str, given: Given) -> bool:
    by_norm = name == "linalg_vector_norm" and math.isinf(given.get("ord", 2))
    return by_norm or name in ("amax", "amin", "aminmax", "max", "min")


def _lost(got: torch.Tensor) -> torch.Tensor:
    """The largest number is found nowhere again, so the gradient is divided by the number of no places."""
    return ~got.isfinite() | (got == 0)


def _overhangs(name: str, given: Given) -> bool:
    counts = given.get("count_include_pad", True) and not given.get("divisor_override")
    return name.startswith("avg_pool") and bool(given.get("ceil_mode") and counts)


def _takes_no_number(name: str, given: Given) -> bool:
    return name == "frexp" and not bool(given["self"].isfinite().all())


def _all(got: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(got, dtype=torch.bool)


def _by_exponents(got: torch.Tensor) -> torch.Tensor:
    """An exponent itself, and a gradient that is divided by two to it."""
    return ~got.isfinite() if got.is_floating_point() else _all(got)


def _copies(name: str, given: Given) -> bool:
    return name.endswith("_copy") and "self" in given


RULES = {
    "pytorch#186799, pytorch#195214": Rule(_finds_largest, _lost),
    "pytorch#198119": Rule(_overhangs, _all),
    "an exponent of what is not finite": Rule(_takes_no_number, _by_exponents, in_gradients=False),
    "pytorch#198131": Rule(_copies, _all, in_gradients=False, changed=True),
}


def explained(call: Call, got: Sequence[torch.Tensor], eager: Sequence[torch.Tensor]) -> str | None:
    """The fault that explains all that is wrong, if one does.

    `any` and `all` of no dimensions are those of each number in eager mode, and of all in a compiler.
    """
    kernels = Kernels()
    generated_judge.results(call, within=kernels)
    if [one.shape for one in got] != [one.shape for one in eager]:
        of_nothing = any(name in ("any", "all") and given.get("dim") == [] for name, given in kernels.calls)
        return "any or all of no dimensions" if of_nothing else None
    outputs = len(generated_judge.results(replace(call, gradients=False)))
    wrong = [_far(a, b, call) for a, b in zip(got, eager, strict=True)]
    changed = generated_compiled_items.program_of(call).elsewhere == "changed for the caller"
    for fault, rule in RULES.items():
        if rule.changed and not changed:
            continue
        judged = wrong[outputs:] if rule.in_gradients else wrong
        inside = all(not bool((one & ~rule.may(a)).any()) for a, one in zip(got, wrong, strict=True))
        elsewhere = rule.in_gradients and any(bool(one.any()) for one in wrong[:outputs])
        if judged and inside and not elsewhere and any(rule.meets(*one) for one in kernels.calls):
            return fault
    return None


def _far(got: torch.Tensor, eager: torch.Tensor, call: Call) -> torch.Tensor:
    """Which numbers are not near eager mode's."""
    mine, right = got.double(), eager.double()
    bound = NEAR[call.dtype] * gates.unit_roundoff(call.dtype) * right.abs()
    return ~(((mine - right).abs() <= bound) | (mine == right) | (mine.isnan() & right.isnan()))
