"""How a fleet run is printed. In: a `FleetRun`. Out: nodes x checks and what stands out, on stdout."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from stackcheck.cli.output import counted, print_table, shown
from stackcheck.fleet.grid import LEGEND, grid, groups

if TYPE_CHECKING:
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
