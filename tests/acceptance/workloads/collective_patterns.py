"""How trainers use collectives: point to point, groups, several at once, coalesced. In: ranks, a payload.

Out: readings of this rank.
"""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager  # what FSDP calls

from workloads import collective_data as data
from workloads.collective_cases import of_all, own_share, reduced
from workloads.collective_data import Guarded, Payload
from workloads.gates import Reading, exact
from workloads.ranks import Ranks

SPREAD = 4  # tensors in one coalesced call, and collectives that run at once


def send_receive(ranks: Ranks, payload: Payload, distance: int) -> Iterable[Reading]:
    """Each rank sends to the rank `distance` further in the ring; all distances together cover all pairs."""
    to, sender = (ranks.rank + distance) % ranks.size, (ranks.rank - distance) % ranks.size
    out, sent = Guarded(payload.count, payload, ranks), data.send_buffer(payload, ranks)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, to), dist.P2POp(dist.irecv, out.view, sender)]
    )
    for work in works:
        work.wait()
    return out.readings(data.values(payload, ranks, sender))


def sub_groups(ranks: Ranks, payload: Payload, groups: list[dist.ProcessGroup]) -> Iterable[Reading]:
    """Even ranks and odd ranks reduce at the same time, each in their own group."""
    buffer = Guarded(payload.count, payload, ranks)
    buffer.view.copy_(data.values(payload, ranks, ranks.rank))
    dist.all_reduce(buffer.view, group=groups[ranks.rank % 2])
    members = range(ranks.rank % 2, ranks.size, 2)
    total = torch.stack([data.values(payload, ranks, rank) for rank in members]).sum(0)
    return buffer.readings(total)


def overlapping(ranks: Ranks) -> list[list[int]]:
    """The first half plus one rank and the second half plus one: the ranks in the middle are in both."""
    half, everyone = ranks.size // 2, list(range(ranks.size))
    return [everyone[: half + 1], everyone[max(0, half - 1) :]]


def overlapping_groups(ranks: Ranks, payload: Payload, groups: list[dist.ProcessGroup]) -> Iterable[Reading]:
    """Both groups reduce at the same time; a rank that is in both does so twice."""
    mine = [
        (members, group, Guarded(payload.count, payload, ranks))
        for members, group in zip(overlapping(ranks), groups, strict=True)
        if ranks.rank in members
    ]
    works = []
    for _, group, buffer in mine:
        buffer.view.copy_(data.values(payload, ranks, ranks.rank))
        works.append(dist.all_reduce(buffer.view, group=group, async_op=True))
    for work in reversed(works):
        work.wait()
    for members, _, buffer in mine:
        yield from buffer.readings(
            torch.stack([data.values(payload, ranks, rank) for rank in members]).sum(0)
        )


def in_flight(ranks: Ranks, payload: Payload) -> Iterable[Reading]:
    """Several all-reduces at once, waited for in reverse order, each with its own values."""
    trials = [Payload(count=payload.count + i, dtype=payload.dtype, trial=i) for i in range(SPREAD)]
    buffers = [Guarded(trial.count, trial, ranks) for trial in trials]
    works = []
    for trial, buffer in zip(trials, buffers, strict=True):
        buffer.view.copy_(data.values(trial, ranks, ranks.rank))
        works.append(dist.all_reduce(buffer.view, async_op=True))
    for work in reversed(works):
        work.wait()
    for trial, buffer in zip(trials, buffers, strict=True):
        yield from buffer.readings(reduced(trial, ranks, "sum"))


def coalesced(ranks: Ranks, payload: Payload) -> Iterable[Reading]:
    """Several tensors of different length in one coalesced call, as FSDP and DDP send them."""
    trials = [Payload(count=payload.count + i, dtype=payload.dtype, trial=i) for i in range(SPREAD)]

    def summed(out: torch.Tensor, sent: torch.Tensor) -> object:
        return dist.all_reduce(out.copy_(sent))

    yield from _coalesced(ranks, trials, summed, 1, lambda trial: reduced(trial, ranks, "sum"))
    yield from _coalesced(ranks, trials, dist.all_gather_into_tensor, ranks.size, lambda t: of_all(t, ranks))
    yield from _coalesced(ranks, trials, dist.reduce_scatter_tensor, 1, lambda t: own_share(t, ranks))


def _coalesced(
    ranks: Ranks,
    trials: list[Payload],
    call: Callable[[torch.Tensor, torch.Tensor], object],
    times: int,
    expected: Callable[[Payload], torch.Tensor],
) -> Iterable[Reading]:
    share = ranks.size if call is dist.reduce_scatter_tensor else 1
    outs = [Guarded(trial.count * times, trial, ranks) for trial in trials]
    sent = [data.send_buffer(trial, ranks, trial.count * share) for trial in trials]
    with _coalescing_manager():
        for out, tensor in zip(outs, sent, strict=True):
            call(out.view, tensor)
    for trial, out in zip(trials, outs, strict=True):
        yield from out.readings(expected(trial))


def keeps_input(ranks: Ranks, payload: Payload) -> Iterable[Reading]:
    """Out-of-place operations do not change what they send."""
    sent = data.send_buffer(payload, ranks, payload.count * ranks.size)
    before = sent.clone()
    whole = torch.empty(payload.count * ranks.size**2, dtype=sent.dtype, device=sent.device)
    dist.all_gather_into_tensor(whole, sent)
    yield exact(sent, before, name="all_gather's input")
    dist.reduce_scatter_tensor(torch.empty_like(sent[: payload.count]), sent)
    yield exact(sent, before, name="reduce_scatter's input")
