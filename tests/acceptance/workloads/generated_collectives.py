"""Drawn collectives: operation, type, size, buffer, group and order. In: a seed. Out: a JSON line.

A torchrun program. A case is one to four calls in drawn groups: in turn, under way at once, on several
streams, coalesced or in a graph, some of them in several turns. What is right is known to the bit, or within
the roundings of its sum (`generated_collective_data`). A case that fails is made smaller for as long as it
fails. One that hangs ends these ranks by a limit of its own, and is named. Repeat a case alone, in
tests/acceptance, with what is printed:
`PYTHONPATH=. torchrun --nproc-per-node 2 workloads/generated_collectives.py --case '{"calls": …}'`.
"""

import argparse
import contextlib
import datetime as dt
import functools
import itertools
import json
import math
import os
import random
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager  # what FSDP calls

from workloads import generated_collective_calls as calls
from workloads import generated_left
from workloads.collective_groups import Watch, goes_on, watched
from workloads.gates import Reading
from workloads.generated_collective_calls import Member, Plain, Run
from workloads.generated_collective_cases import (
    MODES,
    WORLD,
    Case,
    Group,
    Partition,
    candidates,
    draw,
    of_json,
)
from workloads.ranks import SETTLE_S, Book, Ranks, joined
from workloads.time_limits import scaled

LIMIT_S = 30.0  # of one case; a case takes milliseconds, and the first one of a group tenths of a second
SHRINKS, SHOWN = 150, 3  # tries for one failure, and failures that are made smaller
LATE_S = 0.005
RAISED = "raised "  # as Book says it
# What a backend may refuse loudly: newer releases have more of it.
REFUSED = re.compile(
    r"unsupported|not (currently |currenlty )?support|cannot use|invalid scalar type", re.IGNORECASE
)


