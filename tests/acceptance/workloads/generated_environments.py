"""Drawn environments: documented variables must change no result. In: a vendor, a seed. Out: what failed.

A case is one variable of the vendor's tables (vendors/*_environment.json), sometimes two or three, with
values that are documented, or a drawn choice of devices in the spellings that its documentation has. New
processes run one job in it (`environment_job`), so that every library reads the variables while it is loaded.
Wrong is what that job finds wrong, other devices than the values promise, numbers beyond roundings of those
of the same job without the variables, an error, and a hang. What a library may refuse loudly is
counted. A case that fails loses variables for as long as it fails. Repeat what is printed, in
tests/acceptance: `PYTHONPATH=. python3 workloads/generated_environments.py nvidia 0 7 NCCL_ALGO=Ring`.
"""

import argparse
import contextlib
import functools
import itertools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from workloads import generated_left
from workloads.gates import WORST_FP32, unit_roundoff
from workloads.time_limits import scaled

ACCEPTANCE = Path(__file__).resolve().parents[1]
TABLES = {"cpu": ("cpu",), "nvidia": ("nvidia", "nccl", "torch"), "amd": ("amd", "nccl", "torch")}
DEVICES = "a choice of devices"  # its name among those of variables
OF_DEVICES = 8  # one in so many cases, or more
MORE = (0, 0, 0, 0, 1, 1, 2)  # variables beside the first one
RANKS = 2
LIMIT_S = 180.0  # of one job, which takes 5 to 20 s
# Of a job unless its case says otherwise: threads that wait for a core of a busy machine must not spin.
THREADS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
SHOWN = 3  # failures that are made smaller
HUNG = "did not end: "
AT_ONCE, CORES = 4, 4  # jobs, and the cores of each of them
Variables = Mapping[str, str]


class Plan(NamedTuple):
    """How many cases: the least, the most, and the seconds in which to go beyond the least."""

    least: int
    most: int
    seconds: float


PLANS = {"cpu": Plan(6, 40, 60), "nvidia": Plan(20, 200, 300), "amd": Plan(20, 200, 300)}


@dataclass(frozen=True)
class Table:
    """What a vendor's documentation says: values, what may be refused, and what shows which devices.

    Attributes:
        levels: Names whose first one that is set hides devices; each level numbers what the one before shows.
        ids: Names that take ids of devices beside numbers.
    """

    values: Mapping[str, tuple[str, ...]]
    refused: Mapping[str, str]  # words of a library that may refuse a variable's values
    without: Mapping[str, tuple[str, ...]]  # what collectives do not ask for beside a variable
    levels: tuple[tuple[str, ...], ...] = ()
    ids: tuple[str, ...] = ()
    spellings: tuple[str, ...] = ()

    @property
    def visibility(self) -> tuple[str, ...]:
        """Every variable that hides devices."""
        return tuple(itertools.chain(*self.levels))


@functools.cache
def table(vendor: str) -> Table:
    """The tables of a vendor as one."""
    values: dict[str, tuple[str, ...]] = {}
    refused: dict[str, str] = {}
    without: dict[str, tuple[str, ...]] = {}
    devices: dict[str, Any] = {}
    for name in TABLES[vendor]:
        told = json.loads((ACCEPTANCE / "vendors" / f"{name}_environment.json").read_text(encoding="utf-8"))
        devices |= told.get("devices", {})
        for group in told["groups"]:
            refused |= group.get("refused", {})
            without |= {variable: tuple(some) for variable, some in group.get("without", {}).items()}
            for variable, of in group["variables"].items():
                values[variable] = (*values.get(variable, ()), *of)
    levels = tuple(tuple(level) for level in devices.get("levels", ()))
    more = (tuple(devices.get(part, ())) for part in ("ids", "spellings"))
    return Table(values, refused, without, levels, *more)


def promised(native: Sequence[str], levels: Iterable[Sequence[str]], variables: Variables) -> list[str]:
    """The ids that the runtime shows, in its order: each list ends before the first unknown name."""
    shown = list(native)
    for level in levels:
        chosen = next((variables[name] for name in level if name in variables), None)
        if chosen is None:
            continue
        found: list[str] = []
        for name in (one.strip() for one in chosen.split(",")):
            numbered = [shown[int(name)]] if name.isdigit() and int(name) < len(shown) else []
            named = [one for one in shown if name.startswith("GPU-") and one.startswith(name)]
            if not numbered + named:
                break
            found += (numbered + named)[:1]
        shown = found
    return shown


