"""A torchrun program: every collective on exact data, checked on every rank. In: --tier. Out: a JSON line.

The line is `{"cases": [{"name": "all_reduce: fp32 x 17", "failures": []}], "ranks": n, "repeats": null or
[...], "nvls": state}`; `repeats` is as `repeated` makes it. With --repeats, the line has `repeats` and `nvls`
alone; with --groups it is that of `collective_groups`.
"""

import argparse
import functools
import itertools
import json
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from workloads import backend, collective_counts, collective_groups, nccl_log, operands, sharded_gradients
from workloads import collective_cases as collectives
from workloads import collective_patterns as patterns
from workloads import collective_scaled as scaled
from workloads.collective_data import DTYPES, Payload
from workloads.gates import bits
from workloads.ranks import Book, CaseFunction, Ranks, joined

Named = tuple[str, str, CaseFunction]  # operation, case, function
COUNTS = (1, 17, 4099)
FLOATS = ("fp32", "bf16", "fp16")
# Operations that gloo does not have (torch's table of backends); both backends have all others.
LACKS = {"gloo": {"average", "premultiplied sum"}, "nccl": set[str]()}

REPEATS = 50
REPEATED_KINDS = ("fp16", "bf16")
REPEATED_BYTES = {"cuda": 8 << 20, "cpu": 64 << 10}
REPEATED = ("all_reduce", "reduce_scatter")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tier", default="smoke")
    parser.add_argument("--repeats", action="store_true")
    parser.add_argument("--groups", action="store_true")
    options = parser.parse_args()
    if options.groups:
        with joined() as ranks:  # it is closed when the first of its worlds begins
            pass
        report = collective_groups.run(ranks, options.tier)
    else:
        report = sums_again() if options.repeats else everything(options.tier)
    if report is not None:
        print(json.dumps(report), flush=True)


def sums_again() -> dict[str, Any] | None:
    """The repeated sums alone; None on ranks but the first."""
    with joined() as ranks:
        found = {"repeats": repeated(ranks), "nvls": nccl_log.nvls()}
    return found if ranks.rank == 0 else None


def everything(tier: str) -> dict[str, Any] | None:
    """All cases of a tier; None on ranks but the first."""
    with joined() as ranks:
        book = Book(ranks)
        for op, name, function in cases(ranks, tier):
            book.judge(op, name, function)
        for payload in payloads(tier, FLOATS):
            found = collectives.all_reduce_normal(ranks, payload)
            book.same_everywhere("all_reduce", f"{payload} normal data, same bits on all ranks", *found)
        merged = book.merged()
        extra = {"repeats": repeated(ranks) if tier != "smoke" else None, "nvls": nccl_log.nvls()}
    return {**(merged or {}), **extra} if ranks.rank == 0 else None


def payloads(tier: str, dtypes: tuple[str, ...]) -> Iterator[Payload]:
    """Odd counts, aligned and not; every payload is another trial."""
    counts = COUNTS if tier == "smoke" else COUNTS + collective_counts.MORE
    for trial, (dtype, count) in enumerate(itertools.product(dtypes, counts)):
        yield Payload(count=count, dtype=dtype, offset=trial % 2, trial=trial)


def cases(ranks: Ranks, tier: str) -> Iterator[Named]:
    """The cases of a tier, in the same order on every rank."""
    for payload in payloads(tier, (*FLOATS, "int64")):
        for op in collectives.REDUCTIONS:
            call = functools.partial(collectives.all_reduce, ranks, payload, op)
            yield "all_reduce", f"{payload} {op}", call
        yield "reduce_scatter", str(payload), functools.partial(collectives.reduce_scatter, ranks, payload)
    for payload in payloads(tier, (*FLOATS, "int64", "uint8")):
        yield "all_gather", str(payload), functools.partial(collectives.all_gather, ranks, payload)
        yield "all_to_all", str(payload), functools.partial(collectives.all_to_all, ranks, payload)
        uneven = functools.partial(collectives.all_to_all_uneven, ranks, payload)
        yield "all_to_all", f"{payload} uneven", uneven
    yield from _rooted(ranks)
    yield from _patterns(ranks, tier)


def _rooted(ranks: Ranks) -> Iterator[Named]:
    operations = (collectives.broadcast, collectives.reduce, collectives.scatter, collectives.gather)
    for root, dtype in itertools.product(range(ranks.size), FLOATS):
        payload = Payload(count=1031, dtype=dtype, trial=root)
        for function in operations:
            call = functools.partial(function, ranks, payload, root)
            yield function.__name__, f"{payload} root {root}", call


