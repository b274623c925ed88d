"""Stand-ins for cases that a CPU cannot run. In: ranks and a payload. Out: readings, for the collective
mutants.

`fake_nccl` replaces the library, gloo's plain sum replaces its missing means and premultiplied sum, and small
arrays, compared in even smaller pieces, replace arrays beyond 32 bits.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import fake_nccl
from workloads import collective_bandwidth as bandwidth
from workloads import collective_cases as collectives
from workloads import collective_counts as counts
from workloads import collective_library as library
from workloads import collective_patterns as patterns
from workloads import collective_scaled
from workloads.collective_data import Payload
from workloads.gates import Reading
from workloads.ranks import Ranks

Run = Callable[[Ranks, Payload], Iterable[Any]]


def called_directly(op: str) -> Run:
    """The call that the bandwidth check times, on exact data."""

    def run(ranks: Ranks, payload: Payload) -> Iterable[Reading]:
        with fake_nccl.planted():
            made = bandwidth.bench(ranks, 1 << 16, direct=False)
            direct = library.Communicator(ranks, 0, library="libnccl.so.2")
        planned = library.plan(op, 2 * max(payload.count, 64), ranks.size)
        failures = bandwidth.proven(
            bandwidth.Bench(ranks, made.sent, made.received, made.barrier, direct), op, planned
        )
        direct.close()
        return (Reading("elements of the library's result", float(len(failures)), 0.0, "; ".join(failures)),)

    run.__name__ = f"{op}_busbw"
    return run


def _with_gloo(original: Callable[..., Any], out: torch.Tensor, *rest: Any, group: Any = None) -> None:
    """An operation that gloo lacks, as its plain sum. `rest` may hold what is sent, and the operation."""
    sent = [value for value in rest if isinstance(value, torch.Tensor)]
    op = next((value for value in rest if not isinstance(value, torch.Tensor)), dist.ReduceOp.SUM)
    if op == dist.ReduceOp.PREMUL_SUM:
        out.mul_(2)
    original(out, *sent, dist.ReduceOp.SUM, group=group)
    if op == dist.ReduceOp.AVG:
        out.div_(dist.get_world_size(group))


def scaled(run: Run) -> Run:
    """A case whose operation gloo lacks, computed with its sum, so that a mutant of that sum changes it."""

    def emulated(ranks: Ranks, payload: Payload) -> Iterable[Any]:
        names = ("all_reduce", "reduce_scatter_tensor")
        fakes = {name: functools.partial(_with_gloo, getattr(dist, name)) for name in names}
        with mock.patch.multiple(dist, **fakes):
            return tuple(run(ranks, payload))

    emulated.__name__ = "scaled_sums"
    return emulated


def beside_32(op: str) -> Run:
    """An operation at the counts around 32."""

    def run(ranks: Ranks, payload: Payload) -> Iterable[Reading]:
        return tuple(counts.around(ranks, counts.OPERATIONS[op], payload.dtype, 5))

    run.__name__ = "counts"
    return run


def group_of_one(ranks: Ranks, payload: Payload) -> Iterable[Any]:
    """Groups of one rank, with the means that gloo lacks."""
    groups = _groups(tuple((rank,) for rank in range(ranks.size)))
    return scaled(functools.partial(collective_scaled.group_of_one, groups=groups, means=True))(
        ranks, payload
    )


def in_pieces(run: Run) -> Run:
    """A case beyond 32 bits, on small arrays."""

    def small(ranks: Ranks, payload: Payload) -> Iterable[Any]:
        with mock.patch.object(collectives, "PIECE", 8):
            return tuple(run(ranks, payload))

    small.__name__ = run.__name__.removesuffix("_large")
    return small


@functools.cache
def _groups(members: tuple[tuple[int, ...], ...]) -> list[Any]:
    return [dist.new_group(list(ranks)) for ranks in members]


def sub_groups(ranks: Ranks, payload: Payload) -> Iterable[Any]:
    """Groups without common ranks."""
    return patterns.sub_groups(ranks, payload, _groups(((0,), (1,))))


def overlapping_groups(ranks: Ranks, payload: Payload) -> Iterable[Any]:
    """Groups with common ranks."""
    groups = _groups(tuple(tuple(members) for members in patterns.overlapping(ranks)))
    return patterns.overlapping_groups(ranks, payload, groups)
