"""Faults of a compiler that nobody chose: where, under which condition, with which effect, drawn from a seed.

In: a seed. Out: contexts that plant them in what `aot_eager_decomp_partition` makes of a program: in torch's
table of decompositions, in the graph that functionalization leaves, and in what a forward graph keeps for the
backward one. Eager mode and float64, by which the checks judge, never run any of it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch._dynamo.backends import debugging
from torch._inductor import decomposition
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

aten = torch.ops.aten
# What functionalization makes of a change in place, by the view that it went through.
UPDATES = (
    *("slice_scatter", "select_scatter", "as_strided_scatter", "diagonal_scatter"),
    *("copy_", "copy", "index_put"),
)
CONDITIONS: dict[str, Callable[[torch.Tensor], bool]] = {
    "always": lambda _: True,
    "of float32": lambda one: one.dtype is torch.float32,
    "of a half": lambda one: one.dtype in (torch.float16, torch.bfloat16),
    "of more than 2^5 elements": lambda one: bool(one.numel() > 2**5),
    "of rows of an odd size": lambda one: bool(one.dim() and one.shape[-1] % 2),
    "of three dimensions or more": lambda one: one.dim() > 2,
}


def _off(one: torch.Tensor) -> torch.Tensor:
    return one * (1 + 2.0**-6)


def _without_last_row(one: torch.Tensor) -> torch.Tensor:
    if not one.dim() or not one.shape[0]:
        return torch.zeros_like(one)
    return torch.cat((one[:-1], torch.zeros_like(one[-1:])))


EFFECTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "times 1 + 2^-6": _off,
    "its last row is lost": _without_last_row,
    "it is 0": torch.zeros_like,
}
# Kinds, each as often as it is listed.
KINDS = (
    *("decomposition", "decomposition", "gradient of a decomposition"),
    *("kernel", "update", "saved", "gradient"),
)


@dataclass(frozen=True)
class Drawn:
    """One fault, in words that say all of it; `number` is which of several it strikes, counted round."""

    kind: str
    target: str = ""
    condition: str = "always"
    effect: str = ""
    number: int = 0

    def __str__(self) -> str:
        what = {"update": "is lost", "saved": "is another one", "gradient": "is 0"}.get(
            self.kind, self.effect
        )
        return f"{self.kind} {self.target or self.number}, {self.condition}: {what}"


@dataclass
class Planted:
    """Which faults struck while a program was compiled; with `harmless`, they change nothing."""

    faults: Sequence[Drawn]
    harmless: bool = False
    struck: set[Drawn] = field(default_factory=set)

    @contextlib.contextmanager
    def mode(self) -> Iterator[Planted]:
        """Plant the faults for as long as this context lasts."""
        table, changed = decomposition.select_decomp_table(), {}
        for fault in self.faults:
            for func in _overloads(table, fault):
                changed[func] = functools.partial(self._decomposed, fault, changed.get(func, table[func]))
        compiler = debugging.get_nop_func()

        def compiled(graph: Any, given: Any) -> Any:
            for fault in self.faults:
                self._damage(graph, fault)
            graph.recompile()
            return compiler(graph, given)

        with (
            mock.patch.dict(table, changed),
            mock.patch.object(debugging, "get_nop_func", return_value=compiled),
        ):
            yield self

    def _decomposed(self, fault: Drawn, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        floats = [one for one in tree_leaves(out) if _is_float(one) and CONDITIONS[fault.condition](one)]
        if not floats:
            return out
        self.struck.add(fault)
        if fault.kind.startswith("gradient"):
            floats = [floats[fault.number % len(floats)]]
        struck = {id(one) for one in floats if not self.harmless}
        return tree_map(lambda one: EFFECTS[fault.effect](one) if id(one) in struck else one, out)

    def _damage(self, graph: Any, fault: Drawn) -> None:
        nodes = list(graph.graph.nodes)
        backward = any(node.op == "placeholder" and "tangents" in node.name for node in nodes)
        if fault.kind in ("kernel", "update"):
            for node in nodes:
                if node.op == "call_function" and _name(node.target) == fault.target and _fits(node, fault):
                    self._replace(graph.graph, node, fault)
        elif backward and fault.kind == "saved":
            given = [one for one in nodes if one.op == "placeholder" and "tangents" not in one.name]
            saved = [one for one in given if _fits(one, fault)]
            pairs = [pair for pair in itertools.pairwise(saved) if _kind(pair[0]) == _kind(pair[1])]
            if pairs:
                self.struck.add(fault)
                self._swap(*pairs[fault.number % len(pairs)])
        elif backward and fault.kind == "gradient":
            self._zero(graph.graph, nodes[-1], fault)

    def _replace(self, graph: Any, node: Any, fault: Drawn) -> None:
        if fault.kind == "update" and not isinstance(node.args[0], torch.fx.Node):
            return
        self.struck.add(fault)
        if self.harmless:
            return
        if fault.kind == "update":
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            return
        with graph.inserting_after(node):
            other = graph.call_function(EFFECTS[fault.effect], (node,))
        node.replace_all_uses_with(other, delete_user_cb=lambda user: user is not other)

    def _swap(self, one: Any, other: Any) -> None:
        if self.harmless:
            return
        mine, its = list(one.users), list(other.users)
        for user in mine:
            user.replace_input_with(one, other)
        for user in its:
            if user not in mine:
                user.replace_input_with(other, one)

    def _zero(self, graph: Any, output: Any, fault: Drawn) -> None:
        grads = list(output.args[0])
        found = [n for n, one in enumerate(grads) if isinstance(one, torch.fx.Node) and _fits(one, fault)]
        if not found:
            return
        self.struck.add(fault)
        if self.harmless:
            return
        place = found[fault.number % len(found)]
        with graph.inserting_before(output):
            grads[place] = graph.call_function(torch.zeros_like, (grads[place],))
        output.args = (tuple(grads),)


def _is_float(one: object) -> bool:
    return isinstance(one, torch.Tensor) and one.is_floating_point()


def _fits(node: Any, fault: Drawn) -> bool:
    value = node.meta.get("val")
    return _is_float(value) and CONDITIONS[fault.condition](value)


def _kind(node: Any) -> tuple[Any, ...]:
    value = node.meta["val"]
    return value.dtype, tuple(value.shape)


def _name(func: Any) -> str:
    """The name of an overload; nothing of anything else."""
    return str(func._schema.name).partition("::")[2] if isinstance(func, torch._ops.OpOverload) else ""


def _overloads(table: dict[Any, Any], fault: Drawn) -> list[Any]:
    known = "decomposition" in fault.kind
    return [one for one in table if known and _name(one) == fault.target]


@functools.cache
def targets(kind: str) -> list[str]:
    """What a kind of fault may strike, sorted."""
    if kind == "update":
        return list(UPDATES)
    if kind == "kernel":
        overloads = (
            getattr(packet, one)
            for name in (each.partition(".")[0] for each in torch._C._dispatch_get_all_op_names())
            if name.startswith("aten::")
            for packet in [getattr(aten, name.removeprefix("aten::"))]
            for one in getattr(packet, "overloads", list)()
        )
        return sorted({_name(one) for one in overloads if torch.Tag.core in one.tags})
    names = {_name(one) for one in decomposition.select_decomp_table()}
    return sorted(one for one in names if one and ("backward" in one or kind == "decomposition"))


def draw(source: random.Random) -> Drawn:
    """One fault: each kind as often as it is listed, then all else as likely as any other."""
    kind = source.choice(KINDS)
    condition, number = source.choice(list(CONDITIONS)), source.randrange(8)
    if kind in ("saved", "gradient"):
        return Drawn(kind, "", condition, "", number)
    effect = "" if kind == "update" else source.choice(list(EFFECTS))
    target = source.choice(targets(kind))
    return Drawn(kind, target, condition, "it is 0" if kind.startswith("gradient") else effect, number)


def faults(seed: int, count: int) -> list[Drawn]:
    """The first faults of a seed, each once."""
    source, found = random.Random(f"compiler faults {seed}"), dict[Drawn, None]()
    while len(found) < count:
        found[draw(source)] = None
    return list(found)


def under(fault: dict[str, Any], function: Callable[..., Any], given: dict[str, Any]) -> Any:
    """What a function returns with a fault planted."""
    with Planted([Drawn(**fault)]).mode():
        return function(**given)
