"""One drawn collective on this rank: buffers, call, readings. In: a call, a group. Out: readings."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from workloads.gates import Reading, bits, checksum, elementwise, exact
from workloads.generated_collective_data import (
    ALL,
    IN_PLACE,
    LISTS,
    Call,
    Share,
    received,
    right,
    sent,
    values,
)
from workloads.ranks import Ranks

GUARD, POISON = 64, 0xA5  # elements on each side; the byte in guards and in outputs


class Buffer:
    """Elements inside a larger buffer, whose other bytes must not change."""

    def __init__(self, call: Call, length: int, device: torch.device) -> None:
        kind = call.kind
        start, more = (0, 0) if call.offset < 0 else (GUARD + call.offset * kind.parts, GUARD)
        if kind.parts > 1:
            start += start % kind.parts
        size = kind.part.itemsize
        self.raw = torch.full(
            ((start + length * kind.parts + more) * size,), POISON, dtype=torch.uint8, device=device
        )
        self.edge = start * size, (start + length * kind.parts) * size
        self.view = self.raw.view(kind.part)[start : start + length * kind.parts]

    def guards(self) -> torch.Tensor:
        """How many bytes around the elements were written."""
        before, after = self.edge
        return (self.raw[:before] != POISON).sum() + (self.raw[after:] != POISON).sum()


class Place:
    """The shares that a rank sends or receives: in one buffer, or each in its own."""

    def __init__(self, call: Call, shares: list[Share], device: torch.device) -> None:
        self.call, self.shares = call, shares
        lengths = [call.length(share) for share in shares]
        each = lengths if call.apart and call.op in LISTS else [sum(lengths)]
        self.buffers = [Buffer(call, length, device) for length in each]
        if len(each) == len(lengths):
            self.parts = [one.view for one in self.buffers]
        else:
            self.parts = list(self.buffers[0].view.split([length * call.kind.parts for length in lengths]))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What a call gets as a list."""
        return [self._given(one) for one in self.parts]

    @property
    def tensor(self) -> torch.Tensor:
        """What a call gets as one tensor."""
        return self._given(self.buffers[0].view)

    def _given(self, part: torch.Tensor) -> torch.Tensor:
        return torch.view_as_complex(part.view(-1, 2)) if self.call.kind.parts > 1 else part

    def poison(self) -> None:
        """Take back what a turn before this one wrote."""
        for one in self.buffers:
            one.raw.fill_(POISON)

    def guard(self, name: str) -> Reading:
        """Nothing around the shares was written."""
        return Reading(f"bytes around the {name}", float(sum(int(one.guards()) for one in self.buffers)), 0.0)


@dataclass(frozen=True)
class Member:
    """This rank in a group: torch's group, and the ranks of the world in it, in their order."""

    ranks: Ranks
    group: Any
    members: tuple[int, ...]

    @property
    def me(self) -> int:
        """The place of this rank."""
        return self.members.index(self.ranks.rank)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.members)

    def keys(self, about: str) -> list[str]:
        """A key of the store for each rank."""
        return [f"{about}/{rank}" for rank in self.members]