def _patterns(ranks: Ranks, tier: str) -> Iterator[Named]:
    for distance, dtype in itertools.product(range(1, ranks.size), ("fp32", "bf16")):
        payload = Payload(count=4099, dtype=dtype, offset=1, trial=distance)
        call = functools.partial(patterns.send_receive, ranks, payload, distance)
        yield "send_receive", f"{payload} to rank + {distance}", call
    apart = [dist.new_group(list(range(first, ranks.size, 2))) for first in range(min(2, ranks.size))]
    sharing = [dist.new_group(members) for members in patterns.overlapping(ranks)]
    for dtype in FLOATS:
        payload = Payload(count=4099, dtype=dtype)
        yield "sub_groups", str(payload), functools.partial(patterns.sub_groups, ranks, payload, apart)
        both = functools.partial(patterns.overlapping_groups, ranks, payload, sharing)
        yield "sub_groups", f"{payload} overlapping", both
        for function in (patterns.in_flight, patterns.coalesced, patterns.keeps_input):
            yield function.__name__, str(payload), functools.partial(function, ranks, payload)
    yield from _scaled(ranks)
    if tier != "smoke":
        yield from _around_powers(ranks)
        yield from _alone(ranks)
        for name, gradients in sharded_gradients.cases(ranks):
            yield "used_twice", name, gradients
    if tier != "smoke" and backend() == "nccl":
        yield from _large(ranks)


def _scaled(ranks: Ranks) -> Iterator[Named]:
    lacking = LACKS[backend()]
    for dtype in FLOATS:
        payload = Payload(count=4099, dtype=dtype)
        if "premultiplied sum" not in lacking and dtype != "bf16":  # older releases refuse it in bf16
            call = functools.partial(scaled.all_reduce_premultiplied, ranks, payload)
            yield "all_reduce_scaled", f"{payload} premultiplied", call
        if "average" not in lacking:
            for function in (scaled.all_reduce_average, scaled.reduce_scatter_average):
                call = functools.partial(function, ranks, payload)
                yield "all_reduce_scaled", f"{payload} {function.__name__}", call


def _around_powers(ranks: Ranks) -> Iterator[Named]:
    powers = range(collective_counts.LARGEST[ranks.device.type] + 1)
    for op, run in collective_counts.operations(ranks).items():
        for dtype, power in itertools.product(collective_counts.DTYPES, powers):
            call = functools.partial(collective_counts.around, ranks, run, dtype, power)
            yield "counts", f"{op} {dtype} around 2^{power}", call


def _alone(ranks: Ranks) -> Iterator[Named]:
    groups = [dist.new_group([rank]) for rank in range(ranks.size)]
    run = functools.partial(scaled.group_of_one, groups=groups, means="average" not in LACKS[backend()])
    powers = range(collective_counts.LARGEST[ranks.device.type] + 1)
    for dtype, power in itertools.product(FLOATS, powers):
        call = functools.partial(collective_counts.around, ranks, run, dtype, power)
        yield "group_of_one", f"{dtype} around 2^{power}", call


def _large(ranks: Ranks) -> Iterator[Named]:
    payload = Payload(count=2**31 + 4099, dtype="bf16")
    call = functools.partial(collectives.all_reduce_large, ranks, payload)
    yield "all_reduce", f"{payload}, beyond 32 bits", call
    payload = Payload(count=2**31 // ranks.size + 4099, dtype="uint8")
    call = functools.partial(collectives.all_gather_large, ranks, payload)
    yield "all_gather", f"{payload} from each rank, beyond 32 bits", call


def repeated(ranks: Ranks) -> list[dict[str, Any]] | None:
    """The same reduction on the same data, many times: `{"op", "dtype", "bytes", "repeats", "different"}`.

    A sum of floating-point numbers depends on its order. A library that changes the order from call to call
    makes runs that cannot be repeated (NVIDIA/nccl#1497). Where a switch adds (multicast), the order is the
    switch's. Rank 0 has the worst rank's figures.
    """
    mine = [_figure(ranks, op, dtype) for op in REPEATED for dtype in REPEATED_KINDS]
    everyone = ranks.collect(mine, about="repeats")
    if everyone is None:
        return None
    return [max(same, key=lambda figure: figure["different"]) for same in zip(*everyone, strict=True)]


def _figure(ranks: Ranks, op: str, dtype: str) -> dict[str, Any]:
    size, kind = REPEATED_BYTES[ranks.device.type], DTYPES[dtype]
    sent = operands.normal(size // kind.itemsize // ranks.size * ranks.size, dtype=kind, seed=1 + ranks.rank)
    first = bits(_once(op, sent, ranks))
    different = torch.zeros((), dtype=torch.int64, device=ranks.device)
    for _ in range(REPEATS - 1):
        different += (bits(_once(op, sent, ranks)) != first).any()
    return {"op": op, "dtype": dtype, "bytes": size, "repeats": REPEATS, "different": int(different)}


def _once(op: str, sent: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    if op == "all_reduce":
        out = sent.clone()
        dist.all_reduce(out)
        return out
    share = torch.empty_like(sent[: sent.numel() // ranks.size])
    dist.reduce_scatter_tensor(share, sent)
    return share


if __name__ == "__main__":
    main()
