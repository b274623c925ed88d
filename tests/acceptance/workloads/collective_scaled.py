"""Sums that the library scales, and groups of one rank. In: ranks, a payload. Out: readings of this rank.

Trainers average gradients this way. A group of one has code of its own in the library: with a mean it once
left the last elements out (NVIDIA/nccl#1950).
"""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from workloads import collective_data as data
from workloads.collective_data import Guarded, Payload
from workloads.gates import Reading, elementwise, unit_roundoff
from workloads.ranks import Ranks

Call = Callable[[torch.Tensor, torch.Tensor], object]


def _parts(payload: Payload, ranks: Ranks, count: int | None = None, start: int = 0) -> list[torch.Tensor]:
    """Small values of each rank, so that the sum of their multiples by the world size is exact."""
    small = 1 + data.COUNTS_TO[payload.dtype] // ranks.size**2 // 2
    return [data.values(payload, ranks, rank, count, start) % small for rank in range(ranks.size)]


def _mean_readings(buffer: Guarded, parts: list[torch.Tensor], ranks: Ranks) -> Iterable[Reading]:
    """The mean of multiples of the world size is a whole number.
    A library may multiply each by 1/n instead, which is exact for powers of two only; else every rank's
    share, and every sum, may be rounded.
    """
    mean = torch.stack(parts).sum(0)
    values, guard = buffer.readings(mean)
    if ranks.size & (ranks.size - 1):
        slack = 2 * ranks.size * unit_roundoff(buffer.view.dtype) * mean.double()
        values = elementwise(buffer.view, mean, slack, name="values")
    return values, guard


def all_reduce_average(ranks: Ranks, payload: Payload) -> Iterable[Reading]:
    """Every rank holds the mean."""
    buffer, parts = Guarded(payload.count, payload, ranks), _parts(payload, ranks)
    buffer.view.copy_(parts[ranks.rank] * ranks.size)
    dist.all_reduce(buffer.view, dist.ReduceOp.AVG)
    return _mean_readings(buffer, parts, ranks)


def reduce_scatter_average(ranks: Ranks, payload: Payload) -> Iterable[Reading]:
    """Each rank holds its own share of the mean; FSDP2 reduces gradients so."""
    whole = payload.count * ranks.size
    out, sent = Guarded(payload.count, payload, ranks), Guarded(whole, payload, ranks)
    sent.view.copy_(_parts(payload, ranks, whole)[ranks.rank] * ranks.size)
    dist.reduce_scatter_tensor(out.view, sent.view, dist.ReduceOp.AVG)
    mine = ranks.rank * payload.count
    return _mean_readings(out, _parts(payload, ranks, payload.count, mine), ranks)


def all_reduce_premultiplied(ranks: Ranks, payload: Payload) -> Iterable[Reading]:
    """The sum of values that the library doubles first; FSDP divides its gradients this way."""
    buffer = Guarded(payload.count, payload, ranks)
    small = data.COUNTS_TO[payload.dtype] // ranks.size // 2
    parts = [data.values(payload, ranks, rank) % small for rank in range(ranks.size)]
    buffer.view.copy_(parts[ranks.rank])
    dist.all_reduce(buffer.view, dist._make_nccl_premul_sum(2.0))  # there is no public name for it
    return buffer.readings(2 * torch.stack(parts).sum(0))


def group_of_one(
    ranks: Ranks, payload: Payload, groups: list[dist.ProcessGroup], *, means: bool
) -> Iterable[Reading]:
    """Every collective of a group that holds this rank alone gives this rank its own values."""
    own = groups[ranks.rank]
    for name, call in _alone(own, ranks.rank, means=means).items():
        out = Guarded(payload.count, payload, ranks)
        call(out.view, data.send_buffer(payload, ranks))
        for reading in out.readings(data.values(payload, ranks, ranks.rank)):
            yield Reading(f"{name}: {reading.gate}", reading.got, reading.bound, reading.detail)


def _alone(own: dist.ProcessGroup, me: int, *, means: bool) -> dict[str, Call]:
    calls: dict[str, Call] = {
        "all_reduce": lambda out, sent: dist.all_reduce(out.copy_(sent), group=own),
        "broadcast": lambda out, sent: dist.broadcast(out.copy_(sent), me, group=own),
        "reduce": lambda out, sent: dist.reduce(out.copy_(sent), me, group=own),
        "all_gather": lambda out, sent: dist.all_gather_into_tensor(out, sent, group=own),
        "reduce_scatter": lambda out, sent: dist.reduce_scatter_tensor(out, sent, group=own),
        "all_to_all": lambda out, sent: dist.all_to_all_single(out, sent, group=own),
    }
    if means:
        mean = dist.ReduceOp.AVG
        calls["mean"] = lambda out, sent: dist.all_reduce(out.copy_(sent), mean, group=own)
        calls["scattered mean"] = lambda out, sent: dist.reduce_scatter_tensor(out, sent, mean, group=own)
    return calls
