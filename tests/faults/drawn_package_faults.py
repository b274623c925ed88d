"""Faults of an architecture of transformers, drawn without its cases.

In: a seed. Out: faults, and the turn that finds each.

A fault strikes what one module of one architecture gives, or the gradient that it passes on, while one
condition of a case holds: a type, a kernel of attention, padding, packed sequences, a cache, a checkpoint.
What strikes the plain form too is not drawn: there the package is its own witness.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "acceptance"))

from workloads import generated, generated_transformers
from workloads import transformers_models as models

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workloads.generated_transformers import Case

CONDITIONS: tuple[tuple[str, Any], ...] = (
    ("dtype", torch.float32), ("dtype", torch.bfloat16), ("attention", "sdpa"), ("rows", "padded left"),
    ("rows", "padded right"), ("rows", "packed"), ("checkpoint", "reentrant"), ("items", True),
    ("masked", True), ("ignored", True), ("experts", "grouped_mm"), ("experts", "batched_mm"),
)  # fmt: skip
EFFECTS = ("lost", "a tenth more", "of its neighbour", "negative")


class Fault(NamedTuple):
    """What strikes: a module and a number by their places, in which direction, and while what holds."""

    arch: str
    place: float
    row: float
    number: float  # of a row
    backward: bool
    effect: str
    condition: tuple[str, Any]


def draw(seed: int, count: int, table: Sequence[str]) -> list[Fault]:
    """Faults of architectures of a table."""
    source = random.Random(f"package {seed}")
    return [
        Fault(
            source.choice(table), source.random(), source.random(), source.random(),
            source.random() < 1 / 3, source.choice(EFFECTS), source.choice(CONDITIONS),
        )
        for _ in range(count)
    ]  # fmt: skip


def struck(fault: Fault, given: torch.Tensor) -> torch.Tensor:
    """A tensor with one wrong number."""
    width = given.shape[-1]
    mask = torch.zeros(given.numel() // width, width, device=given.device)
    mask[int(fault.row * len(mask)), int(fault.number * width)] = 1
    mask = mask.view(given.shape)
    other = {"lost": 0 * given, "a tenth more": given * 1.1, "negative": -given}.get(fault.effect)
    return torch.where(mask.bool(), given.roll(1, -1) if other is None else other, given)


def under(fault: Fault, seed: int, number: int) -> tuple[float, str] | None:
    """What is said of a case with the fault planted; `None` if its condition does not hold in it."""
    hits, original = list[int](), generated_transformers.stepped

    def stepped(weights: Any, case: Case) -> Any:
        field, value = fault.condition
        given = weights[0].dtype
        if getattr(case, field) != value or given is torch.float64 or case.rows == "each alone":
            return original(weights, case)
        kind = torch.float32 if case.autocast else given
        whole = models.model(case.arch, case.sizes, case.attention, case.experts, kind)
        every = [one for one in whole.modules() if not list(one.children())]

        def hook(_module: Any, _args: Any, out: Any) -> Any:
            if not isinstance(out, torch.Tensor) or not out.is_floating_point() or out.dim() < 2:
                return out
            if not fault.backward:
                hits.append(1)
                return struck(fault, out)
            if out.requires_grad:
                hits.append(1)
                out.register_hook(lambda grad: struck(fault, grad))
            return out

        handle = every[int(fault.place * len(every))].register_forward_hook(hook)
        try:
            return original(weights, case)
        finally:
            handle.remove()

    with (
        mock.patch.object(generated_transformers, "stepped", stepped),
        mock.patch.object(generated, "SHRINKS", 0),
    ):
        said = generated._judge(("transformers", seed, number, "small"))[0]
    return said if hits else None


def turn(fault: Fault, seeds: Sequence[int]) -> tuple[int, int | None]:
    """In how many turns its condition held, and which was the first that found it."""
    touched = 0
    for n, seed in enumerate(seeds, 1):
        row = random.Random(f"{seed} 0").sample(models.table(), len(models.table())).index(fault.arch)
        said = under(fault, seed, row)
        touched += said is not None
        if said is not None and said[0] > 1:
            return touched, n
    return touched, None
