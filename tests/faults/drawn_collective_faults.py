"""Faults of collectives that nobody chose: operation, type, condition and effect, drawn from a seed.

In: seeds and numbers of faults and of cases. Out: one JSON line {"healthy": failing cases, "named": faults of
known shapes, "faults": {name: {"hits", "case": seed and number of the first that fails, or null}}, "hung"}.

A program of two gloo ranks. A fault wraps torch's own call and knows nothing of what judges. It strikes on
every rank, or on the last one alone.
"""

import argparse
import contextlib
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from workloads import generated_collectives as generated
from workloads.collective_groups import Watch, watched
from workloads.gates import bits
from workloads.generated_collective_calls import CALLS
from workloads.generated_collective_cases import draw as draw_case
from workloads.generated_collective_data import IN_PLACE, KINDS, REDUCING
from workloads.ranks import joined

Tensors = Sequence[torch.Tensor]
TYPES = ("fp64", "fp32", "fp16", "bf16", "int8", "uint8", "int32", "int64", "bool")
OUT = {"gather": 1}  # where an operation has its output, if it is not its first argument
CALLED = {"send": ("recv", "irecv")}  # what is wrapped, if it is not the operation


@dataclass(frozen=True)
class Seen:
    """A call: its outputs after it and before it, what it was given, and how."""

    out: Tensors
    before: Tensors
    given: Tensors
    arguments: tuple[Any, ...]
    group: Any

    @property
    def bytes(self) -> int:
        """Of all outputs."""
        return sum(one.numel() * one.element_size() for one in self.out)

    def reduces(self, *by: Any) -> bool:
        """Whether it reduces by one of these."""
        return any(
            one == other for one in self.arguments if isinstance(one, dist.ReduceOp.RedOpType) for other in by
        )


CONDITIONS: dict[str, Callable[[Seen], bool]] = {
    "always": lambda _: True,
    "an output of at most 64 bytes": lambda seen: seen.bytes <= 64,
    "an output of more than 2^10 bytes": lambda seen: seen.bytes > 2**10,
    "an output of more than 2^14 bytes": lambda seen: seen.bytes > 2**14,
    "an odd number of elements": lambda seen: seen.out[0].numel() % 2 == 1,
    "a multiple of 16 bytes": lambda seen: seen.bytes % 16 == 0,
    "an output off 16 bytes": lambda seen: seen.out[0].data_ptr() % 16 != 0,
    "an output at 64 bytes": lambda seen: seen.out[0].data_ptr() % 64 == 0,
    "a group of its own": lambda seen: seen.group is not dist.group.WORLD,
    "a group of one": lambda seen: dist.get_world_size(seen.group) == 1,
    "a mean": lambda seen: seen.reduces(dist.ReduceOp.AVG),
    "a maximum or minimum": lambda seen: seen.reduces(dist.ReduceOp.MAX, dist.ReduceOp.MIN),
    "unequal splits": lambda seen: len(seen.arguments) > 2 and seen.arguments[2] is not None,
}
ONLY: dict[str, tuple[str, ...]] = {
    "a mean": REDUCING,
    "a maximum or minimum": REDUCING,
    "unequal splits": ("all_to_all_single",),
}


def keeps(first: int | None, last: int | None) -> Callable[[Seen], None]:
    """Some elements are not written."""

    def damage(seen: Seen) -> None:
        for out, before in zip(seen.out, seen.before, strict=True):
            flat(out)[first:last] = before[first:last]

    return damage


def flat(out: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(out) if out.is_complex() else out).view(-1)


def tail(power: int) -> Callable[[Seen], None]:
    def damage(seen: Seen) -> None:
        for out, before in zip(seen.out, seen.before, strict=True):
            first = 2**power // flat(out).element_size()
            flat(out)[first:] = before[first:]

    return damage


