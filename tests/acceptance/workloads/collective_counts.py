"""Every collective at the counts around a power of two. In: ranks, an operation, a dtype, a power. Out:
readings of this rank.

A library chooses its algorithm, its protocol and its channels by size, and splits arrays into pieces of a
power of two. What goes wrong at such an edge goes wrong there, or a few elements beside it.
"""

import dataclasses
from collections.abc import Callable, Iterable

from workloads import collective_cases as collectives
from workloads import collective_patterns as patterns
from workloads.collective_data import Payload
from workloads.gates import Reading
from workloads.ranks import Ranks

BESIDE = (-3, -1, 0, 1, 3)
DTYPES = ("fp32", "bf16")
MORE = (2, 127, 65_537, 1_048_579)  # what each operation carries beside the counts of the smoke tier
# The largest power: on a GPU 16 MiB of float32, from where the largest protocol and all channels are in use.
LARGEST = {"cuda": 22, "cpu": 8}
Operation = Callable[[Ranks, Payload], Iterable[Reading]]


def _root(ranks: Ranks, payload: Payload) -> int:
    return payload.count % ranks.size


def _next(ranks: Ranks, payload: Payload) -> Iterable[Reading]:
    return patterns.send_receive(ranks, payload, 1)


OPERATIONS: dict[str, Operation] = {
    "all_reduce": collectives.all_reduce,
    "all_gather": collectives.all_gather,
    "reduce_scatter": collectives.reduce_scatter,
    "all_to_all": collectives.all_to_all,
    "broadcast": lambda ranks, payload: collectives.broadcast(ranks, payload, _root(ranks, payload)),
    "reduce": lambda ranks, payload: collectives.reduce(ranks, payload, _root(ranks, payload)),
    "scatter": lambda ranks, payload: collectives.scatter(ranks, payload, _root(ranks, payload)),
    "gather": lambda ranks, payload: collectives.gather(ranks, payload, _root(ranks, payload)),
    "send_receive": _next,
}


def operations(ranks: Ranks) -> dict[str, Operation]:
    """A rank alone has nobody to send to."""
    return {name: run for name, run in OPERATIONS.items() if ranks.size > 1 or name != "send_receive"}


def counts(power: int) -> list[int]:
    """The power of two and its neighbours, without zero."""
    return sorted({count for step in BESIDE if (count := 2**power + step) > 0})


def around(ranks: Ranks, run: Operation, dtype: str, power: int) -> Iterable[Reading]:
    """The readings of one operation at each count, named by the count; every second one is off alignment."""
    for number, count in enumerate(counts(power)):
        payload = Payload(count=count, dtype=dtype, offset=number % 2, trial=power)
        for reading in run(ranks, payload):
            yield dataclasses.replace(reading, gate=f"{payload}: {reading.gate}")
