"""Write what healthy kernels need in generated cases: workloads/generated_profiles/ARCHITECTURE.json.

In: torch, a device, seeds that no run uses. Out: each kernel and operator that needs more than the gates.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "acceptance")]
PROCESSES = min(len(os.sched_getaffinity(0)), 14)
MOST_UNITS = 16  # a kernel that needs more has errors that grow, or noise of its own


def asked() -> argparse.Namespace:
    """The seeds and the numbers of their cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int, help="a seed, such as 1000")
    parser.add_argument("first", type=int, help="the first case, such as 0")
    parser.add_argument("last", type=int, help="the case after the last, such as 1600")
    return parser.parse_args()


ASKED = asked() if __name__ == "__main__" else None  # before torch is loaded

from workloads import (  # noqa: E402
    generated,
    generated_draws,
    generated_inside,
    generated_judge,
    generated_operators,
    generated_processes,
)

Grown = list[tuple[str, str, int]]
Watch = Callable[[], generated_inside.Inside]


def main(seed: int, first: int, last: int) -> None:
    """Judge these cases, and keep what each kernel and each operator needs: of this architecture alone."""
    if not generated_inside.path().exists():
        generated_inside.path().write_text("{}\n", encoding="utf-8")
    known = generated_inside.profile()
    generated_operators.rows()
    cases = ((seed, n) for n in range(first, last))
    for case, said in generated_processes.each(needs, cases, PROCESSES):
        if isinstance(said, generated_processes.Ended):
            print(f"{generated_operators.draw(*case)}: {said.words}", flush=True)
            continue
        words, grown = said
        for one in grown:
            keep(known, *one)
        if grown:
            print(f"{words}: {grown}", flush=True)
            text = json.dumps(known, indent=1, sort_keys=True)
            generated_inside.path().write_text(text + "\n", encoding="utf-8")


def keep(known: dict[str, Any], kind: str, key: str, units: int) -> None:
    """Add what was found to what is known."""
    if kind == "units":
        known["units"][key] = max(units, known["units"].get(key, 0))
    else:
        known[kind] = sorted({*known[kind], key})


def needs(of: tuple[int, int], watch: Watch = generated_inside.Inside) -> tuple[str, Grown]:
    """What explains a case, beyond what is known."""
    case, grown = generated_operators.draw(*of), []
    with generated._plain(), generated_processes.limited():
        forms = generated_operators.forms_of(case)
        for _, call in forms:
            sent = generated.is_sent(call)
            while sent and (more := _needs_inside(call, watch)):
                grown += more
                for one in more:
                    keep(generated_inside.profile(), *one)
        said = generated._worst(forms, generated_draws.OPERATORS_NEED[case.dtype]) if forms else None
        if said and said[0] > 0.5:  # its kernels are at most there now
            grown.append(("operators" if "units" in said[1] else "broken", case.operator, 0))
            keep(generated_inside.profile(), *grown[-1])
    return str(case), grown


def _needs_inside(call: generated_judge.Call, watch: Watch) -> Grown:
    inside = watch()
    with contextlib.suppress(Exception):
        generated_judge.results(call, within=inside)
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
