"""The verb `status`. In: the history. Out: the fleet on one screen, once or live; the page's own `Wall`."""

from __future__ import annotations

import datetime as dt
import shutil
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from stackcheck.cli import options
from stackcheck.cli import options as opt
from stackcheck.cli import report as page
from stackcheck.cli.output import counted, fitted, print_json, print_table, shown
from stackcheck.errors import ConfigurationError
from stackcheck.history.runs import Query, named
from stackcheck.report.wall import Outcome, Wall, WallNode, age, wall

if TYPE_CHECKING:
    from stackcheck.history.history import History

app = opt.new_app()

MARKS: Mapping[Outcome, str] = {"failed": "✗", "unfit": "!", "late": "?", "passed": "✓"}
STYLES: Mapping[Outcome, str] = {"failed": "bold red", "unfit": "yellow", "late": "yellow", "passed": "green"}
FACTS = ("NODE", "DEVICES", "DRIVER", "LAST NIGHT", "AGE")
LEAST_EVERY = dt.timedelta(seconds=1)
PIPE = (10_000, 10_000)  # columns and lines of what is no terminal: nothing is left out

Every = Annotated[
    str | None, opt.option("--watch TIME", "Stay, and look again so often, such as 30s.", "once")
]


@app.command("status")
def show_status(
    *,
    watch: Every = None,
    history: page.Folder = None,
    since: page.Since = page.SINCE,
    as_json: opt.AsJson = False,
    root: opt.Root = opt.HERE,
) -> None:
    """Show the fleet on one screen: each node's last night, its age, and the newest run of each stack.

    A node whose newest run is older than 36 hours is late. The exit code is 0, whatever the nodes say.
    """
    every = options.duration(watch, "--watch") if watch else None
    if every and (as_json or not sys.stdout.isatty() or every < LEAST_EVERY):
        raise ConfigurationError(
            "this cannot be watched",
            where="--watch",
            got="--json" if as_json else "no terminal" if every >= LEAST_EVERY else watch,
            expected="a terminal, no --json, and at least 1s",
            next_step="stackcheck status --json",
        )
    kept = page.opened_history(history, root.resolve())
    found = _wall(kept, since)
    if every:
        _watch(kept, since, every, found)
    elif as_json:
        print_json(_facts(found))
    else:
        columns, rows, notes = screen(found, shutil.get_terminal_size() if sys.stdout.isatty() else PIPE)
        if rows:
            print_table(columns, rows)
        print("\n".join(notes))


def _wall(history: History, since: str) -> Wall:

    runs = history.runs(Query(since=options.since(since, "--since"), newest_first=False))
    return wall(runs, dt.datetime.now(dt.UTC))


def screen(
    found: Wall, size: tuple[int, int]
) -> tuple[tuple[str, ...], list[tuple[str, ...]], tuple[str, ...]]:
    """Columns, rows and the lines below them that fill at most a screen of `size` columns and lines."""
    if not found.nodes:
        return FACTS, [], ("no run is kept yet: stackcheck test, or stackcheck history import",)
    columns = (*FACTS, *(str(number) for number, _ in enumerate(found.stacks, start=1)))
    notes = [f"{number}  {shown(named(stack))}" for number, stack in enumerate(found.stacks, start=1)]
    total = len(found.nodes) + found.hidden
    tally = ", ".join(f"{count} {outcome}" for outcome, count in sorted(found.counts.items()))
    notes.append(f"{found.made:%Y-%m-%d %H:%M} UTC: {counted(total, 'node')}: {tally}")
    room = max(1, size[1] - len(notes) - 3)  # the head, the line of what is left out, the prompt
    rows = [_row(node, found) for node in found.nodes[:room]]
    if total > len(rows):
        notes.insert(0, f"and {counted(total - len(rows), 'node')} more, none worse than these")
    return columns, fitted(columns, rows, size[0]), tuple(line[: size[0]] for line in notes)


def _row(node: WallNode, found: Wall) -> tuple[str, ...]:

    def cell(stack: str) -> str:
        there = node.cells.get(stack)
        return f"{MARKS[there.outcome]} {age(there.run.started, found.made)}" if there else "-"

    last = node.newest
    name = f"{node.name} (simulated)" if last.simulated else node.name
    outcome = f"{MARKS[node.outcome]} {node.outcome}"
    ages = (age(last.started, found.made), *map(cell, found.stacks))
    return tuple(map(shown, (name, node.devices, last.driver or "-", outcome, *ages)))


def _watch(history: History, since: str, every: dt.timedelta, found: Wall) -> None:
    """Draw the screen until Ctrl-C. It writes to the terminal itself: every text in it is `shown`."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    console = Console(file=sys.__stdout__, highlight=False, markup=False)

    def drawn(now: Wall) -> Group:
        columns, rows, notes = screen(now, (console.width, console.height))
        table = Table(*columns, box=None, pad_edge=False)
        for row in rows:
            table.add_row(*(Text(text, style=_style(text), no_wrap=True) for text in row))
        return Group(table, *map(Text, notes))

    with Live(drawn(found), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(every.total_seconds())
            live.update(drawn(_wall(history, since)), refresh=True)


def _style(text: str) -> str:
    return next((STYLES[outcome] for outcome, mark in MARKS.items() if text.startswith(f"{mark} ")), "")


def _facts(found: Wall) -> dict[str, Any]:
    return {
        "made": found.made.isoformat(),
        "counts": dict(found.counts),
        "stacks": list(found.stacks),
        "nodes": [_node_facts(node) for node in found.nodes],
        "hidden": found.hidden,
    }


def _node_facts(node: WallNode) -> dict[str, Any]:
    return {
        "node": node.name,
        "device_model": node.newest.device_model,
        "device_count": node.newest.device_count,
        "driver": node.newest.driver,
        "outcome": node.outcome,
        "started": node.newest.started.isoformat(),
        "simulated": node.newest.simulated,
        "stacks": {stack: _cell_facts(node, stack) for stack in node.cells},
    }


def _cell_facts(node: WallNode, stack: str) -> dict[str, Any]:
    cell = node.cells[stack]
    return {"outcome": cell.outcome, "started": cell.run.started.isoformat(), "run_id": cell.run.run_id}
