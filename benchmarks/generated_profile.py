"""Write what healthy operators need in generated cases: tests/acceptance/workloads/generated_profile.json.

In: torch, seeds that no run uses. Out: each operator that needs more than the judge's units, and how much.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "acceptance"))
PROCESSES = len(os.sched_getaffinity(0))
# What is left undone where an operator is far from float64 with it alone: it is promised for few operators.
UNPROMISED = ("not finite", "expanded")
PROFILE = ROOT / "tests/acceptance/workloads/generated_profile.json"


def asked() -> argparse.Namespace:
    """The seeds, the number of cases of each, and the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=int, help="the first seed, such as 1000")
    parser.add_argument("last", type=int, help="the seed after the last, such as 1060")
    parser.add_argument("count", type=int, help="cases of each seed, such as 500")
    parser.add_argument("file", type=Path, nargs="?", default=PROFILE)
    return parser.parse_args()


ASKED = asked() if __name__ == "__main__" else None  # before torch is loaded

import torch  # noqa: E402

from workloads import generated, generated_operators  # noqa: E402

Known = dict[str, dict[str, Any]]


def main(first: int, last: int, count: int, file: Path) -> None:
    """Draw all cases of the seeds, and keep what each operator needs."""
    known: Known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    generated_operators.rows()
    cases = [(seed, n) for seed in range(first, last) for n in range(count)]
    with multiprocessing.get_context("fork").Pool(PROCESSES, torch.set_num_threads, (1,)) as pool:
        for n, found in enumerate(pool.imap(needs, cases, chunksize=16)):
            if not found:
                continue
            operator, dtype, mine, words = found
            was = known.setdefault(operator, {})
            units = {**was.get("units", {}), **mine.get("units", {})}
            units[dtype] = max(one.get("units", {}).get(dtype, 0) for one in (was, mine))
            without = sorted({*was.get("without", ()), *mine.get("without", ())})
            was.update(mine, units={of: one for of, one in units.items() if one}, without=without)
            known[operator] = {key: one for key, one in was.items() if one}
            print(f"{n}: {words}: {mine}", flush=True)
            file.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def needs(of: tuple[int, int]) -> tuple[str, str, dict[str, Any], str] | None:
    """What an operator needs, if this case says that more is needed than is known."""
    case = generated_operators.draw(*of)
    mine = generated_operators._profile().setdefault(case.operator, {})
    changed = False
    with generated._plain():
        while _grow(mine, case):
            changed = True
    return (case.operator, case.dtype, mine, str(case)) if changed else None


def _grow(mine: dict[str, Any], case: generated_operators.Case) -> bool:
    """Add what explains the case's distance; false if it is explained, or the case is drawn no more."""
    without = mine.get("without", [])
    if mine.get("left out") or {case.sizes, case.numbers} & set(without):
        return False
    forms = generated_operators.forms_of(case)
    least = generated.OPERATORS_NEED[case.dtype]
    said = generated._worst(forms, least) if forms else None
    units = said[0] * generated.FACTOR * least if said else 0.0
    known = mine.get("units", {}).get(case.dtype, 0)
    if said is None or units <= max(2 * least, known):
        return False
    numbers = [one for one in UNPROMISED if one == case.numbers]
    places = [one for one in (forms[said[2]][0], case.sizes) if one]
    if units > generated.EXCUSED and numbers:
        mine["without"] = [*without, *numbers]
    elif math.isinf(units) and not mine.get("overflows"):
        mine["overflows"] = True
    elif generated.EXCUSED < units < math.inf and not mine.get("noisy"):
        mine["noisy"] = True
    elif units > generated.EXCUSED and places:
        mine["without"] = [*without, places[0]]
    elif math.isinf(units):
        mine["left out"] = True
    else:
        mine["units"] = {**mine.get("units", {}), case.dtype: math.ceil(units)}
    return True


if ASKED:
    main(ASKED.first, ASKED.last, ASKED.count, ASKED.file)
