"""Operators on drawn placements: PyTorch's own table on DTensors. In: a seed. Out: a JSON line.

A torchrun program. A case is an operator with one sample, and a placement for each operand, for its result
and for the gradient that comes in; some operands are views, some change in place. The whole result and the
whole gradients are judged beside the same operator on whole tensors, in units of float64, and all ranks must
have the same bits of them. What torch refuses loudly is counted. After each step the ranks tell each other
how it went, so that an error of one of them ends the step for all: what then waits has groups of its own with
a short limit, and the next case gets new ones. A case that fails is made smaller for as long as it fails. One
that hangs ends these ranks, and is named. Repeat a case alone, in tests/acceptance, with what is printed:
`PYTHONPATH=. torchrun --nproc-per-node 2 workloads/generated_placements.py --case '{"operator": …}'`.
"""

import argparse
import contextlib
import functools
import itertools
import json
import math
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from workloads import gates, generated_draws, generated_judge, generated_left, generated_trees
from workloads.collective_groups import Watch, goes_on, watched
from workloads.generated_judge import Call
from workloads.generated_placement_cases import (
    Case,
    Meshes,
    Placed,
    call_of,
    candidates,
    draw,
    is_known,
    known,
    of_json,
    placed,
    placement,
    words_of,
)
from workloads.ranks import Ranks, joined
from workloads.time_limits import scaled

LIMIT_S, SEARCH_S = 60.0, 3.0  # of one case, which takes milliseconds, and of Python in one step
FACTOR = 4.0  # beside what the operator needs, or what it needs on whole tensors
ENOUGH = 4.0  # roundings of each number, which need no units
SHRINKS, SHOWN = 40, 3  # tries for one failure, and failures that are made smaller
TRIES = 3  # of what does not go the same way each time
JUDGING = "judging"
LOUD = (*generated_left.REFUSED, LookupError, AttributeError, ArithmeticError)
WAITED = re.compile(r"timed ?out|connection (closed|reset)|abort", re.IGNORECASE)
SEARCHES = "_sharding_prop.py"  # where torch looks for a strategy
WAIT = "ranks wait for each other"
SLOW, OTHER_BITS = "too slow", "ranks have other bits of the whole result"
WORDS = {
    "torch searches too long": SLOW,
    "torch has no strategy": "sharding strategy",
    "torch mixes no tensors and DTensors": "mixed torch.Tensor and DTensor",
}


class SlowError(BaseException):
    """A step runs for too long in Python. No handler of torch's search for a strategy takes it."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Run the body. Raises `SlowError` if it runs too long in Python; what waits in a library has a limit."""

    def over(_: int, frame: Any) -> None:
        while frame is not None and not frame.f_code.co_filename.endswith(SEARCHES):
            frame = frame.f_back
        raise SlowError("timed out" if frame is None else SLOW)

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, scaled(SEARCH_S))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class StoppedError(Exception):
    """A step that some ranks did not end: what each of them said."""

    def __init__(self, step: str, said: Sequence[str]) -> None:
        """Nothing was said by a rank that ended it."""
        super().__init__(f"{step}: {said}")
        self.step, self.said = step, said

    @property
    def refused(self) -> bool:
        """Whether each rank raised an error of its own."""
        return all(one and not WAITED.search(one) for one in self.said)

    @property
    def early(self) -> bool:
        """Whether all ranks refused it before they sent anything to each other."""
        return self.refused and self.reason in WORDS

    @property
    def hung(self) -> bool:
        """Whether ranks waited for others that raised nothing."""
        return not any(one and not WAITED.search(one) for one in self.said)

    @property
    def reason(self) -> str:
        """Why it stopped, in few words."""
        if self.step == JUDGING:
            return self.said[0]
        words = next(one for one in self.said if one and (self.hung or not WAITED.search(one)))
        named = (reason for reason, has in WORDS.items() if has in words)
        whose = "" if self.refused else "some ranks wait: " if self.hung else "some ranks alone: "
        return next(named, f"{whose}{self.step} is refused: {words.split(':')[0]}")


@dataclass
class Steps:
    """Steps of a case that all ranks take together."""

    ranks: Ranks
    tag: str

    def everyone(self, what: str, mine: str) -> list[str]:
        """What each rank says."""
        store = self.ranks.store
        store.set(f"{self.tag}/{what}/{self.ranks.rank}", mine)
        return [store.get(f"{self.tag}/{what}/{rank}").decode() for rank in range(self.ranks.size)]

    def __call__(self, name: str, function: Callable[[], Any]) -> Any:
        """What the step gives. Raises `StoppedError` on all ranks if it does not end on one."""
        found, error = None, ""
        try:
            with limited():
                found = function()
        except (*LOUD, SlowError) as raised:
            error = f"{type(raised).__name__}: {raised}"[:600]
        said = self.everyone(name, error)
        if any(said):
            raise StoppedError(name, said)
        return found


