"""One function per collective. In: ranks, a payload of exact data, a root if it has one.
Out: readings of this rank.
"""

import itertools
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


def own_share(payload: Payload, ranks: Ranks) -> torch.Tensor:
    """This rank's share of the exact sum."""
    return reduced(payload, ranks, "sum", count=payload.count, start=ranks.rank * payload.count)


def of_all(payload: Payload, ranks: Ranks) -> torch.Tensor:
    """The values of all ranks, in their order."""
    return torch.cat([data.values(payload, ranks, rank) for rank in range(ranks.size)])


def all_reduce(ranks: Ranks, payload: Payload, op: str = "sum") -> Iterable[Reading]:
    """Every rank holds the reduction of all."""
    buffer = Guarded(payload.count, payload, ranks)
    buffer.view.copy_(data.values(payload, ranks, ranks.rank))
    dist.all_reduce(buffer.view, REDUCTIONS[op])
    return buffer.readings(reduced(payload, ranks, op))


def all_reduce_normal(ranks: Ranks, payload: Payload) -> tuple[int, Reading]:
    """Normal data has no known result, but every rank must hold the same finite bits.
    Returns their checksum.
    """
    kind = data.DTYPES[payload.dtype]
    tensor = operands.normal(payload.count, dtype=kind, seed=1000 * payload.trial + ranks.rank)
    dist.all_reduce(tensor)
    return checksum(tensor), Reading("non-finite elements", float((~tensor.isfinite()).sum()), 0.0)


def _filled(ranks: Ranks, payload: Payload) -> torch.Tensor:
    """This rank's values, written in pieces because the int64 values would not fit in memory at once."""
    tensor = torch.empty(payload.count, dtype=data.DTYPES[payload.dtype], device=ranks.device)
    for start in range(0, payload.count, PIECE):
        piece = tensor[start : start + PIECE]
        piece.copy_(data.values(payload, ranks, ranks.rank, len(piece), start))
    return tensor


def all_reduce_large(ranks: Ranks, payload: Payload) -> Iterable[Reading]:
    """An array with more elements than 32 bits can count, compared in pieces."""
    tensor = _filled(ranks, payload)
    dist.all_reduce(tensor)
    for start in range(0, payload.count, PIECE):
        piece = tensor[start : start + PIECE]
        expected = reduced(payload, ranks, "sum", count=len(piece), start=start)
        yield exact(piece, expected, name=f"values from {start}")


def all_gather_large(ranks: Ranks, payload: Payload) -> Iterable[Reading]:
    """The gathered array has more elements than 32 bits can count; it is compared in pieces."""
    out = torch.empty(payload.count * ranks.size, dtype=data.DTYPES[payload.dtype], device=ranks.device)
    dist.all_gather_into_tensor(out, _filled(ranks, payload))
    for rank, start in itertools.product(range(ranks.size), range(0, payload.count, PIECE)):
        count = min(PIECE, payload.count - start)
        piece = out[rank * payload.count + start :][:count]
        yield exact(piece, data.values(payload, ranks, rank, count, start), name=f"rank {rank} from {start}")


def all_gather(ranks: Ranks, payload: Payload) -> Iterable[Reading]:
    """Every rank holds the values of all, in rank order."""
    out = Guarded(payload.count * ranks.size, payload, ranks)
    dist.all_gather_into_tensor(out.view, data.send_buffer(payload, ranks))
    return out.readings(of_all(payload, ranks))


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
    """The root holds the sum; the content on other ranks is undefined afterwards."""
    buffer = Guarded(payload.count, payload, ranks)
    buffer.view.copy_(data.values(payload, ranks, ranks.rank))
    dist.reduce(buffer.view, root)
    values, guard = buffer.readings(reduced(payload, ranks, "sum"))
    return (values, guard) if ranks.rank == root else (guard,)


def scatter(ranks: Ranks, payload: Payload, root: int) -> Iterable[Reading]:
    """Each rank holds its own share of the root's values."""
    out, shares = Guarded(payload.count, payload, ranks), None
    if ranks.rank == root:
        shares = list(data.send_buffer(payload, ranks, payload.count * ranks.size).chunk(ranks.size))
    dist.scatter(out.view, shares, root)
    return out.readings(data.values(payload, ranks, root, payload.count, ranks.rank * payload.count))


def gather(ranks: Ranks, payload: Payload, root: int) -> Iterable[Reading]:
    """The root holds the values of all ranks in rank order; nothing is written on the others."""
    out = Guarded(payload.count * ranks.size, payload, ranks)
    parts = list(out.view.chunk(ranks.size)) if ranks.rank == root else None
    dist.gather(data.send_buffer(payload, ranks), parts, root)
    if ranks.rank != root:
        return out.readings(torch.full_like(out.view, out.poison))
    return out.readings(of_all(payload, ranks))
