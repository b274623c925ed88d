"""Nodes x checks as rows of text. In: a `FleetRun`. Out: columns and rows, the outliers first. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stackcheck.fleet.collect import NodeOutcome
    from stackcheck.fleet.run import FleetRun

MARKS = {"passed": ".", "failed": "F", "error": "E", "skipped": "s", "invalid": "!"}
MISSING = "-"
LEGEND = ". passed  F failed  E error  s skipped  ! invalid (the machine is unfit)  - no result"
SHOWN_CHECKS = 12  # columns, those that differ between nodes or did not pass
SHOWN_HEALTHY = 20  # rows of nodes that passed and do not stand out


@dataclass(frozen=True)
class Grid:
    """A table, and what its columns stand for."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    checks: tuple[str, ...]
    hidden_checks: int
    hidden_nodes: int


def grid(done: FleetRun) -> Grid:
    """Each node with its outcome in each check that did not pass everywhere."""
    checks = _telling(done)
    shown = checks[:SHOWN_CHECKS]
    slow = Counter(item.node for item in done.stragglers)
    rows = [_row(node, shown, slow[node.name]) for node in done.nodes]
    keep = [n for n, node in enumerate(done.nodes) if node.status != "PASSED" or slow[node.name]]
    healthy = [n for n in range(len(rows)) if n not in set(keep)]
    chosen = [*keep, *healthy[:SHOWN_HEALTHY]]
    return Grid(
        columns=(
            "node",
            "rack",
            "partition",
            "verdict",
            "passed",
            *map(str, range(1, len(shown) + 1)),
            "slow",
            "why",
        ),
        rows=tuple(rows[n] for n in chosen),
        checks=tuple(shown),
        hidden_checks=len(checks) - len(shown),
        hidden_nodes=len(rows) - len(chosen),
    )


def groups(done: FleetRun) -> list[tuple[str, ...]]:
    """Racks and partitions: how many nodes, and how many of them did not pass; the worst first."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for node in done.nodes:
        counts.setdefault((node.facts.rack or "-", node.facts.partition or "-"), Counter())[node.status] += 1
    bad = {place: (count["FAILED"] + count["UNFIT"]) / count.total() for place, count in counts.items()}
    ordered = sorted(counts.items(), key=lambda item: (-bad[item[0]], item[0]))
    return [
        (rack, partition, str(count.total()), *(str(count[name]) for name in ("FAILED", "UNFIT")))
        for (rack, partition), count in ordered
    ]


def _telling(done: FleetRun) -> list[str]:
    """The checks that did not pass on every node with a result, those that failed on most nodes first."""
    bad: Counter[str] = Counter()
    for node in done.nodes:
        for check, outcome in node.checks:
            if outcome != "passed":
                bad[check] += 1 if outcome == "skipped" else 1000
    return [name for name, _ in bad.most_common()]


def _row(node: NodeOutcome, checks: list[str], slow: int) -> tuple[str, ...]:
    outcomes = dict(node.checks)
    passed = sum(outcome == "passed" for outcome in outcomes.values())
    why = node.reasons[0].replace("\n  ", "; ") if node.reasons else ""
    more = f" (+{len(node.reasons) - 1})" if len(node.reasons) > 1 else ""
    return (
        node.name,
        node.facts.rack or "-",
        node.facts.partition or "-",
        node.status,
        f"{passed}/{len(outcomes)}" if outcomes else "-",
        *(MARKS.get(outcomes.get(name, ""), MISSING) for name in checks),
        str(slow) if slow else "-",
        (why[:110] + ("…" if len(why) > 110 else "") + more) if why else "",
    )