def results(call: Call, case: Case, mesh: DeviceMesh, step: Steps) -> list[torch.Tensor]:
    """Outputs and then gradients of a call on placed operands, whole: as the judge has them of whole ones."""
    generated_judge.seed_all(call.seed)
    places = itertools.count()

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        n = next(places)
        dtensor = placed(leaf, mesh, case.operands[n % len(case.operands)].placed)
        return dtensor.requires_grad_(call.gradients and n not in call.fixed and leaf.is_floating_point())

    here = step("placing", lambda: call.mapped(place))
    inputs = [one for one in here.tensors() if one.requires_grad]
    with torch.set_grad_enabled(call.gradients):
        returned = step("the call", lambda: here.function(*here.args, **here.kwargs))
        given = [one for one in generated_trees.leaves(returned) if generated_trees.is_tensor(one)]
        if case.to:
            given = step("bringing the result elsewhere", lambda: [_moved(one, case.to) for one in given])
    found: list[torch.Tensor] = step(
        "gathering the result", lambda: generated_trees.numbers([_whole(one) for one in given])
    )
    roots = [one for one in given if one.requires_grad and one.is_floating_point()]
    if not call.gradients or not roots or not inputs:
        return found

    def gradients() -> Any:
        weights = [generated_judge._weights(one, call, n, 0) for n, one in enumerate(roots)]
        pairs = zip(roots, weights, strict=True)
        coming = [placed(w, mesh, case.incoming) if isinstance(one, DTensor) else w for one, w in pairs]
        return torch.autograd.grad(roots, inputs, coming, allow_unused=True, materialize_grads=True)

    grads = step("the gradient", gradients)
    found += step("gathering gradients", lambda: [_whole(one) for one in grads])
    return found


def _moved(one: Any, to: Placed) -> Any:
    if not isinstance(one, DTensor):
        return one
    return one.redistribute(placements=[placement(name, one) for name in to])


def _whole(one: torch.Tensor) -> torch.Tensor:
    return one.detach().full_tensor() if isinstance(one, DTensor) else one.detach()


def check(ranks: Ranks, meshes: Meshes, case: Case, tag: str) -> tuple[str | None, float]:
    """Why a case is left, or its failure, or nothing; and its margin. Only rank 0 knows the last two."""
    step, call = Steps(ranks, tag), call_of(case)
    if call is None:
        raise StoppedError(JUDGING, ["no sample can be judged"])
    if len(set(step.everyone("operands", words_of(call)))) > 1:
        raise StoppedError(JUDGING, ["ranks draw other samples"])  # of some, by the order of a set
    call = replace(call, on=None).mapped(functools.partial(_sent, ranks.device))
    run = generated_judge.wide(call) if case.kind == "float64" else call
    plain = step("the operator on whole tensors", lambda: generated_judge.results(run))
    got = results(run, case, meshes.of(case.mesh), step)
    sums = json.dumps([(list(one.shape), gates.checksum(one)) for one in got])
    everyone = step.everyone("sums", sums)
    if ranks.rank:
        return None, 0.0
    if len(set(everyone)) > 1:
        return OTHER_BITS, math.inf
    if any("P" in name for one in (*(each.placed for each in case.operands), case.incoming) for name in one):
        # Of a number that is infinite, parts are infinite too, and their sum is none.
        got = [
            torch.where(one.isfinite(), other, one) if one.shape == other.shape else other
            for one, other in zip(plain, got, strict=False)
        ] + list(got[len(plain) :])
    return judged(case, call, plain, got)


def _sent(device: torch.device, leaf: Any) -> Any:
    return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf


def judged(
    case: Case, call: Call, plain: Sequence[torch.Tensor], got: Sequence[torch.Tensor]
) -> tuple[str | None, float]:
    """What is wrong with a result, and its share of its gate. Raises `StoppedError` if nobody can say it."""
    forms = [[(tuple(one.shape), one.dtype) for one in each] for each in (plain, got)]
    if forms[0] != forms[1]:
        return f"whole tensors have {forms[0]}, placed ones {forms[1]}", math.inf
    if all(_same(one, other) for one, other in zip(plain, got, strict=True)):
        return None, 0.0
    if not is_known(case):
        raise StoppedError(JUDGING, ["nobody says what is right"])
    call = call.mapped(functools.partial(_sent, torch.device("cpu")))
    plain, got = ([one.cpu() for one in each] for each in (plain, got))
    try:
        reference = generated_judge.Reference(call)
        units = generated_judge.distance(call, got, reference, ENOUGH)
        usual = generated_judge.distance(call, plain, reference, ENOUGH) or 0.0
    except generated_left.RefusedError as error:
        raise StoppedError(JUDGING, ["float64 refuses it"]) from error
    if units is None:
        raise StoppedError(JUDGING, ["float64 does not say what is right"])
    need = generated_draws.OPERATORS_NEED["float32" if case.kind == "float64" else case.kind]
    bound = FACTOR * need
    usual = usual if units > need else 0.0
    if usual > bound:
        raise StoppedError(JUDGING, ["float64 says otherwise of whole tensors too"])
    bound = max(bound, FACTOR * usual)
    words = f"{units:.3g} units from float64, {bound:.3g} allowed ({usual:.3g} on whole tensors)"
    return words if units > bound else None, units / bound


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((one == other) | ((one != one) & (other != other))).all())  # noqa: PLR0124 NaN alone


