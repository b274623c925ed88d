"""When each check of a run waited and ran. In: the checks of result.json. Out: spans, and the limiting chain.

A span's run ends when the check was judged; its wait is for devices and for other checks.
"""

import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SLACK_S = 0.5  # between the end of a check and the start of the one that waited for it


@dataclass(frozen=True)
class Span:
    """A check in seconds since the start of the run."""

    name: str
    began: float
    ran: float
    ended: float
    on_device: bool


def spans(result: Mapping[str, Any]) -> list[Span]:
    """The checks that said when they started, by the time at which they ran."""
    start = dt.datetime.fromisoformat(result["started"])
    found = []
    for check in result["checks"]:
        if check.get("started"):
            began = (dt.datetime.fromisoformat(check["started"]) - start).total_seconds()
            ran = began + check.get("waited_s", 0.0)
            found.append(Span(check["id"], began, ran, ran + check["seconds"], bool(check.get("devices"))))
    return sorted(found, key=lambda span: span.ran)


def chain(found: Sequence[Span]) -> list[Span]:
    """The checks that limited the run: each began when the one before it ended, from the last one back."""
    links: list[Span] = []
    now = max(found, key=lambda span: span.ended, default=None)
    while now is not None:
        links.append(now)
        start = now.ran
        before = [span for span in found if span.ended <= start + SLACK_S and span.ran < start]
        now = max(before, key=lambda span: span.ended, default=None)
    return links[::-1]


def held_s(found: Iterable[Span]) -> float:
    """For how many seconds a check had a device, two at once counted once."""
    total, until = 0.0, 0.0
    for span in sorted((span for span in found if span.on_device), key=lambda span: span.ran):
        total += max(0.0, span.ended - max(until, span.ran))
        until = max(until, span.ended)
    return total


def words(result: Mapping[str, Any], most: int = 5) -> str:
    """The wall time, what it was used for, and the longest checks of the chain that limited it."""
    found = spans(result)
    if not found:
        return "time: no check ran"
    wall = max(span.ended for span in found)
    longest = sorted(chain(found), key=lambda span: span.ran - span.ended)[:most]
    limited = ", ".join(f"{span.name.rpartition('::')[2]} {span.ended - span.ran:.0f} s" for span in longest)
    share = held_s(found) / wall if wall else 0.0
    return (
        f"time: {wall:.0f} s, first check after {found[0].ran:.0f} s, a check had a device for {share:.0%}; "
        f"limited by {limited}"
    )
