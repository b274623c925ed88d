"""One function per collective: call it on exact data, read whether every rank holds what it must."""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from workloads import collective_data as data
from workloads import operands
from workloads.collective_data import Guarded, Payload
from workloads.gates import Reading, checksum, exact
from workloads.ranks import Ranks

PIECE = 1 << 26
REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def reduced(
    payload: Payload, ranks: Ranks, op: str, *, count: int | None = None, start: int = 0
) -> torch.Tensor:
    """The exact result of the reduction over all ranks."""
    total = data.values(payload, ranks, 0, count, start)
    combine = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[op]
    for rank in range(1, ranks.size):
        total = combine(total, data.values(payload, ranks, rank, count, start))
    return total


def all_reduce(ranks: Ranks, payload: Payload, op: str = "sum") -> Iterable[Reading]:
    """Every rank holds the reduction of all."""
    buffer = Guarded(payload.count, payload, ranks)
    buffer.view.copy_(data.values(payload, ranks, ranks.rank))
    dist.all_reduce(buffer.view, REDUCTIONS[op])
    return buffer.readings(reduced(payload, ranks, op))


def all_reduce_average(ranks: Ranks, payload: Payload) -> Iterable[Reading]:
    """Multiples of the world size, so that the mean is a whole number."""
    buffer = Guarded(payload.count, payload, ranks)
    small = 1 + data.COUNTS_TO[payload.dtype] // ranks.size**2 // 2
    parts = [data.values(payload, ranks, rank) % small for rank in range(ranks.size)]
    buffer.view.copy_(parts[ranks.rank] * ranks.size)
    dist.all_reduce(buffer.view, dist.ReduceOp.AVG)
    return buffer.readings(torch.stack(parts).sum(0))


def all_reduce_normal(ranks: Ranks, payload: Payload) -> tuple[int, Reading]:
    """Normal data: no closed form, but every rank must hold the same finite bits. Returns their checksum."""
    kind = data.DTYPES[payload.dtype]
    tensor = operands.normal(payload.count, dtype=kind, seed=1000 * payload.trial + ranks.rank)
    dist.all_reduce(tensor)
    return checksum(tensor), Reading("non-finite elements", float((~tensor.isfinite()).sum()), 0.0)


def all_reduce_large(ranks: Ranks, payload: Payload) -> Iterable[Reading]:
    """More elements than 32 bits count; filled and compared piece by piece to fit beside each other."""
    tensor = torch.empty(payload.count, dtype=data.DTYPES[payload.dtype], device=ranks.device)
    starts = range(0, payload.count, PIECE)
    for start in starts:
        piece = tensor[start : start + PIECE]
        piece.copy_(data.values(payload, ranks, ranks.rank, len(piece), start))
    dist.all_reduce(tensor)
    for start in starts:
        piece = tensor[start : start + PIECE]
        expected = reduced(payload, ranks, "sum", count=len(piece), start=start)
        yield exact(piece, expected, name=f"values from {start}")


def all_gather(ranks: Ranks, payload: Payload) -> Iterable[Reading]:
    """Every rank holds the values of all, in rank order."""
    out = Guarded(payload.count * ranks.size, payload, ranks)
    dist.all_gather_into_tensor(out.view, data.send_buffer(payload, ranks))
    return out.readings(torch.cat([data.values(payload, ranks, rank) for rank in range(ranks.size)]))


def reduce_scatter(ranks: Ranks, payload: Payload, op: str = "sum") -> Iterable[Reading]:
    """Each rank holds its own share of the reduction."""
    out = Guarded(payload.count, payload, ranks)
    sent = data.send_buffer(payload, ranks, payload.count * ranks.size)
    dist.reduce_scatter_tensor(out.view, sent, REDUCTIONS[op])
    mine = ranks.rank * payload.count
    return out.readings(reduced(payload, ranks, op, count=payload.count, start=mine))


def all_to_all(ranks: Ranks, payload: Payload) -> Iterable[Reading]:
    """Each rank holds one equal share of everyone's values."""
    out = Guarded(payload.count * ranks.size, payload, ranks)
    dist.all_to_all_single(out.view, data.send_buffer(payload, ranks, payload.count * ranks.size))
    mine = ranks.rank * payload.count
    shares = [data.values(payload, ranks, rank, payload.count, mine) for rank in range(ranks.size)]
    return out.readings(torch.cat(shares))


