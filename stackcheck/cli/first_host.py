"""The verb `first-host`: the steps of docs/guides/first-amd-host.md, a file of what they saw. In: a stack."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from stackcheck.cli.options import HERE, Root, new_app
from stackcheck.cli.output import print_facts
from stackcheck.engine import first_host as hour
from stackcheck.errors import ConfigurationError
from stackcheck.files import atomic
from stackcheck.matrix import resolve

app = new_app()


@app.command("first-host")
def first_host(
    stack: Annotated[str, typer.Argument(metavar="STACK", help="The id of the stack to build and test.")],
    *,
    record: Annotated[
        Path, typer.Option("--record", metavar="FILE", help="Where what was seen goes.")
    ] = Path("first-host.json"),
    root: Root = HERE,
) -> None:
    """Look, lock, build, test three times and judge; stop at the first surprise, and pack what was seen.

    A run that only lacks bounds, or only misses derived ones, is no surprise: three such runs measure them.
    The exit code is that of the step that stopped. The file has no serial numbers, UUIDs, names or addresses.
    """
    root = root.resolve()
    found = [one.id for one in resolve.load_stacks(root, (stack,))]
    if len(found) != 1:
        raise ConfigurationError(
            "the name selects several stacks",
            where="STACK",
            got=", ".join(found),
            expected="one stack id",
            next_step="stackcheck list",
        )
    wanted = hour.steps(found[0], root)
    done = [*hour.follow(wanted, root, sys.stderr.write)]
    told = hour.document(done, wanted)
    atomic.write_atomically(record, [json.dumps(told, indent=1).encode() + b"\n"])
    last = done[-1]
    ended = f"step {last.number} ended with exit code {last.exit_code}" if last.is_surprise else "none"
    step = f"compare with docs/guides/first-amd-host.md, then attach {record} to an issue"
    facts = {"steps": str(len(done)), "surprise": ended}
    if not last.is_surprise and any(one.only_bounds for one in done):
        facts["bounds"] = "a run missed only derived bounds, or has none: this machine's own decide"
        measure = f"stackcheck {' '.join(wanted[-1].arguments)} --write"
        step = f"{measure}, then steps 10 to 12 of docs/guides/first-amd-host.md"
    print_facts({**facts, "file": str(record), "next": step})
    if last.is_surprise:
        raise typer.Exit(last.exit_code)
