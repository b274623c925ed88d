"""Every mutant of a collective in one torchrun. In: nothing. Out: one JSON line {"mutant": {"failing": cases,
"check": the check that has to catch it}}.

A mutant wraps the real operation on rank 1 or on all ranks, so that no rank waits forever.
"""

# ruff: noqa: E501 - a table of faults reads in rows
import functools
import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

import collective_runs as runs
from workloads import collective_cases as collectives
from workloads import collective_patterns as patterns
from workloads import collective_scaled as scaled
from workloads.collective_data import Payload
from workloads.ranks import Book, Ranks, joined

PAYLOADS = (Payload(count=17), Payload(count=4099, dtype="bf16", offset=1, trial=1))
Run = Callable[..., Any]


def skips(original: Run, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Takes part in the operation, but keeps its own values."""
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


def spoils_what_it_sends(
    original: Run, out: torch.Tensor, sent: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """The data change on the way; the buffer they came from does not."""
    return original(out, torch.cat((sent[:1] + 1, sent[1:])), *args, **kwargs)


def cuts_message(original: Run, operations: list[Any]) -> list[Any]:
    for work in original(operations):
        work.wait()  # gloo would wait forever the second time
    for operation in operations:
        if operation.op is dist.irecv:
            operation.tensor[-1] = 0
    return []


def cuts_first_part(original: Run, tensor: torch.Tensor, parts: Any, *args: Any) -> Any:
    work = original(tensor, parts, *args)
    if parts:
        parts[0][-1] = 0
    return work


def ends_early(original: Run, out: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """An operation still writes after the wait for it returned."""
    work = original(out, *args, **kwargs)
    work.wait()
    out[0] += 1
    return work


add_one = after(lambda out: out[-1].add_(1))


def at_33(mutate: Callable[..., Any], tensor: Callable[..., Any]) -> Callable[..., Any]:
    """Misbehave only at one element more than 32, of which two ranks may gather 66."""

    def mutant(original: Run, *args: Any, **kwargs: Any) -> Any:
        found = tensor(*args)
        if found is not None and found.numel() in {33, 66}:
            return mutate(original, *args, **kwargs)
        return original(*args, **kwargs)

    return mutant


def first(out: torch.Tensor, *_: Any) -> torch.Tensor:
    return out


def first_part(_sent: torch.Tensor, parts: Any, *_: Any) -> torch.Tensor | None:
    return parts[0] if parts else None


def first_message(operations: list[Any]) -> torch.Tensor:
    found: torch.Tensor = operations[0].tensor
    return found


def loses_end_alone(original: Run, out: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """A group of one loses its last elements."""
    work = original(out, *args, **kwargs)
    if dist.get_world_size(kwargs.get("group")) == 1:
        out[-8:] = 0
    return work


# name: (attribute of torch.distributed, case that must fail, mutant); only rank 1 misbehaves
MUTANTS: dict[str, tuple[str, Callable[..., Iterable[Any]], Callable[..., Any]]] = {
    "a rank skips the reduction": ("all_reduce", collectives.all_reduce, skips),
    "one element of the sum is wrong": ("all_reduce", collectives.all_reduce, after(lambda o: o[7].add_(1))),
    "the sum writes past its end": ("all_reduce", collectives.all_reduce, after(beyond)),
    "the sum's output is truncated": ("all_reduce", collectives.all_reduce, keeps_last),
    "the sum holds a NaN": ("all_reduce", collectives.all_reduce, after(lambda o: o[0].fill_(float("nan")))),
    "gathered in the wrong order": ("all_gather_into_tensor", collectives.all_gather, after(swap_halves)),
    "gathered output is truncated": ("all_gather_into_tensor", collectives.all_gather, keeps_last),
    "gathering spoils its input": ("all_gather_into_tensor", patterns.keeps_input, spoils_input),
    "a scattered element is wrong": ("reduce_scatter_tensor", collectives.reduce_scatter, after(lambda o: o[3].add_(1))),
    "a scattered output is truncated": ("reduce_scatter_tensor", collectives.reduce_scatter, keeps_last),
    "exchanged shares are swapped": ("all_to_all_single", collectives.all_to_all, after(swap_halves)),
    "an uneven exchange is truncated": ("all_to_all_single", collectives.all_to_all_uneven, keeps_last),
    "a broadcast misses its last element": ("broadcast", functools.partial(collectives.broadcast, root=0), keeps_last),
    "the sum at the root is wrong": ("reduce", functools.partial(collectives.reduce, root=1), add_one),
    "a scattered share is truncated": ("scatter", functools.partial(collectives.scatter, root=0), keeps_last),
    "a gathered share is truncated": ("gather", functools.partial(collectives.gather, root=1), cuts_first_part),
    "a message loses its end": ("batch_isend_irecv", functools.partial(patterns.send_receive, distance=1), cuts_message),
    "a group's sum is wrong": ("all_reduce", runs.sub_groups, add_one),
    "a group that shares ranks sums wrong": ("all_reduce", runs.overlapping_groups, ends_early),
    "an operation in flight ends late": ("all_reduce", patterns.in_flight, ends_early),
    "a coalesced tensor is spoilt": ("all_gather_into_tensor", patterns.coalesced, spoils_what_it_sends),
    "a coalesced share is spoilt": ("reduce_scatter_tensor", patterns.coalesced, spoils_what_it_sends),
    "a mean is not one": ("all_reduce", runs.scaled(scaled.all_reduce_average), add_one),
    "a premultiplied sum is off": ("all_reduce", runs.scaled(scaled.all_reduce_premultiplied), add_one),
    "a scattered mean is not one": ("reduce_scatter_tensor", runs.scaled(scaled.reduce_scatter_average), add_one),
    "a group of one loses its end": ("all_reduce", runs.group_of_one, loses_end_alone),
    "a scattering group of one loses its end": ("reduce_scatter_tensor", runs.group_of_one, loses_end_alone),
    **{
        f"{op} is wrong at 33": (attribute, runs.beside_32(op), at_33(mutate, tensor))
        for op, (attribute, mutate, tensor) in {
            "all_reduce": ("all_reduce", add_one, first),
            "all_gather": ("all_gather_into_tensor", keeps_last, first),
            "reduce_scatter": ("reduce_scatter_tensor", keeps_last, first),
            "all_to_all": ("all_to_all_single", keeps_last, first),
            "broadcast": ("broadcast", add_one, first),
            "reduce": ("reduce", add_one, first),
            "scatter": ("scatter", add_one, first),
            "gather": ("gather", cuts_first_part, first_part),
            "send_receive": ("batch_isend_irecv", cuts_message, first_message),
        }.items()
    },
    "a huge sum is wrong at its end": ("all_reduce", runs.in_pieces(collectives.all_reduce_large), add_one),
    "a huge array is gathered wrong": ("all_gather_into_tensor", runs.in_pieces(collectives.all_gather_large), add_one),
    "the measured sum is wrong": ("all_reduce", runs.called_directly("all_reduce"), add_one),
    "the measured gathering is wrong": ("all_gather_into_tensor", runs.called_directly("all_gather"), after(swap_halves)),
    "the measured scattering is wrong": ("reduce_scatter_tensor", runs.called_directly("reduce_scatter"), add_one),
    "the measured exchange is wrong": ("batch_isend_irecv", runs.called_directly("all_to_all"), cuts_message),
}  # fmt: skip

# Operations whose check is not called after them.
PROVES = {
    "keeps_input": "test_collectives_keep_their_input", "in_flight": "test_collectives_in_flight",
    "coalesced": "test_coalesced_collectives", "scaled_sums": "test_scaled_sums",
    "counts": "test_counts_around_powers_of_two", "group_of_one": "test_group_of_one",
    "sub_groups": "test_sub_group_values", "overlapping_groups": "test_sub_group_values",
}  # fmt: skip

ROUNDS = iter(range(1000))


def judge(ranks: Ranks, run: Callable[..., Iterable[Any]] | None) -> int | None:
    """The number of failing cases over all ranks, on rank 0; without `run`, those of normal data, bitwise."""
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
        healthy = (*dict.fromkeys(run for _, run, _ in MUTANTS.values()), None)
        found = {f"healthy {number}": told(judge(ranks, run), run) for number, run in enumerate(healthy)}
        for name, (attribute, run, mutate) in MUTANTS.items():
            found[name] = told(planted(ranks, attribute, mutate, run), run)
        differ = planted(ranks, "all_reduce", after(flip_last_bit), None)
        found["ranks differ by one bit"] = told(differ, None)
        if not ranks.rank:
            sys.stdout.write(json.dumps(found) + "\n")


def told(cases: int | None, run: Callable[..., Iterable[Any]] | None) -> dict[str, Any]:
    """The check of the suite is named after its operation."""
    operation = getattr(getattr(run, "func", run), "__name__", "all_reduce").removesuffix("_uneven")
    if operation.endswith("_busbw"):
        return {"failing": cases, "check": f"test_collective_speed.py::test_{operation}"}
    check = PROVES.get(operation, f"test_{operation}_values")
    return {"failing": cases, "check": f"test_collectives.py::{check}"}


def planted(
    ranks: Ranks, attribute: str, mutate: Callable[..., Any], run: Callable[..., Iterable[Any]] | None
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
