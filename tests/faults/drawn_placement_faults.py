"""Faults of placements that nobody chose: place, operators and effect, drawn from a seed.

In: seeds and numbers of faults and of cases. Out: one JSON line {"healthy": failing cases, "named": faults of
known shapes, "faults": {fault: {"hits", "case": number of the first that fails, or null, "says"}}, "hung"}.

A program of two gloo ranks. A fault wraps functions of torch and knows nothing of what judges. It strikes on
every rank, or on the last one alone.
"""

import argparse
import contextlib
import functools
import json
import random
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _api, _dispatch, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from workloads import generated_operators as operators
from workloads import generated_placement_cases as cases
from workloads import generated_placements as generated
from workloads.collective_groups import Watch, watched
from workloads.generated_trees import is_number
from workloads.ranks import joined


def last(out: torch.Tensor) -> torch.Tensor:
    return torch.tensor([len(out) - 1], device=out.device)


PARTS = 4  # of all operators, by a hash of their names; a fault strikes one, or all
# What an operator's rule may say wrongly of a result's placement.
RULES: dict[str, Callable[[Any], Any]] = {
    "a part is taken for the whole": lambda one: Replicate() if isinstance(one, Partial) else one,
    "a shard is taken for the whole": lambda one: Replicate() if isinstance(one, Shard) else one,
    "the whole is taken for a part": lambda one: Partial() if isinstance(one, Replicate) else one,
    "another dimension": lambda one: Shard(1 - one.dim) if isinstance(one, Shard) and one.dim < 2 else one,
    "a sum is taken for a mean": lambda one: Partial("avg") if one == Partial() else one,
    "a maximum is taken for a sum": lambda one: Partial() if one == Partial("max") else one,
}
# What bringing a tensor elsewhere may do wrongly: what arrives, and what was there before -> what arrives.
BRINGING: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "its last row is lost": lambda out, _: out.index_fill(0, last(out), 0) if out.dim() and len(out) else out,
    "its rows are turned": lambda out, _: out.flip(0) if out.dim() else out,
    "nothing is summed": lambda out, old: old.clone() if out.shape == old.shape else out,
    "it is rounded to bfloat16": lambda out, _: out.bfloat16().to(out.dtype) if is_number(out) else out,
    "it is a hundredth too large": lambda out, _: out * 1.01 if is_number(out) else out,
    "it is zero": lambda out, _: torch.zeros_like(out),
}
WHICH = {
    "a part": lambda one, _: isinstance(one, Partial),
    "an even shard": lambda one, shape: isinstance(one, Shard) and shape[one.dim] % 2 == 0,
    "an uneven shard": lambda one, shape: isinstance(one, Shard) and shape[one.dim] % 2 == 1,
    "the whole": lambda one, _: isinstance(one, Replicate),
}
BRINGS = (_dispatch, _redistribute, _api)
CHANGED = {"in place": "the operand stays as it was", "a leaf's gradient": "it is this rank's own"}


@dataclass(frozen=True)
class Fault:
    """Where it is, what of it, and how."""

    place: str
    part: str
    effect: str
    everywhere: bool = True

    def __str__(self) -> str:
        return f"{self.place}, {self.part}: {self.effect}{'' if self.everywhere else ', on the last rank'}"


NAMED = (
    Fault("bringing", "a part", "nothing is summed"),
    Fault("bringing", "an uneven shard", "its last row is lost"),
    Fault("a rule", "all", "a part is taken for the whole"),
    Fault("a rule", "all", "a shard is taken for the whole"),
    Fault("a leaf's gradient", "all", CHANGED["a leaf's gradient"]),
    Fault("in place", "all", CHANGED["in place"]),
)


def draw(count: int, seed: int) -> list[Fault]:
    """Faults of one seed, no two alike."""
    r, found = random.Random(f"placement faults {seed}"), dict[Fault, None]()
    while len(found) < count:
        if r.random() < 0.5:
            one = Fault("a rule", r.choice(("all", *map(str, range(PARTS)))), r.choice(tuple(RULES)))
        else:
            one = Fault("bringing", r.choice(tuple(WHICH)), r.choice(tuple(BRINGING)), r.random() < 0.5)
        found[one] = None
    return list(found)


def changing() -> list[Any]:
    """The operators that have a form in place."""
    return [one for one in operators.table().values() if one.inplace_variant]


