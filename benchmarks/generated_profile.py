"""Write what healthy operators need in generated cases: tests/acceptance/workloads/generated_profile.json.

In: torch, seeds that no run uses. Out: each operator that needs more than the judge's units, and how much.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "acceptance"))
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

from workloads import generated, generated_judge, generated_operators  # noqa: E402


def main(first: int, last: int, count: int, file: Path) -> None:
    """Draw all cases of the seeds, and keep the worst units of each operator."""
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    with generated._plain():
        for seed in range(first, last):
            for number in range(count):
                source = random.Random(f"operators {seed} {number}")
                case = generated_operators.draw(source, seed * 1_000_003 + number)
                call = generated._fitting(functools.partial(generated_operators.call_of, case))
                was = known.get(case.operator, {})
                units = _units(call) if call else 0.0
                if call is None or units <= generated.NEEDED:
                    continue
                if math.isinf(units):
                    was = {**was, "overflows": True}
                if units > generated.EXCUSED:
                    was = {**was, "noisy": True}
                    again = replace(call, noisy=True, overflows=was.get("overflows", False))
                    units = _units(again)
                if units > generated.NEEDED:
                    was = {**was, "units": max(math.ceil(units), was.get("units", 0))}
                print(f"{case}: {was}", flush=True)
                known[case.operator] = was
                file.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _units(call: generated_judge.Call) -> float:
    said = generated._judged(call, generated.NEEDED)
    return said[0] * generated.FACTOR * generated.NEEDED if said else 0.0


if ASKED:
    main(ASKED.first, ASKED.last, ASKED.count, ASKED.file)