def draw(
    of: Table, seed: int, number: int, native: Sequence[str] = (), leased: Sequence[str] = ()
) -> dict[str, str]:
    """One case; all variables take turns to come first, and a choice of devices between them."""
    names = sorted(of.values)
    turn = names + [DEVICES] * (len(names) // OF_DEVICES if leased else 0)
    random.Random(f"environments {seed} {number // len(turn)}").shuffle(turn)
    r = random.Random(f"environments {seed} {number}")
    first = turn[number % len(turn)]
    chosen = {first, *r.sample([one for one in names if one != first], r.choice(MORE))}
    if first == DEVICES:  # their numbers are those of one order
        chosen -= {first, "CUDA_DEVICE_ORDER"}
    found = {name: r.choice(of.values[name]) for name in sorted(chosen)}
    return found | (_devices(of, r, native, leased) if first == DEVICES else {})


def _devices(of: Table, r: random.Random, native: Sequence[str], leased: Sequence[str]) -> dict[str, str]:
    """Lists of devices by some of the variables that there are for it, each of what the one before shows."""
    found: dict[str, str] = {}
    while not found:
        shown = list(native)
        for level in of.levels:
            for name in r.sample(level, r.randint(0, len(level))):
                found[name] = _list(of, r, name, shown, leased)
            shown = promised(shown, [level], found)
            if not shown:
                break
    return found


def _list(of: Table, r: random.Random, name: str, shown: Sequence[str], leased: Sequence[str]) -> str:
    places = [place for place, one in enumerate(shown) if one in leased]
    some = r.sample(places, r.randint(1, len(places)))
    by_id = name in of.ids and len({*shown}) == len(shown) and all(one.startswith("GPU-") for one in shown)
    words = [str(place) for place in some]
    if by_id and r.random() < 0.5:
        words = [shown[place] for place in some]
        short = [one[:12] for one in shown]
        if "short ids" in of.spellings and len({*short}) == len(short) and r.random() < 0.5:
            words = [short[place] for place in some]
    if "ended by -1" in of.spellings and r.random() < 0.2:
        words += ["-1", str(places[0])]
    return "" if "none" in of.spellings and r.random() < 0.1 else ",".join(words)


class Bench:
    """Runs jobs beside one without any variable, and says what is wrong with them."""

    def __init__(self, vendor: str, seed: int) -> None:
        self.vendor, self.seed, self.table = vendor, seed, table(vendor)
        hidden = dict.fromkeys(self.table.visibility[:1], "")  # so that nothing else hides devices
        gpu = vendor != "cpu"
        self.native: list[str] = self._asked("devices", hidden, 1, bare=True)["seen"][0] if gpu else []
        self.leased: list[str] = self._asked("devices", {}, 1)["seen"][0] if gpu else []
        self.bare = self._asked("0", {}, self._ranks(self.leased))

    def _ranks(self, shown: Sequence[str]) -> int:
        return RANKS if self.vendor == "cpu" else max(1, min(RANKS, len(shown)))

    def _asked(self, number: str, variables: Variables, ranks: int, *, bare: bool = False) -> dict[str, Any]:
        """What a job says; if it did not end well, its "failures" alone."""
        lacks = sorted({one for name in variables for one in self.table.without.get(name, ())})
        words = [number] if number == "devices" else [str(self.seed), number, *lacks]
        inherited = dict(os.environ)
        if variables.keys() & {*self.table.visibility}:
            inherited = {name: one for name, one in inherited.items() if name not in self.table.visibility}
        with tempfile.TemporaryDirectory() as folder:
            path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ACCEPTANCE))))
            own = {"PYTHONPATH": path, "STACKCHECK_STACKS": folder, **THREADS}
            environment = {**inherited, **own, **({} if bare else variables)}
            program = str(ACCEPTANCE / "workloads" / "environment_job.py")
            return _ended(["harness.forked_ranks", str(ranks), program, *words], environment, folder)

    def failures(self, number: int, variables: Variables) -> tuple[list[str], float]:
        """What is wrong with one case, and its margin."""
        is_choice = bool(variables.keys() & {*self.table.visibility})
        shown = promised(self.native, self.table.levels, variables) if is_choice else self.leased
        told = self._asked(str(number), variables, self._ranks(shown))
        return self.wrong(told, shown)

    def wrong(self, told: Mapping[str, Any], shown: Sequence[str]) -> tuple[list[str], float]:
        """What is wrong with the report of a job that should see these devices."""
        if told.get("hung"):
            return [f"{HUNG}{told['hung']}"], math.inf
        found = [
            f"rank {rank} sees {one}, {list(shown)} are promised"
            for rank, one in enumerate(told.get("seen", ()))
            if one != list(shown)
        ]
        found += told["failures"]
        if found:
            return found, math.inf
        margins = [told["margin"]]
        for name, want in self.bare["numbers"].items():
            margins.append(_apart(told["numbers"][name], want) / (WORST_FP32 * unit_roundoff(torch.float32)))
            if not margins[-1] <= 1:
                found.append(f"{name}: {margins[-1]:.3g} times as far off as roundings")
        return found, max(margins)

    def refused(self, variables: Variables, failures: Iterable[str]) -> bool:
        """Whether a library says of all of it that it has no such thing, as it may."""
        words = [one for name, one in self.table.refused.items() if name in variables]
        return bool(words) and all(re.search("|".join(words), one) for one in failures)

    def smaller(self, number: int, variables: Variables, failures: list[str]) -> tuple[Variables, list[str]]:
        """The case without what it also fails without."""
        for name in variables if len(variables) > 1 else ():
            fewer = {other: value for other, value in variables.items() if other != name}
            said = self.failures(number, fewer)[0] if fewer else []
            if said and not self.refused(fewer, said):
                variables, failures = fewer, said
        return variables, failures

    def again(self, number: int, variables: Variables, failures: Sequence[str]) -> str:
        """How a case failed, and how to repeat it."""
        more = f", and {len(failures) - 1} more" if failures[1:] else ""
        named = " ".join(f"'{name}={value}'" for name, value in variables.items())
        words = f"python3 workloads/generated_environments.py {self.vendor} {self.seed} {number} {named}"
        return f"  case {number}, {named or 'nothing set'}: {failures[0]}{more}\n    again: {words}"


