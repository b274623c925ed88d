"""Collectives with a root: one rank has or gets what all the others do not.

In: ranks, a payload, the root. Out: readings of every rank, of the poison on ranks that must get nothing too.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from workloads import collective_data as data
from workloads.collective_cases import reduced
from workloads.collective_data import Guarded, Payload
from workloads.gates import Reading
from workloads.ranks import Ranks


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


def scatter(ranks: Ranks, payload: Payload, root: int) -> Iterable[Reading]:
    """Each rank holds its own share of the root's values."""
    out, shares = Guarded(payload.count, payload, ranks), None
    if ranks.rank == root:
        shares = list(data.send_buffer(payload, ranks, payload.count * ranks.size).chunk(ranks.size))
    dist.scatter(out.view, shares, root)
    return out.readings(data.values(payload, ranks, root, payload.count, ranks.rank * payload.count))


def gather(ranks: Ranks, payload: Payload, root: int) -> Iterable[Reading]:
    """The root holds the values of all, in rank order; on the others nothing was written."""
    out = Guarded(payload.count * ranks.size, payload, ranks)
    parts = list(out.view.chunk(ranks.size)) if ranks.rank == root else None
    dist.gather(data.send_buffer(payload, ranks), parts, root)
    if ranks.rank != root:
        return out.readings(torch.full_like(out.view, out.poison))
    return out.readings(torch.cat([data.values(payload, ranks, rank) for rank in range(ranks.size)]))