class Run:
    """One call of this rank with tensors: filled, started, judged, as often as the case has turns."""

    def __init__(self, call: Call, member: Member, tag: str) -> None:
        self.call, self.member, self.tag = call, member, tag
        device, own = member.ranks.device, call.op in IN_PLACE
        self.gives, self.takes = (find(call, member.me, member.size) for find in (sent, received))
        self.out = Place(call, self.takes or (self.gives if own else []), device)
        self.sent = self.out if own else Place(call, self.gives, device)
        self.kept: list[torch.Tensor] = []
        self.checks_input = not own
        if call.inplace and call.op in {"all_gather_into_tensor", "reduce_scatter_tensor"}:
            self.checks_input, mine = False, slice(member.me, member.me + 1)
            if call.op == "all_gather_into_tensor":
                self.sent.parts = self.out.parts[mine]
            else:
                self.out.parts = self.sent.parts[mine]

    def fill(self, turn: int) -> None:
        """Write what is sent, and poison what is received."""
        for place in {id(one): one for one in (self.out, self.sent)}.values():
            place.poison()
        for part, share in zip(self.sent.parts, self.gives, strict=False):  # who gives nothing has an output
            part.copy_(values(self.call, share, self.member.size, turn, self.member.ranks.device))
        self.kept = [bits(one).clone() for one in self.sent.parts] if self.checks_input else []

    def start(self, _turn: int, *, asynchronous: bool) -> list[Any]:
        """Call it; what is to be waited for."""
        found = CALLS[self.call.op](self, asynchronous)
        return [one for one in (found if isinstance(found, list) else [found]) if one is not None]

    @property
    def reduction(self) -> Any:
        """Torch's name of how to reduce."""
        if self.call.reduce == "premul":
            return dist._make_nccl_premul_sum(2.0)  # there is no public name for it
        return getattr(dist.ReduceOp, self.call.reduce.upper())

    def readings(self, turn: int) -> Iterator[Reading]:
        """Values, guards, and what was sent."""
        if self.takes:
            for part, share in zip(self.out.parts, self.takes, strict=True):
                yield from self._values(part, share, turn)
        yield self.out.guard("output")
        if self.sent is not self.out:
            yield self.sent.guard("input")
        for part, before in zip(self.sent.parts, self.kept, strict=False):
            yield Reading("elements of the input that changed", float((bits(part) != before).sum()), 0.0)

    def _values(self, part: torch.Tensor, share: Share, turn: int) -> Iterator[Reading]:
        expected, slack = right(self.call, share, self.member.size, turn, self.member.ranks.device)
        name = f"turn {turn}, from {'all' if share[0] == ALL else self.member.members[share[0]]}"
        if slack is None:
            as_bits = self.call.values == "bits"
            yield exact(*((bits(part), bits(expected)) if as_bits else (part, expected)), name=name)
        elif part.numel():
            yield elementwise(part, expected, slack, name=name)
            if self.call.op == "all_reduce":
                yield self._same(part, turn)

    def _same(self, part: torch.Tensor, turn: int) -> Reading:
        """Every rank of the group has the same bits. The ranks say so through the store."""
        store, keys = self.member.ranks.store, self.member.keys(f"{self.tag}/{turn}")
        mine = str(checksum(part)).encode()
        store.set(keys[self.member.me], mine)
        return Reading("ranks with other bits", float(sum(store.get(key) != mine for key in keys)), 0.0)


class Plain:
    """One call of this rank without tensors: Python objects, or a barrier."""

    def __init__(self, call: Call, member: Member, tag: str) -> None:
        self.call, self.member, self.tag, self.wrong = call, member, tag, 0

    def fill(self, _turn: int) -> None:
        """Forget the turn before."""
        self.wrong = 0

    def start(self, turn: int, *, asynchronous: bool) -> list[Any]:  # noqa: ARG002 - these calls return ended
        """Call it, and count what is wrong."""
        if self.call.op == "barrier":
            store, keys = self.member.ranks.store, self.member.keys(f"{self.tag}/{turn}")
            store.add(keys[self.member.me], 1)  # unlike `set` it returns when the store has it
            dist.barrier(group=self.member.group)
            self.wrong = sum(not store.check([key]) for key in keys)
            return []
        gives, expected = (
            [self._object(share, turn) for share in find(self.call, self.member.me, self.member.size)]
            for find in (sent, received)
        )
        got = gives if self.call.op == "broadcast_object_list" and gives else [None] * len(expected)
        OBJECTS[self.call.op](got, gives, self.member.members[self.call.root], self.member.group)
        self.wrong = sum(one != other for one, other in zip(got, expected, strict=True))
        return []

    def readings(self, _turn: int) -> Iterator[Reading]:
        """How many objects are others, or how many ranks a barrier did not wait for."""
        yield Reading("wrong objects, or ranks that had not come", float(self.wrong), 0.0)

    def _object(self, share: Share, turn: int) -> Any:
        drawn = random.Random(f"{self.call.numbers} {share} {turn}")
        return {
            "share": share,
            "bytes": drawn.randbytes(self.call.count),
            "more": [drawn.random(), None, "é"],
        }


