"""How a fleet run is printed. In: a `FleetRun`. Out: nodes x checks and what stands out, on stdout."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stackcheck.cli.output import counted, print_table, shown

if TYPE_CHECKING:
    from stackcheck.fleet.collect import NodeOutcome
    from stackcheck.fleet.run import FleetRun


SHOWN_STRAGGLERS = 20


def show(done: FleetRun) -> None:
    """Print nodes x checks, then racks, stragglers and the sum."""
    found = grid(done)
    print_table(found.columns, found.rows)
    for number, name in enumerate(found.checks, start=1):
        print(f"  {number}: {shown(name)}")
    if found.checks:
        print(f"  {LEGEND}")
    for count, what in ((found.hidden_checks, "checks"), (found.hidden_nodes, "nodes that passed")):
        if count:
            print(f"  … and {count} more {what}: --json has all")
    racks = groups(done)
    if len(racks) > 1:
        print()
        print_table(("rack", "partition", "nodes", "failed", "unfit"), racks)
    _show_stragglers(done)
    _show_links(done)
    _show_training(done)
    counts = Counter(node.status for node in done.nodes)
    words = ", ".join(f"{count} {status}" for status, count in counts.items())
    print(f"\n{done.job.name} on {counted(len(done.nodes), 'node')}: {words}")
    print(f"  every file: {done.job.folder}; the page of all nodes: stackcheck report")


def _show_stragglers(done: FleetRun) -> None:
    if not done.stragglers:
        return
    print()
    rows = [
        (item.node, item.check, f"{item.metric} {item.outlier.value:.4g} {item.unit}", item.outlier.words())
        for item in done.stragglers[:SHOWN_STRAGGLERS]
    ]
    print_table(("slow node", "check", "figure", "against its fleet"), rows)


def _show_links(done: FleetRun) -> None:
    links = done.links
    if links is None:
        return
    print()
    rows = [(culprit.kind, " - ".join(culprit.names), culprit.because) for culprit in links.culprits]
    if rows:
        print_table(("bad", "which", "because"), rows)
    tried = len(links.speeds) + len(links.failed)
    speeds = sorted(links.speeds.values())
    words = f"; slowest {speeds[0]:.3g}, fastest {speeds[-1]:.3g} GB/s" if speeds else ""
    print(f"links: {len(links.speeds)} of {tried} pairs work{words}")
    if links.whole_error or links.whole_gb_per_s is not None:
        print(f"all together: {shown(links.whole_error or '') or f'{links.whole_gb_per_s:.3g} GB/s'}")


def _show_training(done: FleetRun) -> None:
    from stackcheck.fleet import training

    found = done.training
    if found is None:
        return
    print()
    for lost in found.lost:
        begun = training.words(lost.at_step)
        print(f"training: {shown(f'{lost.node} was lost: {lost.because}')}; checkpoints: {begun}")
    for name, record in found.records.items():
        steps = f"steps {record.first_step} to {record.first_step + len(record.losses)}"
        loss = f", loss {record.losses[-1]:.4f}" if record.losses else ""
        nodes, ranks = counted(len(found.nodes), "node"), counted(found.ranks, "rank")
        print(f"training: {name} on {nodes} x {ranks}: {steps}{loss}")
    for error in found.errors:
        print(f"training: {shown(error)}")


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