class Groups:
    """Torch's groups, each made once, unless a case makes it again."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.made: dict[Group, Any] = {}

    @contextlib.contextmanager
    def of(self, case: Case) -> Iterator[list[Member | None]]:
        """This rank in each group of a case; None where it takes no part."""
        fresh = {group for group in case.groups if group[0] == "made again"}
        for group in sorted(fresh):
            for _ in range(2):
                self._leave(self._make(group[1]))
        for group in case.groups:
            if group not in self.made:
                self.made[group] = dist.group.WORLD if group == WORLD else self._make(group[1])
        yield [self._member(self.made[group]) for group in case.groups]
        for group in sorted(fresh):
            self._leave(self.made.pop(group))

    def _make(self, partition: Partition) -> Any:
        made = [dist.new_group(list(part)) for part in partition]
        return next((g for g, part in zip(made, partition, strict=True) if self.ranks.rank in part), None)

    def _leave(self, group: Any) -> None:
        if group is None:
            return
        dist.all_reduce(torch.ones(3, device=self.ranks.device), group=group)
        dist.barrier(group=group)  # nobody leaves while another reads its memory
        dist.destroy_process_group(group)

    def _member(self, group: Any) -> Member | None:
        return (
            None if group is None else Member(self.ranks, group, tuple(dist.get_process_group_ranks(group)))
        )


def check(ranks: Ranks, groups: Groups, case: Case, tag: str) -> list[Reading]:
    """All readings of a case on this rank."""
    readings = [Reading("ended", 0.0, 0.0)]
    with groups.of(case) as members, contextlib.ExitStack() as stack:
        runs = _runs(case, members, tag, stack)
        try:
            for turn in range(case.turns):
                readings += _turn(ranks, case, runs, turn)
        except (RuntimeError, ValueError) as error:
            if not _is_refused_by_those_asked(ranks, case, error):
                raise
            readings.append(Reading(f"{RAISED}{type(error).__name__}: {error}", math.inf, 0.0))
    return readings


def _turn(ranks: Ranks, case: Case, runs: list[Run | Plain], turn: int) -> Iterator[Reading]:
    for run in runs:
        run.fill(turn)
    if case.late == ranks.rank:
        time.sleep(LATE_S)
    WAYS[case.mode](case, runs, turn)
    for run in runs:
        for one in run.readings(turn):
            yield replace(one, gate=f"{run.call.op}: {one.gate}")


def _is_refused_by_those_asked(ranks: Ranks, case: Case, error: Exception) -> bool:
    """Whether some ranks take no part in a case, and a backend refuses it on each of the others.

    Those who take no part have nothing to raise. `Book` would take that for ranks that wait in vain.
    """
    asked = case.asked(ranks.size)
    if len(asked) == ranks.size or not REFUSED.search(str(error)):
        return False
    ranks.store.set(f"refused/{ranks.rank}", "1")
    try:
        ranks.store.wait([f"refused/{rank}" for rank in asked], dt.timedelta(seconds=SETTLE_S))
    except dist.DistStoreError:
        return False
    return True


def _runs(
    case: Case, members: list[Member | None], tag: str, stack: contextlib.ExitStack
) -> list[Run | Plain]:
    """The calls in which this rank takes part, with their buffers."""
    mine = [
        (call, member, number) for number, call in enumerate(case.calls) if (member := members[call.group])
    ]
    if not case.registered or not mine:
        return [calls.made(call, member, f"{tag}/{number}") for call, member, number in mine]
    own = mine[0][1].group._get_backend(mine[0][1].ranks.device)
    pool = torch.cuda.MemPool(own.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        runs = [calls.made(call, member, f"{tag}/{number}") for call, member, number in mine]
    stack.callback(runs.clear)  # before the pool, which this stack holds
    own.register_mem_pool(pool)
    stack.callback(own.deregister_mem_pool, pool)
    return runs


def _in_turn(_: Case, runs: list[Run | Plain], turn: int) -> None:
    for run in runs:
        for work in run.start(turn, asynchronous=False):
            work.wait()


def _async(case: Case, runs: list[Run | Plain], turn: int) -> None:
    """All under way, then waited for in another order."""
    works = [run.start(turn, asynchronous=True) for run in runs]
    random.Random(case.order).shuffle(works)
    for work in itertools.chain(*works):
        work.wait()


def _streams(case: Case, runs: list[Run | Plain], turn: int) -> None:
    """Each on a stream of its own."""
    now = torch.cuda.current_stream()
    sides = [torch.cuda.Stream() for _ in runs]
    for run, side in zip(runs, sides, strict=True):
        side.wait_stream(now)
        with torch.cuda.stream(side):
            _in_turn(case, [run], turn)
    for side in sides:
        now.wait_stream(side)


def _coalesced(case: Case, runs: list[Run | Plain], turn: int) -> None:
    if not runs:
        return
    with _coalescing_manager(group=runs[0].member.group, async_ops=case.order % 2 == 1) as manager:
        for run in runs:
            run.start(turn, asynchronous=False)
    if case.order % 2:
        manager.wait()


def _graph(case: Case, runs: list[Run | Plain], turn: int) -> None:
    """Recorded and replayed, once the group is in use."""
    if turn == 0:
        _in_turn(case, runs, turn)
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _in_turn(case, runs, turn)
    graph.replay()
    torch.cuda.synchronize()  # a graph that is gone cannot run


WAYS = dict(zip(MODES, (_in_turn, _async, _streams, _coalesced, _graph), strict=True))


class Judge:
    """Runs cases one after the other, and all ranks know what became of each."""

    def __init__(self, ranks: Ranks, watch: Watch) -> None:
        self.ranks, self.watch, self.groups = ranks, watch, Groups(ranks)
        self.serial = itertools.count()

    def __call__(self, case: Case, name: str) -> tuple[str, list[str], float]:
        """Whether the case was "judged" or "refused", its failures on all ranks, and its margin."""
        tag = f"case {next(self.serial)}"
        self.watch.entry["hung"] = f"{name}: {case}"
        self.watch.end = time.monotonic() + scaled(LIMIT_S)
        ranks = replace(self.ranks, store=dist.PrefixStore(tag, self.ranks.store))
        book = Book(ranks)
        try:
            book.judge("collectives", name, lambda: check(ranks, self.groups, case, tag))
        except RuntimeError as error:  # some ranks wait in vain, and so would the end of their group
            self._end(f"{error}: {error.__cause__}")
        merged = book.merged()
        if merged is not None:
            (found,) = merged["cases"]
            refused = _is_refusal(found["failures"], len(case.asked(ranks.size)))
            margin = found["margin"] if math.isfinite(found["margin"]) else 2.0
            said = ("refused", [], 0.0) if refused else ("judged", found["failures"], margin)
            ranks.store.set("said", json.dumps(said))
        kind, failures, margin = json.loads(ranks.store.get("said"))
        return kind, failures, margin

    def _end(self, words: str) -> NoReturn:
        """Wait for the watch, which ends this process; that of rank 0 reports what is known first."""
        self.watch.entry["hung"] += f": {words}"
        print(f"[rank{self.ranks.rank}]: {self.watch.entry['hung']}", file=sys.stderr, flush=True)
        self.watch.end = 0 if self.ranks.rank == 0 else self.watch.end
        time.sleep(10 * scaled(LIMIT_S))
        raise RuntimeError(words)


def _is_refusal(failures: list[str], asked: int) -> bool:
    """Whether every rank that takes part says that the backend has no such thing.

    What it says otherwise is a failure.
    """
    return len(failures) == asked and all(f": {RAISED}" in one and REFUSED.search(one) for one in failures)


def smaller(judge: Judge, case: Case, failures: list[str]) -> tuple[Case, list[str]]:
    """The plainest case that still fails, and how. All ranks go the same way."""
    tries, going = iter(range(SHRINKS)), True
    while going:
        going = False
        for other in candidates(case):
            if next(tries, None) is None:
                return case, failures
            _, said, _ = judge(other, "made smaller")
            if said:
                case, failures, going = other, said, True
                break
    return case, failures


def run(ranks: Ranks, report: dict[str, Any], asked: argparse.Namespace) -> None:
    """Judge cases of a seed: the least number in any case, then until the time is over."""
    watch, ends = Watch(time.monotonic() + scaled(LIMIT_S), report), time.monotonic() + asked.seconds
    with watched(ranks, watch, report):
        judge, lacks = Judge(ranks, watch), lacking(ranks) | {*asked.without}
        report["lacks"] = sorted(lacks)
        for number in range(asked.first, asked.first + asked.most):
            late = number >= asked.first + asked.least and time.monotonic() > ends
            if not goes_on(ranks, f"case {number}", over=late):
                break
            case = asked.case or draw(
                report["seed"], number, ranks.size, device=ranks.device.type, lacks=lacks
            )
            kind, failures, margin = judge(case, f"case {number}")
            report["drawn"] += 1
            report["judged"] += kind == "judged"
            if kind == "refused":
                report["refused"].append(f"{case.calls[0].op} {case.calls[0].reduce} {case.calls[0].dtype}")
            elif not failures:
                report["worst"] = max(report["worst"], margin)
            else:
                words = f"--seed {report['seed']} --first {number}"
                report["failed"].append(_again(ranks, number, words, failures))
                if len(report["failed"]) <= SHOWN:
                    case, failures = smaller(judge, case, failures)
                    report["failed"][-1] = _again(ranks, number, f"--case '{case}'", failures)
        report["hung"] = None
    told = {generated_left.JUDGED: report["judged"], "the backend refuses it": len(report["refused"])}
    report["left"] = {"case": told}


def lacking(ranks: Ranks) -> frozenset[str]:
    """What this release does not have for its backend, and cases of many calls must not ask for."""
    one = [torch.ones(1, device=ranks.device) for _ in range(2 * ranks.size)]
    has = {
        "registered": hasattr(getattr(dist, "ProcessGroupNCCL", None), "register_mem_pool"),
        "avg": _has(lambda: dist.all_reduce(one[0], dist.ReduceOp.AVG)),
        "all_to_all": _has(lambda: dist.all_to_all(one[: ranks.size], one[ranks.size :])),
    }
    return frozenset(name for name in has if not has[name])


def _has(call: Callable[[], object]) -> bool:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        if not REFUSED.search(str(error)):
            raise
        return False
    return True


def _again(ranks: Ranks, number: int, words: str, failures: list[str]) -> str:
    more = f", and {len(failures) - 1} more" if failures[1:] else ""
    return (
        f"  case {number}: {failures[0]}{more}\n    again: torchrun --nproc-per-node {ranks.size} "
        f"workloads/generated_collectives.py {words}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--least", type=int, default=1)
    parser.add_argument("--most", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--without", nargs="*", default=[], help="what cases must not ask for: graph, …")
    size = int(os.environ.get("WORLD_SIZE", "1"))
    parser.add_argument("--case", type=functools.partial(of_json, size=size), metavar="JSON")
    options = parser.parse_args()
    report: dict[str, Any] = {"family": "collectives", "seed": options.seed, "least": options.least}
    report |= {"drawn": 0, "judged": 0, "worst": 0.0, "failed": [], "refused": [], "hung": None}
    warnings.simplefilter("ignore")  # newer releases rename some of these functions
    with joined(bound=True) as ranks:
        run(ranks, report, options)
    if ranks.rank == 0:
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
