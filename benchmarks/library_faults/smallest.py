"""The smallest fault inside a library that each check sees, by bisection on all checks at once.

In: a way to run checks with a setting for each. Out: by check, the sizes and how often a rare fault is seen.

A check that never calls the library says nothing, and is left out. Checks that read the record of one launch
get one setting together (a unit), and the launch's calls are counted for each of them.
"""

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
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
KEPT = {f"{bits} bits kept": Setting(kind="short", size=bits) for bits in range(MANTISSA - 1, -1, -1)}
LAST, SLOW = Setting(kind="last"), Setting(kind="slow", size=10)
RARE = {10: 4, 100: 4, 1000: 4}  # one call in so many: runs
# Checks whose ids begin so read what one launch left.
SHARED = (
    "test_training.py::",
    "test_training_variants.py::test_gradients_at_full_width",
    "test_training_variants.py::",
)
SEEN, MISSED = ("failed", "error"), "passed"

Found = dict[str, dict[str, Any]]  # by check
Outcomes = Mapping[str, str]  # by check
# Asks for one run: of these checks, with this setting. It gets the outcomes of those that ran to their end.
Asking = Generator[tuple[Sequence[str], Setting], Outcomes]
Run = Callable[[Sequence[str], Mapping[str, Setting]], Outcomes]


def bisect(name: str, sizes: Mapping[str, Setting], found: Found) -> Asking:
    """Look for the smallest size that each check sees; None if it sees none of them."""
    bounds = dict.fromkeys(found, (-1, len(sizes)))  # the largest that it missed, the smallest that it saw
    while unknown := {check: (low, high) for check, (low, high) in bounds.items() if high - low > 1}:
        low, high = max(unknown.values(), key=lambda bound: bound[1] - bound[0])
        middle = (low + high) // 2
        outcomes = yield list(unknown), list(sizes.values())[middle]
        for check, (low, high) in unknown.items():
            if check not in outcomes:  # it had no verdict, and may never have one
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


def ask(found: Found) -> Asking:
    """All that is asked about a unit. A rare fault is planted only where a commoner one is seen."""
    yield from bisect("elements", ELEMENTS, found)
    yield from bisect("kept", KEPT, found)
    yield from tally("last", LAST, 1, found, list(found))
    yield from tally("slow", SLOW, 1, found, list(found))
    able = [check for check, told in found.items() if (told.get("elements") or "").endswith("of one")]
    for every, times in RARE.items():
        yield from tally(f"1/{every}", replace(FLIP, every=every), times, found, able)
        able = [check for check in able if found[check].get(f"1/{every}", [0])[0]]


def units(outcomes: Outcomes, counts: Mapping[str, tuple[int, int]]) -> list[Found]:
    """The healthy checks that call the library, alone or by a launch that they share, with their calls."""
    groups: dict[str, list[str]] = {}
    for check, outcome in outcomes.items():
        if outcome == MISSED:
            groups.setdefault(next((key for key in SHARED if check.startswith(key)), check), []).append(check)
    calls = {key: sum(counts.get(check, (0, 0))[0] for check in group) for key, group in groups.items()}
    return [{check: {"calls": calls[key]} for check in group} for key, group in groups.items() if calls[key]]


def search(asked: Sequence[Found], library: str, run: Run) -> Iterator[None]:
    """Ask on until all is known; `asked` is filled in, and may be read after each round."""
    questions = [(found, asking := ask(found), next(asking)) for found in asked]
    number = 0
    while questions:
        number += 1
        settings = {
            check: replace(setting, library=library, seed=number)
            for found, _, (_, setting) in questions
            for check in found
        }
        outcomes = run([check for _, _, (checks, _) in questions for check in checks], settings)
        left = []
        for found, asking, (checks, _) in questions:
            ended = {check: outcomes[check] for check in checks if outcomes.get(check) in (*SEEN, MISSED)}
            with contextlib.suppress(StopIteration):
                left.append((found, asking, asking.send(ended)))
        questions = left
        yield


def in_nights(seen: int, runs: int, nights: int = 7) -> float:
    """The probability that a fault seen in so many runs is seen in one of some nights."""
    return 1 - (1 - seen / runs) ** nights
