"""A torchrun program: every collective on exact data, checked on every rank. One JSON line from rank 0.

Arguments: --tier. The line is `{"cases": [{"name": "all_reduce: fp32 x 17", "failures": []}], "ranks": n}`.
"""

import argparse
import functools
import itertools
import json
from collections.abc import Iterator

import torch.distributed as dist

from workloads import backend
from workloads import collective_cases as collectives
from workloads.collective_data import Payload
from workloads.ranks import Book, CaseFunction, Ranks, joined

COUNTS = (1, 17, 4099)
MORE_COUNTS = (2, 127, 65_537, 1_048_579)
FLOATS = ("fp32", "bf16", "fp16")
# Gloo has no mean; every other name here works on both.
HAS_AVERAGE = {"nccl"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tier", default="smoke")
    tier = parser.parse_args().tier
    with joined() as ranks:
        book = Book(ranks)
        for op, name, function in cases(ranks, tier):
            book.judge(op, name, function)
        for payload in payloads(tier, FLOATS):
            found = collectives.all_reduce_normal(ranks, payload)
            book.same_everywhere("all_reduce", f"{payload} normal data, same bits on all ranks", *found)
        if (merged := book.merged()) is not None:
            print(json.dumps(merged), flush=True)


def payloads(tier: str, dtypes: tuple[str, ...]) -> Iterator[Payload]:
    """Odd counts, aligned and not; every one another trial."""
    counts = COUNTS if tier == "smoke" else COUNTS + MORE_COUNTS
    for trial, (dtype, count) in enumerate(itertools.product(dtypes, counts)):
        yield Payload(count=count, dtype=dtype, offset=trial % 2, trial=trial)


def cases(ranks: Ranks, tier: str) -> Iterator[tuple[str, str, CaseFunction]]:
    """(operation, case, function), in the same order on every rank."""
    for payload in payloads(tier, (*FLOATS, "int64")):
        for op in collectives.REDUCTIONS:
            yield (
                "all_reduce",
                f"{payload} {op}",
                functools.partial(collectives.all_reduce, ranks, payload, op),
            )
        yield from _of("reduce_scatter", collectives.reduce_scatter, ranks, payload)
    for payload in payloads(tier, (*FLOATS, "int64", "uint8")):
        yield from _of("all_gather", collectives.all_gather, ranks, payload)
        yield from _of("all_to_all", collectives.all_to_all, ranks, payload)
        yield from _of("all_to_all", collectives.all_to_all_uneven, ranks, payload)
    yield from _rooted(ranks)
    yield from _patterns(ranks, tier)


def _of(op: str, function: object, ranks: Ranks, payload: Payload) -> Iterator[tuple[str, str, CaseFunction]]:
    assert callable(function)
    uneven = " uneven" if function is collectives.all_to_all_uneven else ""
    yield op, f"{payload}{uneven}", functools.partial(function, ranks, payload)


def _rooted(ranks: Ranks) -> Iterator[tuple[str, str, CaseFunction]]:
    for root, dtype in itertools.product(range(ranks.size), FLOATS):
        payload = Payload(count=1031, dtype=dtype, trial=root)
        name = f"{payload} root {root}"
        yield "broadcast", name, functools.partial(collectives.broadcast, ranks, payload, root)
        yield "reduce", name, functools.partial(collectives.reduce, ranks, payload, root)


def _patterns(ranks: Ranks, tier: str) -> Iterator[tuple[str, str, CaseFunction]]:
    for distance, dtype in itertools.product(range(1, ranks.size), ("fp32", "bf16")):
        payload = Payload(count=4099, dtype=dtype, offset=1, trial=distance)
        call = functools.partial(collectives.send_receive, ranks, payload, distance)
        yield "send_receive", f"{payload} to rank + {distance}", call
    groups = [dist.new_group(list(range(first, ranks.size, 2))) for first in range(min(2, ranks.size))]
    for dtype in FLOATS:
        payload = Payload(count=4099, dtype=dtype)
        yield "sub_groups", str(payload), functools.partial(collectives.sub_groups, ranks, payload, groups)
        yield "in_flight", str(payload), functools.partial(collectives.in_flight, ranks, payload)
        yield "keeps_input", str(payload), functools.partial(collectives.keeps_input, ranks, payload)
    if tier != "smoke" and backend() == "nccl":
        payload = Payload(count=2**31 + 4099, dtype="bf16")
        large = functools.partial(collectives.all_reduce_large, ranks, payload)
        yield "all_reduce", f"{payload}, beyond 32 bits", large
    for dtype in FLOATS:
        payload = Payload(count=4099, dtype=dtype)
        if backend() in HAS_AVERAGE and ranks.size & (ranks.size - 1) == 0:
            average = functools.partial(collectives.all_reduce_average, ranks, payload)
            yield "all_reduce", f"{payload} average", average


if __name__ == "__main__":
    main()
