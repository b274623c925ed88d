"""How often each rule of stackcheck/history/regressions.py finds a slow-down, and how often it cries wolf.

Usage: python benchmarks/drift.py. Prints the tables of docs/reference/trust.md, in two minutes, from seeded
draws.

Recorded noise: 20 fresh healthy processes on one H200 (docs/results/paired-h200.json)
for pairs; repeats in one process (docs/results/suites-h200-x2-standard.json) for the
noisiest judged metric; two standard runs for the numeric margins. Assumed, as no node has recorded nights
yet: how nights differ, and that 3 % of the runs are 4 to 12 % slow.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from stackcheck.history import regressions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RESULTS = Path(__file__).parents[1] / "docs" / "results"
CHANCE = random.Random(20261122)
PAIRS = 4000
DROPS = (0.0, 0.01, 0.015, 0.02, 0.03, 0.05)
NIGHT_DROPS = (0.02, 0.03, 0.05, 0.12)
HISTORY = 60  # nights before the drop
REPEATS = 30  # simulated fleets for each cell
OUTLIERS, SLOWEST = 0.03, (0.04, 0.12)

Noise = "Callable[[], float]"


def recorded_processes() -> dict[str, list[float]]:
    """Metric -> what each healthy process measured, relative to the median of all."""
    runs = json.loads((RESULTS / "paired-h200.json").read_text())
    healthy = [run for run in runs["runs"] if run["arm"].startswith("healthy")]
    values = {name: [statistics.median(run[name]) for run in healthy] for name in runs["units"]}
    return {name: relative(each) for name, each in values.items()}


def noisiest_repeats() -> tuple[str, list[float]]:
    """The judged metric whose repeats in one process differ most."""
    document = json.loads((RESULTS / "suites-h200-x2-standard.json").read_text())
    judged = [
        (f"{metric['name']} of {check['id'].partition('::')[2]}", relative(metric["repeats"]))
        for check in document["checks"]
        for metric in check["metrics"]
        if metric["direction"] and len(metric["repeats"]) >= 5
    ]
    return max(judged, key=lambda item: statistics.stdev(item[1]))


def relative(values: Sequence[float]) -> list[float]:
    middle = statistics.median(values)
    return [value / middle for value in values]


def normal(spread: float, *, outliers: bool) -> Noise:
    def draw() -> float:
        slow = CHANCE.uniform(*SLOWEST) if outliers and CHANCE.random() < OUTLIERS else 0.0
        return CHANCE.gauss(1, spread) * (1 - slow)

    return draw


def pairs() -> None:
    """Rule 2: 5 + 5 runs of the reference against itself, then 5 + 5 against the candidate."""
    noises: dict[str, Noise] = {
        f"recorded: {name}, one H200": lambda pool=pool: CHANCE.choice(pool)
        for name, pool in recorded_processes().items()
    }
    name, pool = noisiest_repeats()
    noises[f"recorded: {name}, repeats in one process"] = lambda: statistics.median(CHANCE.choices(pool, k=5))
    noises["assumed: 0.3 %, 3 % of runs 4 to 12 % slow"] = normal(0.003, outliers=True)
    noises["assumed: 0.4 %, 3 % of runs 4 to 12 % slow"] = normal(0.004, outliers=True)
    noises["assumed: 1 %"] = normal(0.01, outliers=False)
    print("| noise of one run | spread | says noisy | false alarms |", end="")
    print(" | ".join(f" {drop:.1%} slower" for drop in DROPS[1:]), "|")
    print("|---" * (len(DROPS) + 3) + "|")
    for name, draw in noises.items():
        spread = regressions.spread([draw() for _ in range(2000)])
        found = [paired_share(draw, drop) for drop in DROPS]
        cells = (f"{found[0][1]:.3f}", *(f"{share[0]:.3f}" for share in found))
        print(f"| {name} | {spread:.2%} | {' | '.join(cells)} |")


def paired_share(draw: Noise, drop: float) -> tuple[float, float]:
    """The share of pairs that end `slower`, and that end `noisy`."""
    verdicts = []
    for _ in range(PAIRS):
        first, second, reference = ([draw() for _ in range(5)] for _ in range(3))
        candidate = [draw() * (1 - drop) for _ in range(5)]
        found = regressions.paired(reference, candidate, "min", again=(first, second))
        verdicts.append(found.verdict)
    return verdicts.count("slower") / PAIRS, verdicts.count("noisy") / PAIRS


def night(spread: float) -> float:
    """The value of one night: the median of 5 processes on a node that has a good or a bad night."""
    runs = [normal(0.001, outliers=True)() for _ in range(5)]
    return CHANCE.gauss(1, spread) * statistics.median(runs)


def one_series(name: str, spread: float, alarm: Callable[[list[float]], bool]) -> None:
    """A rule that looks at one series each night: false alarms in 30 nights, found on night 1, 3, 7."""
    false = 0
    for _ in range(REPEATS):
        values = [night(spread) for _ in range(HISTORY + 30)]
        false += sum(alarm(values[:end]) for end in range(HISTORY + 1, HISTORY + 31))
    cells = [found_by(spread, drop, alarm) for drop in NIGHT_DROPS]
    print(f"| {name} | {spread:.1%} | {false / REPEATS:.2f} |", " | ".join(cells), "|")


def found_by(spread: float, drop: float, alarm: Callable[[list[float]], bool]) -> str:
    first = []
    for _ in range(3 * REPEATS):
        values = [night(spread) for _ in range(HISTORY)]
        after = [night(spread) * (1 - drop) for _ in range(7)]
        ends = (end for end in range(1, 8) if alarm(values + after[:end]))
        first.append(next(ends, 99))
    return "/".join(f"{sum(each <= by for each in first) / len(first):.2f}" for by in (1, 3, 7))


def floor(values: list[float]) -> bool:
    """Rule 1, with its automatic repeat in the same night."""
    base = statistics.median(values[:HISTORY])
    again = night(0.001) * statistics.median(values[-1:])
    return regressions.floor(base, values[-1], again, "min") == "fail"


def own_baseline(values: list[float]) -> bool:
    return bool(regressions.below_own_baseline(values[-31:-1], values[-1], "min"))


def recent_step(values: list[float]) -> bool:
    """Rule 4 for one series alone, as it is not used: what a second witness is for."""
    found = regressions.steps(values, "min")
    return any(step.loss > 0 and step.night >= len(values) - 10 for step in found)


def fleet(spread: float, drop: float, nights: int) -> list[regressions.Series]:
    """4 nodes with 5 metrics; the last `nights` nights are slower on all of them."""
    count = HISTORY + nights
    made = []
    for node in range(4):
        good = [CHANCE.gauss(1, spread) for _ in range(count)]  # shared by the metrics of a node
        for metric in range(5):
            own = [normal(0.001, outliers=True)() for _ in range(count)]
            values = [
                a * b * (1 - drop if i >= HISTORY else 1)
                for i, (a, b) in enumerate(zip(good, own, strict=True))
            ]
            made.append(
                regressions.Series(
                    node=f"node {node}",
                    check=f"check {metric}",
                    metric="speed",
                    direction="min",
                    nights=tuple(range(count)),
                    values=tuple(values),
                )
            )
    return made


def fleets(spread: float) -> None:
    """Rule 4 as it is used: 20 series of a fleet, a step needs two nodes or two metrics."""
    recent = [
        [each for each in regressions.warnings(fleet(spread, 0.0, 30)) if each.night >= HISTORY]
        for _ in range(REPEATS)
    ]
    cells = []
    for drop in NIGHT_DROPS:
        by = []
        for nights in (1, 3, 7):
            found = [regressions.warnings(fleet(spread, drop, nights)) for _ in range(REPEATS)]
            hits = sum(any(abs(each.night - HISTORY) <= 2 for each in warned) for warned in found)
            by.append(hits / REPEATS)
        cells.append("/".join(f"{share:.2f}" for share in by))
    false = sum(map(len, recent)) / REPEATS
    print(
        f"| 4, steps on two nodes or metrics, 20 series | {spread:.1%} | {false:.2f} |",
        " | ".join(cells),
        "|",
    )


def recorded_margins() -> dict[str, list[float]]:
    """Check -> how near its numerics came to their gate, in the two standard runs of H200s."""
    found: dict[str, list[float]] = {}
    for name in ("suites-h200-x1-standard.json", "suites-h200-x2-standard.json"):
        document = json.loads((RESULTS / name).read_text())
        for check in document["checks"]:
            for metric in check["metrics"]:
                if metric["name"] == "numeric_worst_margin" and metric["value"] is not None:
                    found.setdefault(check["id"], []).append(metric["value"])
    return {check: values for check, values in found.items() if len(values) == 2}


def margins() -> None:
    """Rule 3 for the numeric margins, with the recorded differences of two runs as the noise of a night."""
    recorded = list(recorded_margins().values())
    differences = [b - a for a, b in recorded]
    moved = [abs(each) for each in differences if each]
    print(
        f"recorded: {len(recorded)} margins in two runs, {len(recorded) - len(moved)} equal to the last bit;"
    )
    print(f"the largest difference is {max(moved, default=0.0):.2g} of the gate")
    print()
    print("| a margin grows by | found the first night |")
    print("|---|---|")
    for growth in (0.0, 0.02, 0.05, 0.1, 0.2):
        found = [margin_found(CHANCE.choice(recorded)[0], differences, growth) for _ in range(PAIRS)]
        print(f"| {growth:g} of its gate | {sum(found) / PAIRS:.3f} |")


def margin_found(usual: float, differences: Sequence[float], growth: float) -> bool:
    """Whether a margin that has grown is found against 30 nights; 1 is added as history/alerts.py does."""
    nights = [1 + usual + CHANCE.choice(differences) for _ in range(30)]
    value = 1 + usual + growth + CHANCE.choice(differences)
    return bool(regressions.below_own_baseline(nights, value, "max"))


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    pairs()
    print()
    margins()
    print()
    print("| rule | spread of nights | false alarms in 30 nights |", end="")
    print(" | ".join(f" {drop:.0%} slower: night 1/3/7" for drop in NIGHT_DROPS), "|")
    print("|---" * (len(NIGHT_DROPS) + 3) + "|")
    for spread in (0.003, 0.01):
        one_series("1, floor (10 %, repeated)", spread, floor)
        one_series("3, the chip's own baseline", spread, own_baseline)
        one_series("steps in one series (not used alone)", spread, recent_step)
        fleets(spread)


if __name__ == "__main__":
    main()