def beside(step: int) -> Callable[[Seen], None]:
    """One element beside the output is written."""

    def damage(seen: Seen) -> None:
        out = flat(seen.out[-1 if step > 0 else 0])
        place = out.storage_offset() + (out.numel() if step > 0 else -1)
        if 0 <= place < out.untyped_storage().nbytes() // out.element_size():
            torch.as_strided(out, (1,), (1,), place).zero_()

    return damage


def flips(seen: Seen) -> None:
    for out in seen.out:
        raw = flat(out)
        raw = raw.view(torch.uint8) if raw.dtype == torch.bool else bits(raw)
        raw[raw.numel() // 2 :][:1] ^= 1


def swaps(seen: Seen) -> None:
    for out in seen.out:
        pair = flat(out)[:2]
        pair.copy_(pair.flip(0))


def repeats(seen: Seen) -> None:
    for out in seen.out:
        block = flat(out)[64:128]
        block.copy_(flat(out)[: block.numel()])


def other_order(seen: Seen) -> None:
    """The shares come in another order."""
    if len(seen.out) > 1:
        flats = [flat(one) for one in seen.out]
        mixed = torch.cat(flats[::-1]).split([one.numel() for one in flats])
    else:
        flats = [flat(seen.out[0])]
        splits = seen.arguments[2] if len(seen.arguments) > 2 else None
        size = dist.get_world_size(seen.group)
        parts = flats[0].split(splits) if isinstance(splits, list) else flats[0].chunk(size)
        mixed = (torch.cat([*parts[1:], *parts[:1]]),) if parts else (flats[0].clone(),)
    for one, other in zip(flats, mixed, strict=True):
        one.copy_(other)


def through(kind: torch.dtype) -> Callable[[Seen], None]:
    def damage(seen: Seen) -> None:
        for out in seen.out:
            flat(out).copy_(flat(out).to(kind))

    return damage


def divided(seen: Seen) -> None:
    for out in seen.out:
        flat(out).copy_(flat(out) / dist.get_world_size(seen.group))


def spoils(seen: Seen) -> None:
    for given in seen.given:
        if given.numel():
            flat(given)[:1] = ~flat(given)[:1] if given.dtype == torch.bool else flat(given)[:1] + 1


def replaced(choose: Callable[[torch.Tensor], torch.Tensor], value: float) -> Callable[[Seen], None]:
    """Some of the numbers become another one."""

    def damage(seen: Seen) -> None:
        for out in map(flat, seen.out):
            if out.is_floating_point():
                out[choose(out)] = value

    return damage


def late(seen: Seen) -> None:
    """The result is there 5 ms after the wait for it."""
    for out, before in zip(seen.out, seen.before, strict=True):
        right = flat(out).clone()
        flat(out).copy_(before)
        threading.Timer(0.005, flat(out).copy_, (right,)).start()


EFFECTS: dict[str, Callable[[Seen], None]] = {
    "its last element is not written": keeps(-1, None),
    "its first element is not written": keeps(None, 1),
    **{f"what is beyond 2^{power} bytes is not written": tail(power) for power in (4, 9, 12, 15)},
    "one element after it is 0": beside(1),
    "one element before it is 0": beside(-1),
    "one bit in its middle flips": flips,
    "its first two elements change places": swaps,
    "64 elements are those before them": repeats,
    "its shares come in another order": other_order,
    "it went through bfloat16": through(torch.bfloat16),
    "it went through float32": through(torch.float32),
    "it is divided once more": divided,
    "what was given changes": spoils,
    "every NaN is the same one": replaced(torch.isnan, float("nan")),
    "numbers below 1e-30 are 0": replaced(lambda out: out.abs() < 1e-30, 0.0),
    "infinity is the largest number": replaced(torch.isinf, 60000.0),
    "it comes late": late,
}
INSTEAD = {"the last rank gives zeros": REDUCING, "another root": ("broadcast", "reduce")}
NOT_FOR = {"what was given changes": (*IN_PLACE, "send", "batch_isend_irecv", "gather", "scatter")}
WIDER = {"it went through bfloat16": ("fp64", "fp32"), "it went through float32": ("fp64", "int32", "int64")}
KINDS_FOR = {"a mean": ("any type", *TYPES[:4])}
FLOATING = ("every NaN is the same one", "numbers below 1e-30 are 0", "infinity is the largest number")


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and when."""

    op: str
    kind: str
    condition: str
    effect: str
    everywhere: bool = True

    def __str__(self) -> str:
        where = "" if self.everywhere else ", on the last rank"
        return f"{self.op} of {self.kind}: {self.effect} ({self.condition}{where})"


def draw(count: int, seed: int) -> list[Fault]:
    """Faults that can be: each operation, type, condition and effect as often as any other."""
    r, found = random.Random(f"collective faults {seed}"), dict[Fault, None]()
    while len(found) < count:
        effects = (*EFFECTS, *INSTEAD)
        one = Fault(
            r.choice(tuple(CALLS)),
            r.choice(("any type", *TYPES)),
            r.choice(tuple(CONDITIONS)),
            r.choice(effects),
            r.random() < 0.5,
        )
        if possible(one):
            found[one] = None
    return list(found)


def possible(fault: Fault) -> bool:
    """Whether such a call exists, and such an effect changes something that is promised."""
    op, kind, condition, effect = fault.op, fault.kind, fault.condition, fault.effect
    only = ONLY.get(condition, tuple(CALLS)), INSTEAD.get(effect, tuple(CALLS))
    types = WIDER.get(effect, (kind,)), KINDS_FOR.get(condition, (kind,))
    if (
        any(op not in ops for ops in only)
        or any(kind not in some for some in types)
        or op in NOT_FOR.get(effect, ())
    ):
        return False
    if effect in FLOATING and (op in REDUCING or kind in TYPES[4:]):
        return False  # no number of a sum here is one of these
    if effect.startswith("what is beyond") and "at most" in condition:
        return "2^4" in effect
    if kind == "bool" and ("divided" in effect or op in REDUCING):
        return False
    alone = condition == "a group of one"
    return not (
        alone
        and (
            op in {"send", "batch_isend_irecv"}
            or "root" in effect
            or "order" in effect
            or "divided" in effect
        )
    )


NAMED = (
    Fault("all_gather_into_tensor", "any type", "always", "its last element is not written"),
    Fault("all_reduce", "any type", "always", "what is beyond 2^12 bytes is not written"),
    Fault("reduce_scatter_tensor", "any type", "always", "one element after it is 0"),
    Fault("all_reduce", "any type", "a mean", "it is divided once more"),
    Fault("broadcast", "any type", "a group of its own", "another root"),
    Fault("reduce_scatter", "fp16", "always", "the last rank gives zeros"),
    Fault("all_reduce", "fp32", "always", "it went through bfloat16"),
    Fault("all_to_all_single", "any type", "unequal splits", "its shares come in another order"),
)


class Planted:
    """A fault in place of torch's call."""

    def __init__(self, fault: Fault, rank: int, size: int) -> None:
        self.fault, self.hits, self.last = fault, 0, rank == size - 1

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        names = CALLED.get(self.fault.op, (self.fault.op,))
        with contextlib.ExitStack() as stack:
            for name in names:
                wrapped = self._wrapped(getattr(dist, name))
                # A batch asks for the same function.
                for module in (dist, *([dist.distributed_c10d] if name == "irecv" else [])):
                    stack.enter_context(mock.patch.object(module, name, wrapped))
            yield

    def _wrapped(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **how: Any) -> Any:
            if _world.pg_coalesce_state:
                return original(*arguments, **how)
            out, given = self._tensors(arguments)
            group = how.get("group") or (
                arguments[0][0].group if out and not isinstance(out[0], torch.Tensor) else None
            )
            seen = Seen(out, [flat(one).clone() for one in out], given, arguments, group)
            strikes = self._strikes(seen)
            changed = self._instead(seen, how) if strikes else None
            started = original(*(changed or arguments), **how)
            for work in started if isinstance(started, list) else [started]:
                if hasattr(work, "wait"):
                    work.wait()
            if strikes and self.fault.effect in EFFECTS and (self.fault.everywhere or self.last):
                EFFECTS[self.fault.effect](seen)
            return None

        return call

    def _tensors(self, arguments: tuple[Any, ...]) -> tuple[Tensors, Tensors]:
        if self.fault.op == "batch_isend_irecv":
            return [one.tensor for one in arguments[0] if one.op is dist.irecv], []
        place = OUT.get(self.fault.op, 0)
        lists = [one if isinstance(one, list) else [one] for one in arguments[:2]]
        out = [one for one in lists[place] if isinstance(one, torch.Tensor)]
        given = [one for one in lists[1 - place] if isinstance(one, torch.Tensor)] if len(lists) > 1 else []
        return out, out if self.fault.op in IN_PLACE else given

    def _strikes(self, seen: Seen) -> bool:
        fault, tensors = self.fault, [*seen.out, *seen.given]
        if not tensors or (not seen.out and fault.effect in EFFECTS):
            return False
        if fault.kind != "any type" and tensors[0].dtype != KINDS[fault.kind].whole:
            return False
        holds = (
            bool(CONDITIONS[fault.condition](seen))
            if seen.out
            else fault.condition in {"always", "a group of its own"}
        )
        self.hits += holds
        return holds

    def _instead(self, seen: Seen, how: dict[str, Any]) -> tuple[Any, ...] | None:
        """Other arguments for the call itself."""
        arguments = seen.arguments
        if self.fault.effect == "the last rank gives zeros" and self.last:
            if self.fault.op in IN_PLACE:
                seen.out[0].zero_()
                return None
            given = [torch.zeros_like(one) for one in seen.given]
            return (arguments[0], given if isinstance(arguments[1], list) else given[0], *arguments[2:])
        if self.fault.effect == "another root":
            return _another_root(self.fault.op, seen, how)
        return None


def _another_root(op: str, seen: Seen, how: dict[str, Any]) -> tuple[Any, ...] | None:
    members = dist.get_process_group_ranks(how["group"])
    arguments, place = list(seen.arguments), {"broadcast": 1, "reduce": 1}.get(op)
    if place is None or len(members) == 1:
        return None
    arguments[place] = members[(members.index(arguments[place]) + 1) % len(members)]
    return tuple(arguments)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=0)
    parser.add_argument("--fault-seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--cases", type=int, default=120)
    options = parser.parse_args()
    with joined() as ranks, contextlib.ExitStack() as stack:
        named = [str(fault) for fault in NAMED]
        report: dict[str, Any] = {"healthy": [], "named": named, "faults": {}, "hung": None}
        watch = Watch(time.monotonic() + 60, report)
        stack.enter_context(watched(ranks, watch, report))
        judge = generated.Judge(ranks, watch)
        every = [(seed, number) for seed in range(options.seeds) for number in range(options.cases)]
        drawn = {one: draw_case(*one, ranks.size, device="cpu") for one in every}
        report["healthy"] = [str(case) for one, case in drawn.items() if judge(case, str(one))[1]]
        for fault in (*NAMED, *draw(options.faults, options.fault_seed)):
            planted, found = Planted(fault, ranks.rank, ranks.size), None
            with planted.here():
                for one, case in drawn.items():
                    if any(call.op == fault.op for call in case.calls):
                        failures = judge(case, str(fault))[1]
                        if any(": raised " in each for each in failures):
                            raise RuntimeError(f"{fault} is no fault but an error: {failures}")
                        if failures:
                            found = one
                            break
            report["faults"][str(fault)] = {"hits": planted.hits, "case": found}
        report["hung"] = None
    if ranks.rank == 0:
        sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