def made(call: Call, member: Member, tag: str) -> Run | Plain:
    """The call of this rank, its root a place in this group."""
    if call.op != "batch_isend_irecv":
        call = replace(call, root=call.root % member.size)
    return (Run if call.op in CALLS else Plain)(call, member, tag)


def _gather(run: Run, asynchronous: bool) -> Any:
    root = run.member.members[run.call.root]
    return dist.gather(
        run.sent.tensor, run.out.tensors if run.takes else None, root, **_how(run, asynchronous)
    )


def _scatter(run: Run, asynchronous: bool) -> Any:
    root = run.member.members[run.call.root]
    return dist.scatter(
        run.out.tensor, run.sent.tensors if run.gives else None, root, **_how(run, asynchronous)
    )


def _all_to_all_single(run: Run, asynchronous: bool) -> Any:
    splits = [[run.call.length(one) for one in shares] for shares in (run.takes, run.gives)]
    given = splits if run.call.uneven else [None, None]
    return dist.all_to_all_single(run.out.tensor, run.sent.tensor, *given, **_how(run, asynchronous))


def _send(run: Run, asynchronous: bool) -> Any:
    members, at, group = run.member.members, run.call.root, run.member.group
    if run.gives:
        call = dist.isend if asynchronous else dist.send
        return call(run.sent.tensor, members[(at + 1) % len(members)], group=group)
    if run.takes:
        got = (dist.irecv if asynchronous else dist.recv)(run.out.tensor, members[at], group=group)
        return got if asynchronous else None
    return None


def _batch(run: Run, _: bool) -> Any:
    if not run.gives:
        return None
    members, me = run.member.members, run.member.me
    sender = run.takes[0][0]
    to = (2 * me - sender) % len(members)
    operations = [
        dist.P2POp(dist.isend, run.sent.tensor, members[to], group=run.member.group),
        dist.P2POp(dist.irecv, run.out.tensor, members[sender], group=run.member.group),
    ]
    return dist.batch_isend_irecv(operations)


def _how(run: Run, asynchronous: bool) -> dict[str, Any]:
    return {"group": run.member.group, "async_op": asynchronous}


CALLS: dict[str, Callable[[Run, bool], Any]] = {
    "all_reduce": lambda run, a: dist.all_reduce(run.out.tensor, run.reduction, **_how(run, a)),
    "reduce": lambda run, a: dist.reduce(
        run.out.tensor, run.member.members[run.call.root], run.reduction, **_how(run, a)
    ),
    "broadcast": lambda run, a: dist.broadcast(
        run.out.tensor, run.member.members[run.call.root], **_how(run, a)
    ),
    "all_gather": lambda run, a: dist.all_gather(run.out.tensors, run.sent.tensor, **_how(run, a)),
    "all_gather_into_tensor": lambda run, a: dist.all_gather_into_tensor(
        run.out.tensor, run.sent.tensors[0], **_how(run, a)
    ),
    "reduce_scatter": lambda run, a: dist.reduce_scatter(
        run.out.tensor, run.sent.tensors, run.reduction, **_how(run, a)
    ),
    "reduce_scatter_tensor": lambda run, a: dist.reduce_scatter_tensor(
        run.out.tensors[0], run.sent.tensor, run.reduction, **_how(run, a)
    ),
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": lambda run, a: dist.all_to_all(run.out.tensors, run.sent.tensors, **_how(run, a)),
    "all_to_all_single": _all_to_all_single,
    "send": _send,
    "batch_isend_irecv": _batch,
}
OBJECTS: dict[str, Callable[[list[Any], list[Any], int, Any], None]] = {
    "all_gather_object": lambda got, gives, _, group: dist.all_gather_object(got, gives[0], group=group),
    "gather_object": lambda got, gives, root, group: dist.gather_object(
        gives[0], got or None, dst=root, group=group
    ),
    "broadcast_object_list": lambda got, _, root, group: dist.broadcast_object_list(
        got, src=root, group=group
    ),
    "scatter_object_list": lambda got, gives, root, group: dist.scatter_object_list(
        got, gives or None, src=root, group=group
    ),
}
OPERATIONS = (*CALLS, *OBJECTS, "barrier")
