"""The smallest fault inside a library that each check sees, by bisection on all checks at once.

In: a way to run checks with a setting for each. Out: by check, the sizes and how often a rare fault is seen.

A check that never calls the library says nothing, and is left out. Checks that read the record of one launch
get one setting together (a unit), and the launch's calls are counted for each of them.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planned import Setting

MANTISSA = 23  # of float32
FLIP = Setting(kind="flip")
SHARES = (65536, 4096, 256, 16, 1)  # one element in so many
# From the smallest fault to the largest.
ELEMENTS = {
    **{f"bit {bit} of one": replace(FLIP, size=bit) for bit in range(MANTISSA, 0, -1)},
    **{f"bit 1 of 1/{step}": replace(FLIP, step=step) for step in SHARES},
}
COARSE = dict([*ELEMENTS.items()][::3])
KEPT = {f"{bits} bits kept": Setting(kind="short", size=bits) for bits in range(MANTISSA - 1, -1, -1)}
LAST, SLOW = Setting(kind="last"), Setting(kind="slow", size=10)
HALF = "10 bits kept"  # sums of fp16
COMMON = (10, 100, 1000)  # one call in so many
COSTLY_S = 8.0  # a check that took longer gets fewer runs
RUNS, COSTLY_RUNS = 3, 2
# Checks whose ids begin so read what one launch left.
SHARED = (
    "test_training.py::",
    "test_training_variants.py::test_gradients_at_full_width",
    "test_training_variants.py::",
    "test_collectives.py::",
)
SEEN, MISSED = ("failed", "error"), "passed"

Found = dict[str, dict[str, Any]]  # by check
Outcomes = Mapping[str, str]  # by check
# Asks for one run: of these checks, with this setting. It gets the outcomes of those that ran to their end.
Asking = Generator[tuple[Sequence[str], Setting], Outcomes]
# By check: the outcome, and the calls of each library.
Counts = Mapping[str, Mapping[str, int]]
Run = Callable[[Sequence[str], Mapping[str, Setting]], tuple[Outcomes, Counts]]


@dataclass(frozen=True)
class Unit:
    """Checks that get one setting together: their calls of a library, and what is found out about them."""

    library: str
    calls: int
    seconds: float
    found: Found


def bisect(name: str, sizes: Mapping[str, Setting], found: Found) -> Asking:
    """Look for the smallest size that each check sees; None if it sees none of them."""
    bounds = dict.fromkeys(found, (-1, len(sizes)))  # the largest that it missed, the smallest that it saw
    while unknown := {check: (low, high) for check, (low, high) in bounds.items() if high - low > 1}:
        low, high = max(unknown.values(), key=lambda bound: bound[1] - bound[0])
        middle = (low + high) // 2
        outcomes = yield list(unknown), list(sizes.values())[middle]
        for check, (low, high) in unknown.items():
            if check not in outcomes:  # it had no verdict or did not call the library, and may never do so
                del bounds[check]
            elif low < middle < high:
                bounds[check] = (low, middle) if outcomes[check] in SEEN else (middle, high)
    for check, (_, high) in bounds.items():
        found[check][name] = [*sizes, None][high]


def tally(name: str, setting: Setting, times: int, found: Found, checks: Sequence[str]) -> Asking:
    """Count in how many runs each check sees a fault, as [seen, runs]."""
    for _ in range(times if checks else 0):
        outcomes = yield checks, setting
        for check in outcomes:
            seen, runs = found[check].get(name, (0, 0))
            found[check][name] = [seen + (outcomes[check] in SEEN), runs + 1]


def ask(unit: Unit) -> Asking:
    """All that is asked about a unit. Rare faults go to checks that see the constant one.

    A costly unit has fewer sizes, and is asked about the rarest fault first, until it is seen in each run;
    any other begins with the commonest, until it is never seen.
    """
    found, costly = unit.found, unit.seconds > COSTLY_S
    yield from bisect("elements", COARSE if costly else ELEMENTS, found)
    found = {check: told for check, told in found.items() if told}  # the others do not call the library
    yield from tally("last", LAST, 1, found, list(found))
    if costly:
        yield from tally(HALF, KEPT[HALF], 1, found, list(found))
    else:
        yield from bisect("kept", KEPT, found)
        yield from tally("slow", SLOW, 1, found, list(found))
    able = [check for check, told in found.items() if (told["elements"] or "").endswith("of one")]
    times, ends = (COSTLY_RUNS, COSTLY_RUNS) if costly else (RUNS, 0)
    for every in reversed(COMMON) if costly else COMMON:
        name = f"1/{every}"
        yield from tally(name, replace(FLIP, every=every), times, found, able)
        able = [check for check in able if found[check].get(name, [ends])[0] != ends]


def units(library: str, outcomes: Outcomes, counts: Counts, seconds: Mapping[str, float]) -> list[Unit]:
    """The healthy checks that call the library, alone or by a launch that they share."""
    groups: dict[str, list[str]] = {}
    for check, outcome in outcomes.items():
        if outcome == MISSED:
            groups.setdefault(next((key for key in SHARED if check.startswith(key)), check), []).append(check)
    made = [
        Unit(
            library,
            sum(counts.get(check, {}).get(library, 0) for check in group),
            sum(seconds.get(check, 0.0) for check in group),
            {check: {} for check in group},
        )
        for group in groups.values()
    ]
    return [unit for unit in made if unit.calls]


def search(asked: Sequence[Unit], run: Run) -> Iterator[None]:
    """Ask on until all is known; what `asked` has found may be read after each round.

    Checks that call several libraries are asked about one after the other.
    """
    waiting: dict[tuple[str, ...], list[Unit]] = {}
    for unit in asked:
        waiting.setdefault(tuple(unit.found), []).append(unit)
    questions = [
        (unit := group.pop(0), asking := ask(unit), next(asking), group) for group in waiting.values()
    ]
    number = 0
    while questions:
        number += 1
        settings = {
            check: replace(setting, library=unit.library, seed=number)
            for unit, _, (_, setting), _ in questions
            for check in unit.found
        }
        outcomes, counts = run([check for _, _, (checks, _), _ in questions for check in checks], settings)
        left = []
        for unit, asking, (checks, _), group in questions:
            reached = any(counts.get(check, {}).get(unit.library) for check in unit.found)
            ended = {c: outcomes[c] for c in checks if reached and outcomes.get(c) in (*SEEN, MISSED)}
            try:
                left.append((unit, asking, asking.send(ended), group))
            except StopIteration:
                if group:
                    left.append((after := group.pop(0), asking := ask(after), next(asking), group))
        questions = left
        yield


def table(asked: Sequence[Unit]) -> Iterator[str]:
    """What was found, as a table in Markdown: a row for each check that sees a fault or was asked alone."""
    asks = ("elements", "kept", HALF, "last", "slow", *(f"1/{every}" for every in COMMON))
    yield "| library | check | calls | " + " | ".join(asks) + " |"
    yield "|---" * (3 + len(asks)) + "|"
    for unit in asked:
        for check, told in unit.found.items():
            if told and (len(unit.found) == 1 or told.get("elements") or told.get("last", [0])[0]):
                cells = (_cell(name, told) for name in asks)
                yield f"| {unit.library} | `{check}` | {unit.calls} | " + " | ".join(cells) + " |"


def _cell(name: str, told: Mapping[str, Any]) -> str:
    """An answer in words: of a rare fault also the probability that one of seven nights sees it."""
    if name not in told:
        return ""
    answer = told[name]
    if not isinstance(answer, list):
        return answer or "none"
    seen, runs = answer
    nights = f", {in_nights(seen, runs):.2f}" if name.startswith("1/") else ""
    return f"{seen} of {runs}{nights}"


def in_nights(seen: int, runs: int, nights: int = 7) -> float:
    """The probability that a fault seen in so many runs is seen in one of some nights."""
    return 1 - (1 - seen / runs) ** nights