class Judge:
    """Runs cases one after the other, and all ranks know what became of each."""

    def __init__(self, ranks: Ranks, watch: Watch) -> None:
        self.ranks, self.watch, self.meshes = ranks, watch, Meshes(ranks)
        self.serial = itertools.count()

    def __call__(self, case: Case, name: str) -> tuple[str, str, float]:
        """Why a case is left, or "judged"; then its failure, if it has one, and its margin."""
        self.watch.entry["hung"] = f"{name}: {case}"
        for _ in range(TRIES):  # a busy machine may let ranks wait too long
            self.watch.end = time.monotonic() + scaled(LIMIT_S)
            tag = f"placements {next(self.serial)}"
            try:
                said = self._told(tag, generated_left.JUDGED, *check(self.ranks, self.meshes, case, tag))
                if said[1] == OTHER_BITS:  # some kernels do not add in the same order each time
                    continue
            except StoppedError as stopped:
                said = self._told(tag, stopped.reason, None, 0.0)
                if stopped.step == JUDGING or stopped.early:
                    return said
                self.meshes.forget()  # something may be under way, also where all of them raised
                if not stopped.hung:
                    return said
                said = (generated_left.JUDGED, f"{WAIT}: {stopped}", math.inf)
                continue
            return said
        return said

    def _told(self, tag: str, kind: str, failure: str | None, margin: float) -> tuple[str, str, float]:
        """What rank 0 knows, on all ranks."""
        if self.ranks.rank == 0:
            finite = margin if math.isfinite(margin) else 2.0
            self.ranks.store.set(f"{tag}/said", json.dumps((kind, failure or "", finite)))
        found: tuple[str, str, float] = tuple(json.loads(self.ranks.store.get(f"{tag}/said")))
        return found


def smaller(judge: Judge, case: Case, failure: str) -> tuple[Case, str]:
    """The plainest case that still fails, and how. All ranks go the same way."""
    tries, going = iter(range(SHRINKS)), True
    while going:
        going = False
        for other in candidates(case):
            if next(tries, None) is None:
                return case, failure
            if said := judge(other, "made smaller")[1]:
                case, failure, going = other, said, True
                break
    return case, failure


def run(ranks: Ranks, report: dict[str, Any], asked: argparse.Namespace) -> None:
    """Judge cases of a seed: the least number in any case, then until the time is over."""
    watch, ends = Watch(time.monotonic() + scaled(LIMIT_S), report), time.monotonic() + asked.seconds
    cases: dict[str, int] = {}
    with watched(ranks, watch, report):
        judge = Judge(ranks, watch)
        for number in range(asked.first, asked.first + asked.most):
            late = number >= asked.first + asked.least and time.monotonic() > ends
            if not goes_on(ranks, f"case {number}", over=late):
                break
            case = asked.case or draw(report["seed"], number, ranks.size)
            print(f"at case {number}: {case}", file=sys.stderr, flush=True)  # which may end this process
            kind, failure, margin = judge(case, f"case {number}")
            if asked.tell and ranks.rank == 0:
                print(json.dumps([number, kind, failure, margin, str(case)]), file=sys.stderr, flush=True)
            report["drawn"] += 1
            report["judged"] += kind == generated_left.JUDGED
            cases[kind] = cases.get(kind, 0) + 1
            if failure and (fault := known(case, failure)):
                report["passed over"][fault] = report["passed over"].get(fault, 0) + 1
            elif failure:
                words = f"--seed {report['seed']} --first {number}"
                report["failed"].append(_again(ranks, number, words, failure))
                if len(report["failed"]) <= SHOWN and not (asked.tell or failure.startswith(WAIT)):
                    small, failure = smaller(judge, case, failure)
                    report["failed"][-1] = _again(ranks, number, f"--case '{small}'", failure)
            elif kind == generated_left.JUDGED:
                report["worst"] = max(report["worst"], margin)
        report["hung"] = None
    report["left"] = {"case": cases}


def _again(ranks: Ranks, number: int, words: str, failure: str) -> str:
    return (
        f"  case {number}: {failure}\n    again: torchrun --nproc-per-node {ranks.size} "
        f"workloads/generated_placements.py {words}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--least", type=int, default=1)
    parser.add_argument("--most", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--tell", action="store_true", help="say on descriptor 2 what became of each case")
    size = int(os.environ.get("WORLD_SIZE", "1"))
    parser.add_argument("--case", type=functools.partial(of_json, size=size), metavar="JSON")
    options = parser.parse_args()
    report: dict[str, Any] = {
        "family": "placements",
        "seed": options.seed,
        "least": options.least,
        "drawn": 0,
    }
    report |= {"judged": 0, "worst": 0.0, "failed": [], "passed over": {}, "hung": "no case"}
    warnings.simplefilter("ignore")
    with joined() as ranks:
        run(ranks, report, options)
    if ranks.rank == 0:
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