def split(sender: int, receiver: int, payload: Payload) -> int:
    """An uneven plan in which some pairs exchange nothing."""
    return payload.count * ((sender + 2 * receiver) % 3)


def all_to_all_uneven(ranks: Ranks, payload: Payload) -> Iterable[Reading]:
    """Shares of different length, some of them empty."""
    everyone = range(ranks.size)
    sends = [split(ranks.rank, to, payload) for to in everyone]
    receives = [split(sender, ranks.rank, payload) for sender in everyone]
    out = Guarded(sum(receives), payload, ranks)
    dist.all_to_all_single(out.view, data.send_buffer(payload, ranks, sum(sends)), receives, sends)
    shares = []
    for sender in everyone:
        before = sum(split(sender, to, payload) for to in range(ranks.rank))
        shares.append(data.values(payload, ranks, sender, receives[sender], before))
    return out.readings(torch.cat(shares))


def broadcast(ranks: Ranks, payload: Payload, root: int) -> Iterable[Reading]:
    """Every rank holds the root's values."""
    buffer = Guarded(payload.count, payload, ranks)
    if ranks.rank == root:
        buffer.view.copy_(data.values(payload, ranks, root))
    dist.broadcast(buffer.view, root)
    return buffer.readings(data.values(payload, ranks, root))


def reduce(ranks: Ranks, payload: Payload, root: int) -> Iterable[Reading]:
    """The root holds the sum; what others hold afterwards is not defined."""
    buffer = Guarded(payload.count, payload, ranks)
    buffer.view.copy_(data.values(payload, ranks, ranks.rank))
    dist.reduce(buffer.view, root)
    values, guard = buffer.readings(reduced(payload, ranks, "sum"))
    return (values, guard) if ranks.rank == root else (guard,)


def send_receive(ranks: Ranks, payload: Payload, distance: int) -> Iterable[Reading]:
    """Each rank sends to the one `distance` further round the ring; all distances make all pairs."""
    to, sender = (ranks.rank + distance) % ranks.size, (ranks.rank - distance) % ranks.size
    out, sent = Guarded(payload.count, payload, ranks), data.send_buffer(payload, ranks)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, to), dist.P2POp(dist.irecv, out.view, sender)]
    )
    for work in works:
        work.wait()
    return out.readings(data.values(payload, ranks, sender))


def sub_groups(ranks: Ranks, payload: Payload, groups: list[dist.ProcessGroup]) -> Iterable[Reading]:
    """Even and odd ranks reduce at the same time, each among themselves."""
    buffer = Guarded(payload.count, payload, ranks)
    buffer.view.copy_(data.values(payload, ranks, ranks.rank))
    dist.all_reduce(buffer.view, group=groups[ranks.rank % 2])
    members = range(ranks.rank % 2, ranks.size, 2)
    total = torch.stack([data.values(payload, ranks, rank) for rank in members]).sum(0)
    return buffer.readings(total)


def in_flight(ranks: Ranks, payload: Payload) -> Iterable[Reading]:
    """Several all-reduces at once, waited for in reverse, each with its own values."""
    trials = [Payload(count=payload.count + i, dtype=payload.dtype, trial=i) for i in range(4)]
    buffers = [Guarded(trial.count, trial, ranks) for trial in trials]
    works = []
    for trial, buffer in zip(trials, buffers, strict=True):
        buffer.view.copy_(data.values(trial, ranks, ranks.rank))
        works.append(dist.all_reduce(buffer.view, async_op=True))
    for work in reversed(works):
        work.wait()
    for trial, buffer in zip(trials, buffers, strict=True):
        yield from buffer.readings(reduced(trial, ranks, "sum"))


def keeps_input(ranks: Ranks, payload: Payload) -> Iterable[Reading]:
    """Out-of-place operations leave what they send as it was."""
    sent = data.send_buffer(payload, ranks, payload.count * ranks.size)
    before = sent.clone()
    whole = torch.empty(payload.count * ranks.size**2, dtype=sent.dtype, device=sent.device)
    dist.all_gather_into_tensor(whole, sent)
    yield exact(sent, before, name="all_gather's input")
    dist.reduce_scatter_tensor(torch.empty_like(sent[: payload.count]), sent)
    yield exact(sent, before, name="reduce_scatter's input")