def _ended(words: Sequence[str], environment: Variables, folder: str) -> dict[str, Any]:
    """The JSON line of a program that is ended if it takes too long, with all that it started."""
    process = subprocess.Popen(
        [sys.executable, "-m", *words],
        env=dict(environment),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    limit_s = scaled(LIMIT_S)
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"hung": f"in {limit_s:g} s", "failures": []}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if process.returncode or not lines:
        last = " | ".join([line.strip() for line in err.splitlines() if line.strip()][-8:])
        return {"failures": [f"ended with {process.returncode}: {last}"]}
    told: dict[str, Any] = json.loads(lines[-1])
    return told


def _apart(got: Sequence[float], want: Sequence[float]) -> float:
    """The largest distance of two numbers, of the root mean square of what is right."""
    one, other = (torch.tensor(numbers, dtype=torch.float64) for numbers in (got, want))
    usual = other.square().mean().sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    return float((one - other).abs().max() / usual) if one.shape == other.shape else math.inf


def check(vendor: str, seed: int, plan: Plan) -> dict[str, Any]:
    """Judge cases of a seed: the least number in any case, then until the time is over."""
    bench, ends = Bench(vendor, seed), time.monotonic() + plan.seconds
    report: dict[str, Any] = {"seed": seed, "least": plan.least, "drawn": 0, "worst": 0.0}
    report |= {"failed": [], "hung": 0}
    left: dict[str, int] = {generated_left.JUDGED: 0}
    if said := bench.wrong(bench.bare, bench.leased)[0]:
        failed = [bench.again(0, {}, said)]
        return report | {"drawn": plan.least, "judged": plan.least, "failed": failed, "left": {}}
    at_once = max(1, min(AT_ONCE, len(os.sched_getaffinity(0)) // CORES))
    with ThreadPoolExecutor(at_once) as pool:
        for first in range(1, plan.most + 1, at_once):
            if first > plan.least and time.monotonic() > ends:
                break
            numbers = range(first, min(first + at_once, plan.most + 1))
            cases = [draw(bench.table, seed, number, bench.native, bench.leased) for number in numbers]
            for number, case, (said, margin) in zip(
                numbers, cases, pool.map(bench.failures, numbers, cases), strict=True
            ):
                report["drawn"] += 1
                reason = generated_left.JUDGED if not said else _reason(bench, number, case, said, report)
                left[reason] = left.get(reason, 0) + 1
                report["worst"] = report["worst"] if said else max(report["worst"], margin)
    return report | {"judged": left[generated_left.JUDGED], "left": {"case": left}}


def _reason(bench: Bench, number: int, case: Variables, said: list[str], report: dict[str, Any]) -> str:
    """Whether a case that failed is judged or left; what is judged is in the report."""
    if bench.refused(case, said):
        return f"a library refuses {' '.join(sorted({*case} & {*bench.table.refused}))}"
    if len(report["failed"]) < SHOWN:
        case, said = bench.smaller(number, case, said)
    report["failed"].append(bench.again(number, case, said))
    report["hung"] += said[0].startswith(HUNG)
    return generated_left.JUDGED


def of_soak(vendor: str, seed: int) -> dict[str, Any]:
    """What soak draws."""
    return check(vendor, seed, PLANS[vendor])


def main() -> None:
    parser = argparse.ArgumentParser(description="Repeat one case of drawn environments.")
    parser.add_argument("vendor", choices=sorted(TABLES))
    parser.add_argument("seed", type=int)
    parser.add_argument("number", type=int)
    parser.add_argument("variables", nargs="*", metavar="NAME=VALUE")
    asked = parser.parse_args()
    if wrong := [word for word in asked.variables if "=" not in word]:
        parser.error(f"got {wrong[0]!r}, expected NAME=VALUE")
    case = dict(word.split("=", 1) for word in asked.variables)
    found, margin = Bench(asked.vendor, asked.seed).failures(asked.number, case)
    print("\n".join(found) or f"nothing is wrong: {margin:.3g} of its gates")


if __name__ == "__main__":
    main()
