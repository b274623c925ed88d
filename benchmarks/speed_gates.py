"""How often a run that is held to a certified one finds a loss of 5 %, and how often it raises a false alarm.

    python benchmarks/speed_gates.py

Resampled from four runs of 2 x H200 in docs/results, on eight chips. A healthy run is a recorded one, moved
by the spread of its own repeats. In a slower run one figure is slower, each in its turn. Training is not
compared with a run of other trainers.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from pathlib import Path
from typing import Any

from stackcheck.certificate import predecessor
from stackcheck.certificate.predecessor import loss
from stackcheck.history.regressions import spread
from stackcheck.suite import results

RESULTS = Path(__file__).parents[1] / "docs" / "results"
FILES = ("certificate-h200-x2/result.json", "stack-h200-x2-fa4/result.json")
FILES = (*FILES, "suites-h200-x2-gate.json", "suites-h200-x2-standard.json")
DRAWS = 2000
GOAL = 0.05  # the loss that has to be found
SURELY = 0.995

Key = predecessor.Key
Figures = dict[Key, dict[str, Any]]


def figures(name: str) -> Figures:
    """The judged figures of a recorded run, each with the spread of its median and the trainers' digest."""
    result = results.load_result(RESULTS / name)
    repeats = [metric.repeats for check in result.checks for metric in check.metrics if _gated(metric)]
    found = {}
    for figure, values in zip(predecessor.judged(result), repeats, strict=True):
        timed = [value for value in values if value]
        noise = spread(timed) / len(timed) ** 0.5 if timed else 0.0
        trainers = result.inputs.trainers if figure["name"].startswith("train_") else ""
        found[predecessor.key(figure)] = figure | {"noise": noise, "trainers": trainers}
    return found


def _gated(metric: results.Metric) -> bool:
    return bool((metric.direction or metric.name in predecessor.OWN) and metric.value)


def lost(before: Figures, now: Figures, draw: random.Random, slower: float = 0.0) -> dict[Key, bool]:
    """Of each figure that two runs share: whether it fails where it alone is slower by a share."""
    # In the order of the run: that of a set differs from process to process, and the draws follow it.
    same = [key for key in before if key in now and before[key]["trainers"] == now[key]["trainers"]]
    moved = {
        key: now[key] | {"value": now[key]["value"] * (1 + draw.gauss(0, now[key]["noise"]))} for key in same
    }
    limits = predecessor.allowed({key: before[key] for key in same}, moved)
    found = {}
    for key in same:
        direction = before[key]["direction"]
        rate = 1 - slower if direction == "min" else 1 / (1 - slower)
        found[key] = loss(before[key]["value"], moved[key]["value"] * rate, direction) > limits[key]
    return found


def best(runs: list[Figures]) -> Figures:
    """The baseline after several certificates: the best value of each figure."""
    found: Figures = {}
    for figure_key, figure in (item for run in runs for item in run.items()):
        old = found.get(figure_key)
        if not old or loss(old["value"], figure["value"], figure["direction"]) < 0:
            found[figure_key] = figure
    return found


def false_alarms(runs: list[Figures], draws: int = DRAWS) -> float:
    """The share of healthy runs that fail, each held to the best of three other runs."""
    draw = random.Random(31)
    failed = 0
    for _ in range(draws):
        now, *before = draw.sample(runs, len(runs))
        failed += any(lost(best(before), now, draw).values())
    return failed / draws


def found(runs: list[Figures], slower: float, *, same_chips: bool, draws: int = DRAWS) -> dict[Key, float]:
    """Of each figure: the share of slower runs that fail, on the baseline's chips or on any."""
    draw = random.Random(31)
    tried, seen = Counter[Key](), Counter[Key]()
    for _ in range(draws):
        before, now = draw.sample(runs, 2)
        below = lost(before, before if same_chips else now, draw, slower)
        tried.update(below.keys())
        seen.update(key for key, is_lost in below.items() if is_lost)
    return {key: seen[key] / tried[key] for key in tried}


def main() -> None:
    """Print the tables of docs/reference/trust.md."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    runs = [figures(name) for name in FILES]
    print(f"false alarms: {false_alarms(runs):.4f} of {DRAWS} runs")
    for same_chips in (True, False):
        for slower in (0.02, 0.05, 0.06, 0.08, 0.10):
            shares = found(runs, slower, same_chips=same_chips)
            surely = sum(share >= SURELY for share in shares.values())
            mean = sum(shares.values()) / len(shares)
            chips = "the same" if same_chips else "other"
            print(f"{chips} chips, {slower:.0%} slower: {surely} of {len(shares)} figures, mean {mean:.2f}")
            rare = {key: share for key, share in shares.items() if slower == GOAL and share < SURELY}
            for (_, name, _, asked), share in sorted(rare.items()):
                print(f"    {name} {asked}: {share:.2f}")


if __name__ == "__main__":
    main()
