"""Faults that nobody chose: an operator, a condition and an effect, drawn from a seed.

In: a seed. Out: modes of PyTorch that plant them.

It knows PyTorch's operators and nothing of the checks. Inside the mode, the operator's results are damaged in
every type but float64, by which the checks judge. `power` counts how many of them generated cases find.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

OTHER_DEVICES = ("cudnn", "miopen", "mkldnn", "mps", "overrideable", "efficient", "_flash_attention_")
OWN_KERNEL = ("CPU", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
WITHOUT_NUMBERS = ("bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "resize")
GIVES_TRUTH = (
    "any", "argmax", "argmin", "eq", "ge", "gt", "isinf", "isnan", "le", "logical_and", "logical_not",
    "logical_or", "logical_xor", "lt", "ne", "nonzero",
)  # fmt: skip
TYPES = (torch.float32, torch.bfloat16, torch.float16)
Tensors = Sequence[torch.Tensor]
CONDITIONS: dict[str, Callable[[Tensors], bool]] = {
    "always": lambda _: True,
    "an operand with gaps": lambda given: any(not one.is_contiguous() for one in given),
    "an expanded operand": lambda given: any(0 in one.stride() for one in given if one.numel() > 1),
    "an operand inside a buffer": lambda given: any(one.storage_offset() for one in given),
    "more than 2^8 elements": lambda given: max(one.numel() for one in given) > 2**8,
    "more than 2^12 elements": lambda given: max(one.numel() for one in given) > 2**12,
    "more than 2^16 elements": lambda given: max(one.numel() for one in given) > 2**16,
    "rows of more than 128": lambda given: max(one.shape[-1] for one in given if one.dim()) > 128,
    "rows of an odd size": lambda given: any(one.dim() and one.shape[-1] % 2 for one in given),
    "more than 64 rows": lambda given: any(one.dim() and one.shape[0] > 64 for one in given),
    "one row": lambda given: any(one.dim() and one.shape[0] == 1 for one in given),
    "three dimensions or more": lambda given: any(one.dim() > 2 for one in given),
    "numbers above 100": lambda given: any(bool((one.abs() > 100).any()) for one in given),
    "numbers below 1e-3": lambda given: any(bool(((one != 0) & (one.abs() < 1e-3)).any()) for one in given),
    "a zero": lambda given: any(bool((one == 0).any()) for one in given),
}


def _last(out: torch.Tensor) -> None:
    out.view(-1)[-1] = 0


def _last_row(out: torch.Tensor) -> None:
    out.select(0, -1).zero_()


def _second_half(out: torch.Tensor) -> None:
    out.narrow(-1, out.shape[-1] // 2, 1).zero_()


def _swapped(out: torch.Tensor) -> None:
    flat = out.view(-1)
    flat[[0, -1]] = flat[[-1, 0]].clone()


def _by_roundings(count: int, *, one: bool) -> Callable[[torch.Tensor], None]:
    def damage(out: torch.Tensor) -> None:
        part = out.view(-1)[out.numel() // 2 :][:1] if one else out
        part.mul_(1 + count * torch.finfo(out.dtype).eps / 2)

    return damage


def _eight_bits(out: torch.Tensor) -> None:
    out.copy_(out.to(torch.bfloat16) if out.dtype is not torch.bfloat16 else (out * 16).round() / 16)


EFFECTS: dict[str, Callable[[torch.Tensor], None]] = {
    "its last element is 0": _last,
    "its last row is 0": _last_row,
    "one column is 0": _second_half,
    "two elements are swapped": _swapped,
    "it is 0": lambda out: out.zero_(),
    "it is negative": lambda out: out.neg_(),
    "NaN and infinity are 0": lambda out: out.nan_to_num_(0, 0, 0),
    "one element is NaN": lambda out: out.view(-1)[:1].fill_(torch.nan),
    "one element is off by 64 roundings": _by_roundings(64, one=True),
    "one element is off by 4096 roundings": _by_roundings(4096, one=True),
    "it is off by 64 roundings": _by_roundings(64, one=False),
    "it is off by 4096 roundings": _by_roundings(4096, one=False),
    "it is rounded to fewer bits": _eight_bits,
}


# Of operators that give truth values or places: what changes those.
ON_TRUTH = (
    "its last element is 0", "its last row is 0", "one column is 0", "two elements are swapped", "it is 0",
)  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """One fault, in words that say all of it."""

    operator: str
    dtype: torch.dtype
    condition: str
    effect: str

    def __str__(self) -> str:
        return f"{self.operator} of {str(self.dtype)[6:]}, {self.condition}: {self.effect}"

    def mode(self) -> Planted:
        """The fault, planted for as long as this context lasts."""
        return Planted(self)


class Planted(TorchDispatchMode):
    """Damages what one operator gives."""

    def __init__(self, fault: Drawn) -> None:
        super().__init__()
        self.fault, self.struck = fault, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _floats((args, kwargs)) if name_of(func) == self.fault.operator else []
        strikes = bool(given) and given[0].dtype is self.fault.dtype
        strikes = strikes and _holds(self.fault.condition, [one for one in given if one.numel()])
        out = func(*args, **kwargs)
        for one in _damaged(out, self.fault) if strikes else ():
            damaged = one.contiguous().clone() if one.dim() else one.clone().view(1)
            EFFECTS[self.fault.effect](torch.view_as_real(damaged) if damaged.is_complex() else damaged)
            one.copy_(damaged.view(one.shape))
            self.struck += 1
        return out


class Watched(TorchDispatchMode):
    """Notes which of some faults could strike: operator, type and condition; and which operators run."""

    def __init__(self, faults: Iterable[Drawn]) -> None:
        super().__init__()
        self.ran: set[tuple[str, torch.dtype]] = set()
        self.struck: set[Drawn] = set()
        self.wanted: dict[tuple[str, torch.dtype], set[Drawn]] = {}
        for fault in faults:
            self.wanted.setdefault((fault.operator, fault.dtype), set()).add(fault)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [one for one in _floats((args, kwargs or {})) if one.numel()]
        first = (name_of(func), given[0].dtype) if given else None
        open_ones = self.wanted.get(first, set()) - self.struck if first else ()
        held = [fault for fault in open_ones if _holds(fault.condition, given)]
        out = func(*args, **(kwargs or {}))
        if first and (held or first not in self.ran) and _damaged(out, Drawn(*first, "", "")):
            self.ran.add(first)
            self.struck.update(held)
        return out


def _holds(condition: str, given: Tensors) -> bool:
    with contextlib.suppress(ValueError):
        return bool(given) and CONDITIONS[condition](given)
    return False


def _damaged(out: Any, fault: Drawn) -> list[torch.Tensor]:
    """The results that a fault changes: those of its type, or truth values and places."""
    given = [one for one in tree_leaves(out) if isinstance(one, torch.Tensor) and one.numel()]
    if fault.operator in GIVES_TRUTH:
        return [one for one in given if not one.is_floating_point()]
    of = {torch.complex64: torch.float32, torch.complex32: torch.float16}
    return [one for one in given if of.get(one.dtype, one.dtype) is fault.dtype]


def _floats(tree: Any) -> list[torch.Tensor]:
    leaves = tree_leaves(tree)
    return [one for one in leaves if isinstance(one, torch.Tensor) and one.is_floating_point()]


def name_of(func: Any) -> str:
    """An operator without its overload, and without the mark of one that works in place."""
    return str(func._schema.name).removeprefix("aten::").rstrip("_")


@functools.cache
def operators() -> list[str]:
    """PyTorch's core operators, and all backward and attention operators, that give tensors."""
    # Not dir(torch.ops.aten): it lists what ran before.
    every = (name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names())
    names = {name.removeprefix("aten::") for name in every if name.startswith("aten::")}
    return sorted({name.rstrip("_") for name in names if _is_drawn(name)})


