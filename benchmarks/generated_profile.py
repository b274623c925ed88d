"""Write what healthy kernels need in generated cases: tests/acceptance/workloads/generated_profile.json.

In: torch, seeds that no run uses. Out: each kernel and operator that needs more than the judge's units.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "acceptance"), str(ROOT / "tests" / "faults")]
PROCESSES = len(os.sched_getaffinity(0))
MOST_UNITS = 16  # a kernel that needs more has errors that grow, or noise of its own
KEPT_EACH = 16  # cases that a process takes; then the file is written


def asked() -> argparse.Namespace:
    """The seeds and the numbers of their cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int, help="a seed, such as 1000")
    parser.add_argument("first", type=int, help="the first case, such as 0")
    parser.add_argument("last", type=int, help="the case after the last, such as 1600")
    return parser.parse_args()


ASKED = asked() if __name__ == "__main__" else None  # before torch is loaded

import generated_power  # noqa: E402
from workloads import generated, generated_inside, generated_judge, generated_operators  # noqa: E402

Grown = list[tuple[str, str, int]]


def main(seed: int, first: int, last: int) -> None:
    """Judge these cases, and keep what each kernel and each operator needs."""
    known = generated_inside.profile()
    generated_operators.rows()
    parts = [
        [(seed, n) for n in range(at, min(at + KEPT_EACH, last))] for at in range(first, last, KEPT_EACH)
    ]
    for part in generated_power.each(_part, parts, PROCESSES):
        for words, grown in part:
            for one in grown:
                _keep(known, *one)
            if grown:
                print(f"{words}: {grown}", flush=True)
        text = json.dumps(known, indent=1, sort_keys=True)
        generated_inside.PROFILE.write_text(text + "\n", encoding="utf-8")


def _part(cases: list[tuple[int, int]]) -> list[tuple[str, Grown]]:
    return [needs(case) for case in cases]


def _keep(known: dict[str, Any], kind: str, key: str, units: int) -> None:
    if kind == "units":
        known["units"][key] = max(units, known["units"].get(key, 0))
    else:
        known[kind] = sorted({*known[kind], key})


def needs(of: tuple[int, int]) -> tuple[str, Grown]:
    """What explains a case, beyond what is known."""
    case, grown = generated_operators.draw(*of), []
    with generated._plain():
        forms = generated_operators.forms_of(case)
        for _, call in forms:
            while more := _needs_inside(call):
                grown += more
                for one in more:
                    _keep(generated_inside.profile(), *one)
        said = generated._worst(forms, generated.OPERATORS_NEED[case.dtype]) if forms else None
        if said and said[0] > 0.5:  # its kernels are at most there now
            grown.append(("operators" if "units" in said[1] else "broken", case.operator, 0))
            _keep(generated_inside.profile(), *grown[-1])
    return str(case), grown


def _needs_inside(call: generated_judge.Call) -> Grown:
    with generated_inside.Inside() as inside, contextlib.suppress(Exception):
        generated_judge.results(call)
    known = generated_inside.profile()
    found: Grown = []
    for key, units in inside.found.items():
        if units <= generated_inside.needed(key):
            continue
        name = key.split()[0]
        if math.isinf(units):
            found.append(("unknown" if key in known["overflows"] else "overflows", key, 0))
        elif units <= MOST_UNITS:
            found.append(("units", key, math.ceil(units)))
        elif units <= inside.counts[key] / generated_inside.GROWS and name not in known["grows"]:
            found.append(("grows", name, 0))
        else:
            found.append(("unknown" if key in known["noisy"] else "noisy", key, 0))
    return found


if ASKED:
    main(ASKED.seed, ASKED.first, ASKED.last)
