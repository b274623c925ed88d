"""Every mutant of a collective in one torchrun. In: nothing. Out: one JSON line {"mutant": {"failing": cases,
"check": the check that has to catch it}}.

The mutant runs on rank 1 or on all ranks, around the real operation, so that no rank waits for ever.
"""

import functools
import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from workloads import collective_cases as collectives
from workloads.collective_data import Payload
from workloads.ranks import Book, Ranks, joined

PAYLOADS = (Payload(count=17), Payload(count=4099, dtype="bf16", offset=1, trial=1))
Run = Callable[..., Any]


def skips(original: Run, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Takes part, and keeps its own values."""
    mine = tensor.clone()
    work = original(tensor, *args, **kwargs)
    tensor.copy_(mine)
    return work


def after(change: Callable[[torch.Tensor], object]) -> Callable[..., Any]:
    """Change the output once the operation has ended."""

    def mutant(original: Run, out: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        work = original(out, *args, **kwargs)
        change(out)
        return work

    return mutant


def beyond(out: torch.Tensor) -> None:
    torch.as_strided(out, (1,), (1,), out.storage_offset() + out.numel()).zero_()


def keeps_last(original: Run, out: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """The last element of the output is never written."""
    last = out[-1].clone()
    work = original(out, *args, **kwargs)
    out[-1] = last
    return work


def spoils_input(original: Run, out: torch.Tensor, sent: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    work = original(out, sent, *args, **kwargs)
    sent[0] += 1
    return work


def flip_last_bit(out: torch.Tensor) -> None:
    if out.dtype == torch.float32:
        out.view(torch.int32)[-1] ^= 1


def swap_halves(out: torch.Tensor) -> None:
    half = out.numel() // 2
    out.copy_(torch.cat((out[half:].clone(), out[:half].clone())))


# name: (attribute of torch.distributed, case that must fail, mutant); only rank 1 misbehaves
MUTANTS: dict[str, tuple[str, Callable[..., Iterable[Any]], Callable[..., Any]]] = {
    "a rank skips the reduction": ("all_reduce", collectives.all_reduce, skips),
    "one element of the sum is wrong": ("all_reduce", collectives.all_reduce, after(lambda o: o[7].add_(1))),
    "the sum writes past its end": ("all_reduce", collectives.all_reduce, after(beyond)),
    "the sum's output is truncated": ("all_reduce", collectives.all_reduce, keeps_last),
    "the sum holds a NaN": ("all_reduce", collectives.all_reduce, after(lambda o: o[0].fill_(float("nan")))),
    "gathered in the wrong order": ("all_gather_into_tensor", collectives.all_gather, after(swap_halves)),
    "gathered output is truncated": ("all_gather_into_tensor", collectives.all_gather, keeps_last),
    "gathering spoils its input": ("all_gather_into_tensor", collectives.keeps_input, spoils_input),
    "a scattered element is wrong": (
        "reduce_scatter_tensor",
        collectives.reduce_scatter,
        after(lambda o: o[3].add_(1)),
    ),
    "a scattered output is truncated": ("reduce_scatter_tensor", collectives.reduce_scatter, keeps_last),
    "exchanged shares are swapped": ("all_to_all_single", collectives.all_to_all, after(swap_halves)),
    "an uneven exchange is truncated": ("all_to_all_single", collectives.all_to_all_uneven, keeps_last),
    "a broadcast misses its last element": (
        "broadcast",
        functools.partial(collectives.broadcast, root=0),
        keeps_last,
    ),
}

# Operations whose check is not called after them.
PROVES = {"keeps_input": "test_collectives_keep_their_input", "in_flight": "test_collectives_in_flight"}

ROUNDS = iter(range(1000))


def judge(ranks: Ranks, run: Callable[..., Iterable[Any]] | None) -> int | None:
    """Failing cases over all ranks, on rank 0; without `run` those of normal data, bit by bit."""
    store = dist.PrefixStore(str(next(ROUNDS)), ranks.store)
    book = Book(Ranks(ranks.rank, ranks.size, ranks.device, store))
    for payload in PAYLOADS:
        if run is None:
            book.same_everywhere("bits", str(payload), *collectives.all_reduce_normal(ranks, payload))
        else:
            book.judge("mutant", str(payload), functools.partial(run, ranks, payload))
    merged = book.merged()
    return merged and sum(bool(case["failures"]) for case in merged["cases"])


def main() -> None:
    with joined() as ranks:
        runs = dict.fromkeys((run for _, run, _ in MUTANTS.values()), 0)
        found = {
            f"healthy {number}": told(judge(ranks, run), run) for number, run in enumerate((*runs, None))
        }
        for name, (attribute, run, mutate) in MUTANTS.items():
            found[name] = told(planted(ranks, attribute, mutate, run), run)
        differ = planted(ranks, "all_reduce", after(flip_last_bit), None)
        found["ranks differ by one bit"] = told(differ, None)
        if not ranks.rank:
            sys.stdout.write(json.dumps(found) + "\n")


def told(cases: int | None, run: Callable[..., Iterable[Any]] | None) -> dict[str, Any]:
    """The check of the suite is named after its operation."""
    operation = getattr(getattr(run, "func", run), "__name__", "all_reduce").removesuffix("_uneven")
    check = PROVES.get(operation, f"test_{operation}_values")
    return {"failing": cases, "check": f"test_collectives.py::{check}"}


def planted(
    ranks: Ranks,
    attribute: str,
    mutate: Callable[..., Any],
    run: Callable[..., Iterable[Any]] | None,
) -> int | None:
    """Judge with the mutant in place on rank 1."""
    original = getattr(dist, attribute)
    if ranks.rank == 1:
        setattr(dist, attribute, functools.partial(mutate, original))
    try:
        return judge(ranks, run)
    finally:
        setattr(dist, attribute, original)


if __name__ == "__main__":
    main()