def _is_drawn(name: str) -> bool:
    """Not what only makes a view, has no operand, or belongs to another device."""
    packet = getattr(torch.ops.aten, name)
    overloads = [getattr(packet, one) for one in getattr(packet, "overloads", list)()]
    known = any(torch.Tag.core in one.tags for one in overloads)
    schemas = [one._schema for one in overloads]
    gives = any("Tensor" in str(back.type) for one in schemas for back in one.returns)
    takes = any("Tensor" in str(given.type) for one in schemas for given in one.arguments if not given.is_out)
    views = any(back.alias_info and not back.alias_info.is_write for one in schemas for back in one.returns)
    other = any(word in name for word in OTHER_DEVICES)
    return (
        (known or name.endswith("_backward") or "attention" in name)
        and gives
        and takes
        and not views
        and not other
    )


@functools.cache
def has_a_kernel(operator: str) -> bool:
    """Whether the operator runs as itself on processors: not in parts, and not on other devices alone."""
    schemas = [
        one._schema
        for name in (operator, f"{operator}_")
        for packet in [getattr(torch.ops.aten, name, None)]
        for one in (getattr(packet, each) for each in getattr(packet, "overloads", list)())
    ]
    names = [
        one.name + (f".{one.overload_name}" if one.overload_name else "")
        for one in schemas
        if not any(given.is_out for given in one.arguments)
    ]
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(_registered(has, name, key) for name in names for key in OWN_KERNEL)


def _registered(has: Callable[[str, str], bool], name: str, key: str) -> bool:
    try:
        return has(name, key)
    except RuntimeError:  # TorchScript alone knows this overload
        return False


def can_strike(fault: Drawn) -> bool:
    """Whether the fault can change a result on a processor at all."""
    if fault.operator in WITHOUT_NUMBERS or not has_a_kernel(fault.operator):
        return False
    return fault.operator not in GIVES_TRUTH or fault.effect in ON_TRUTH


def draw(source: random.Random) -> Drawn:
    """One fault: each operator, type, condition and effect is as likely as any other."""
    return Drawn(*(source.choice(list(one)) for one in (operators(), TYPES, CONDITIONS, EFFECTS)))


def under(fault: tuple[str, str, str, str], function: Callable[..., Any], given: dict[str, Any]) -> Any:
    """What a function returns with a fault planted."""
    operator, dtype, condition, effect = fault
    with Drawn(operator, getattr(torch, dtype), condition, effect).mode():
        return function(**given)


def faults(seed: int, count: int) -> Iterator[Drawn]:
    """The first faults of a seed that can strike on a processor."""
    return itertools.islice(filter(can_strike, every(seed)), count)


def every(seed: int) -> Iterator[Drawn]:
    """All faults of a seed, also those that no processor has."""
    source = random.Random(f"faults {seed}")
    return iter(lambda: draw(source), None)
