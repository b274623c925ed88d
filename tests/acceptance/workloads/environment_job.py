"""What a user's job does, whatever variables are set. In: a seed, a number and what collectives lack.

Or `devices` alone. Out: a JSON line.

The line has what each rank sees, "failures", the "margin", "numbers" by name, and what "hung"; for `devices`
what this process sees alone. A torchrun program that knows of no variable: products, convolutions, attention
and drawn collectives are judged as elsewhere in these suites, and three steps of FSDP2 beside float64.
`generated_environments` runs it, and sets its numbers (losses, gradients, a convolution, attention) beside
those of a job without the variables: what is wrong everywhere in a process is right beside itself.
"""

import argparse
import functools
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

import vendors
from workloads import attention, convolution, devices, gemm, generated_collectives
from workloads.gates import Reading
from workloads.generated_layouts import Chain
from workloads.layout_jobs import Job, Step
from workloads.layout_models import Case, Layout
from workloads.layout_options import OPTIONS
from workloads.ranks import Book, Ranks, joined

COLLECTIVES = 20
AGAIN = re.compile(r"\s+again: ")  # of a collective, which fails with the variables alone
NUMBERS: dict[str, Callable[[], dict[str, Any]]] = {
    "products in fp32": functools.partial(gemm.check, "fp32", "smoke"),
    "products in bf16": functools.partial(gemm.check, "bf16", "smoke"),
    "convolutions in fp32": functools.partial(convolution.check, "fp32"),
    "attention in fp32": functools.partial(attention.check, "fp32", "smoke"),
    "attention in bf16": functools.partial(attention.check, "bf16", "smoke"),
}
PLAIN = Layout(parallel="fsdp2", options={name: of[0] for name, of in OPTIONS["fsdp2"].items()})
# Two chunks of data, so that one rank and two have the same; a width that two ranks do not divide.
TRAINED = Case(
    numbers=20261128,
    sizes={"width": 8, "hidden": 37, "vocab": 64, "blocks": 2, "batch": 2, "length": 13},
    kind="float32",
    chunks=2,
    layouts=(PLAIN,),
    steps=3,
    clip=True,
)
CONVOLVED = convolution.Problem(inner=3, outer=4, kernel=3, padding=1, size=9)
ATTENDED = attention.Shape(b=1, hq=2, hkv=1, sq=17, sk=33, d=16)


class Kept(Job):
    """A job that keeps its steps."""

    def __init__(self, *arguments: Any) -> None:
        """The job of these arguments."""
        super().__init__(*arguments)
        self.steps: list[Step] = []

    def step(self, number: int, most: float) -> Step:
        """One step, as `Job` does it."""
        self.steps.append(super().step(number, most))
        return self.steps[-1]


def seen() -> list[str]:
    """The devices in torch's order, by the vendor's ids; by their places where torch has no ids."""
    vendor = vendors.module("amd" if torch.version.hip else "nvidia")
    return [vendor.torch_uuid(one["uuid"]) if one["uuid"] else str(one["bdf"]) for one in devices.seen()]


def readings(check: Callable[[], dict[str, Any]]) -> Iterator[Reading]:
    """The cases of a check of one device, each as far from its gates as its report says."""
    for case in check()["cases"]:
        failures = case["failures"]
        yield Reading(": ".join([case["name"], *failures[:1]]), math.inf if failures else case["margin"], 1.0)


def training(ranks: Ranks, steps: list[Step]) -> Iterator[Reading]:
    """Steps of FSDP2 beside float64, which are kept."""
    chain = Chain(ranks, TRAINED, "environment")
    job = Kept(TRAINED, PLAIN, ranks, TRAINED.numbers, chain.adam.epsilon)
    for number in range(TRAINED.steps):
        yield from chain.readings(job, number)
    steps += job.steps


def alone() -> dict[str, torch.Tensor]:
    """A convolution and attention on this device, with their gradients."""
    x, w = convolution.tensors(CONVOLVED, torch.float32, torch.contiguous_format)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        convolved = convolution.step(CONVOLVED, x, w)[:3]
    leaves, given = attention.leaves_of(ATTENDED, "fp32")
    out = attention.attend(*leaves, causal=False)
    attended = (out.detach(), *torch.autograd.grad(out, leaves, given))
    found = {f"convolution, {name}": one for name, one in zip(("out", "dx", "dw"), convolved, strict=True)}
    return found | {
        f"attention, {name}": one for name, one in zip(("out", *attention.GRADIENTS), attended, strict=True)
    }


def run(ranks: Ranks, report: dict[str, Any], number: int, lacks: list[str]) -> None:
    """Everything on all ranks; the report of rank 0 has what became of it."""
    report["seen"] = ranks.collect(seen(), about="seen")
    book, steps = Book(ranks), list[Step]()
    for name, check in NUMBERS.items():
        book.judge("numbers", name, functools.partial(readings, check))
    asked: dict[str, Any] = {"first": COLLECTIVES * number, "least": COLLECTIVES, "most": COLLECTIVES}
    asked |= {"seconds": 0.0, "case": None, "without": lacks}
    generated_collectives.run(ranks, report, argparse.Namespace(**asked))
    book.judge("training", "FSDP2", functools.partial(training, ranks, steps))
    merged = book.merged()
    losses = ranks.collect([step.losses.tolist() for step in steps], about="losses")
    if merged is None:
        return
    report["failures"] = [f"{one['name']}: {said}" for one in merged["cases"] for said in one["failures"]]
    report["failures"] += [AGAIN.sub("; with these variables: ", one.strip()) for one in report.pop("failed")]
    report["margin"] = max(report["worst"], *(one["margin"] for one in merged["cases"]))
    plain = alone()
    for turn, step in enumerate(steps):
        plain |= {f"step {turn}, {name}": one for name, one in step.gradients.items()}
    report["numbers"] = {name: one.flatten().tolist() for name, one in plain.items()}
    for turn, every in enumerate(zip(*losses or (), strict=True)):
        report["numbers"][f"step {turn}, losses"] = sorted(one for rank in every for one in rank)


def main() -> None:
    if sys.argv[1] == "devices":
        print(json.dumps({"seen": [seen()]}), flush=True)
        return
    seed, number = map(int, sys.argv[1:3])
    report: dict[str, Any] = {"seed": seed, "hung": None, "failed": [], "refused": []}
    report |= {"drawn": 0, "judged": 0, "worst": 0.0}
    with joined(bound=True) as ranks:
        run(ranks, report, number, sys.argv[3:])
    if ranks.rank == 0:
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