class Planted:
    """A fault in place of functions of torch."""

    def __init__(self, fault: Fault, *, last: bool) -> None:
        self.fault, self.hits, self.strikes = fault, 0, fault.everywhere or last

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        rules = DTensor._op_dispatcher.sharding_propagator
        places: dict[str, tuple[tuple[Any, str, Callable[..., Any]], ...]] = {
            "a rule": ((rules, "propagate_op_sharding", self.rule),),
            "bringing": tuple((one, "redistribute_local_tensor", self.bringing) for one in BRINGS),
            "in place": tuple((one, "inplace_variant", self.in_place) for one in changing()),
            "a leaf's gradient": ((torch.autograd, "grad", self.own),),
        }
        with contextlib.ExitStack() as stack:
            for owner, name, function in places[self.fault.place]:
                planted = functools.partial(function, getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, planted))
            yield

    def rule(self, original: Any, schema: Any) -> Any:
        """Another placement of a result than that which it has."""
        found = original(schema)
        if self.fault.part not in ("all", str(zlib.crc32(str(schema.op).encode()) % PARTS)):
            return found
        specs = found.output_spec
        if isinstance(specs, DTensorSpec):
            return replace(found, output_spec=self._wrong(specs))
        if isinstance(specs, tuple | list):
            wrong = tuple(self._wrong(one) if isinstance(one, DTensorSpec) else one for one in specs)
            return replace(found, output_spec=wrong)
        return found

    def _wrong(self, spec: DTensorSpec) -> DTensorSpec:
        placements = tuple(RULES[self.fault.effect](one) for one in spec.placements)
        beyond = any(isinstance(one, Shard) and one.dim >= spec.ndim for one in placements)
        if placements == spec.placements or beyond:
            return spec
        self.hits += 1
        return DTensorSpec(spec.mesh, placements, tensor_meta=spec.tensor_meta)

    def bringing(self, original: Any, local: torch.Tensor, now: Any, then: Any, **how: Any) -> torch.Tensor:
        """A tensor arrives otherwise than it was."""
        out = original(local, now, then, **how)
        shape, pairs = now.shape, zip(now.placements, then.placements, strict=True)
        if self.strikes and any(one != other and WHICH[self.fault.part](one, shape) for one, other in pairs):
            self.hits += 1
            return BRINGING[self.fault.effect](out, local)
        return out

    def in_place(self, original: Any, one: torch.Tensor, *a: Any, **k: Any) -> Any:
        """The change goes to a copy."""
        self.hits += isinstance(one, DTensor)
        return original(one.clone() if isinstance(one, DTensor) else one, *a, **k)

    def own(self, original: Any, *a: Any, **k: Any) -> Any:
        """Gradients that are parts of a sum are taken for the whole."""
        found = original(*a, **k)
        self.hits += any(is_part(one) for one in found)
        return [whole(one) if is_part(one) else one for one in found]


def is_part(one: Any) -> bool:
    return isinstance(one, DTensor) and any(isinstance(each, Partial) for each in one.placements)


def whole(one: DTensor) -> DTensor:
    return DTensor.from_local(one.to_local(), one.device_mesh, [Replicate()] * one.device_mesh.ndim)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=0)
    parser.add_argument("--fault-seed", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=120)
    options = parser.parse_args()
    named = [str(fault) for fault in NAMED]
    report: dict[str, Any] = {"healthy": [], "named": named, "faults": {}, "hung": None}
    with joined() as ranks, contextlib.ExitStack() as stack:
        watch = Watch(time.monotonic() + 60, report)
        stack.enter_context(watched(ranks, watch, report))
        judge = generated.Judge(ranks, watch)
        drawn = [cases.draw(options.seed, number, ranks.size) for number in range(options.cases)]
        told = [judge(case, f"healthy {number}") for number, case in enumerate(drawn)]
        passing = [n for n, (kind, said, _) in enumerate(told) if kind == "judged" and not said]
        report["healthy"] = [n for n, (case, (_, said, _)) in enumerate(zip(drawn, told, strict=True))
                             if said and not cases.known(case, said)]  # fmt: skip
        for fault in (*NAMED, *draw(options.faults, options.fault_seed)):
            judge.meshes.forget()  # what torch remembers of its rules goes by the mesh
            planted, found, said = Planted(fault, last=ranks.rank == ranks.size - 1), None, ""
            with planted.here():
                for number in passing:
                    _, said, _ = judge(drawn[number], f"{fault} {number}")
                    if said:
                        found = number
                        break
            report["faults"][str(fault)] = {"hits": planted.hits, "case": found, "says": said}
            sys.stderr.write(f"{fault}: {report['faults'][str(fault)]}\n")
        report["hung"] = None
    if ranks.rank == 0:
        sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
