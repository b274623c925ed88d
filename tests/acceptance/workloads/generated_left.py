"""What drawn families leave out, counted under a reason: nothing disappears because nobody can judge it.

In: reasons, said where a case or a part of one is left, and what was judged. Out: how often each was said.

Who counts opens `counted`, and gets what the body says; who tries something else meanwhile (other numbers, a
smaller case) opens one of its own and drops it. What is said where nobody counts is lost.
"""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

JUDGED = "judged"
# What torch raises where it refuses arguments; of what else it raises nobody says that it is healthy.
REFUSED = (RuntimeError, TypeError, ValueError, IndexError, AssertionError, MemoryError)
CALL = "call"  # why a case or a form of it is left: of what it is made of nobody keeps this count
# The least shares that must be judged of what cases are made of, by the first word of its name; of cases each
# family has its own. A processor has 0.75 of `form out`, 0.83 of `variation` and more of all others.
LEAST = {"form": 0.5, "kernel": 0.5, "variation": 0.5, "surroundings": 0.5}
NO_MEMORY = ("out of memory", "can't allocate memory")
Left = dict[str, dict[str, int]]  # what, reason: how many
_COUNTS: list[Counter[tuple[str, str]]] = []


class RefusedError(RuntimeError):
    """No witness takes a call; the cause is what torch raised. What else a judge raises is its own fault."""


def say(what: str, reason: str = JUDGED) -> None:
    """Count one of these things under a reason."""
    if _COUNTS:
        _COUNTS[-1][what, reason] += 1


@contextlib.contextmanager
def counted() -> Iterator[Counter[tuple[str, str]]]:
    """What the body leaves, and what it judges."""
    _COUNTS.append(Counter())
    try:
        yield _COUNTS[-1]
    finally:
        _COUNTS.pop()


@contextlib.contextmanager
def refusing(
    what: str, reason: str, errors: tuple[type[Exception], ...] | type[Exception] = REFUSED
) -> Iterator[None]:
    """Run the body; if torch refuses something in it, count that and go on behind it."""
    try:
        yield
    except errors as error:
        say(what, f"{reason}: {_named(error)}")


@contextlib.contextmanager
def witnessing(errors: tuple[type[Exception], ...] = REFUSED) -> Iterator[None]:
    """Run a witness, or what a package makes. Raises `RefusedError` if that raises one of these errors."""
    try:
        yield
    except errors as error:
        raise RefusedError(f"{type(error).__name__}: {error}") from error


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """Run the body; if there is no memory for it, count that and go on behind it."""
    try:
        yield
    except RuntimeError as error:
        if not is_for_memory(error):
            raise
        say(CALL, "there is no memory for it")


def _named(error: Exception) -> str:
    """The kind of an error.

    A lack of memory has words by which no check is run again with more of it: a case may need more than
    there is.
    """
    return "there is no memory for it" if is_for_memory(error) else type(error.__cause__ or error).__name__


def is_for_memory(error: Exception) -> bool:
    """Whether it was raised because memory was not enough."""
    return any(word in str(error).lower() for word in NO_MEMORY)


def why(counts: Counter[tuple[str, str]]) -> str:
    """The first reason that was said of a call; of its forms, if none was."""
    for wanted in (CALL, "form"):
        for what, reason in counts:
            if what.split()[0] == wanted and reason != JUDGED:
                return reason
    return "nobody says why"


def add(counts: Counter[tuple[str, str]]) -> None:
    """Count what another counter has of parts."""
    for (what, reason), count in counts.items():
        if what != CALL and _COUNTS:
            _COUNTS[-1][what, reason] += count


def summed(every: Iterable[Mapping[tuple[str, str], int]]) -> Left:
    """The sums of counts, to be sent and kept."""
    found: Left = {}
    for counts in every:
        for (what, reason), count in counts.items():
            if what == CALL:
                continue
            its = found.setdefault(what, {})
            its[reason] = its.get(reason, 0) + count
    return found


def wrong(left: Mapping[str, Mapping[str, int]], asked: int, judged: int) -> list[str]:
    """What is wrong with a report: cases that are nowhere, and parts of which too few were judged."""
    cases = left.get("case", {})
    said = [f"{sum(cases.values())} of {asked} cases are judged or left for a reason: {dict(cases)}"]
    found = said * (sum(cases.values()) != asked or cases.get(JUDGED, 0) != judged)
    for what, its in left.items():
        least = LEAST.get(what.split()[0], 0.0)
        if its.get(JUDGED, 0) < least * sum(its.values()):
            found.append(f"of each {what} too few were judged, at least {least:.0%} must be: {dict(its)}")
    return found
