"""The verb `gate`. In: this node, an image or none. Out: one line, and an exit code for schedulers."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from stackcheck.cli.nightly import Into, write_installation
from stackcheck.cli.options import HERE, AsJson, DryRun, Root, Vendor, new_app
from stackcheck.cli.output import Progress, shown
from stackcheck.errors import MachineUnfitError, StackcheckError

if TYPE_CHECKING:
    from stackcheck.engine.client import Engine
    from stackcheck.fleet.fitness import Fitness

app = new_app()

Scheduler = Literal["slurm", "kubernetes"]
Form = Literal["text", "npd"]
NPD_COLUMNS = 80  # of a message of node-problem-detector's custom plug-in monitor
OK, NOT_OK, UNKNOWN = 0, 1, 2  # its exit codes


@app.command("gate")
def gate(
    image: Annotated[
        str | None,
        typer.Argument(
            metavar="STACK|IMAGE",
            help="The image of the job, as in this checkout.",
            show_default="none: the node alone, by pytest",
        ),
    ] = None,
    *,
    vendor: Vendor = None,
    python: Annotated[
        str,
        typer.Option(
            "--python",
            metavar="PATH",
            help="Without an image: the Python with torch.",
            show_default="this one",
        ),
    ] = sys.executable,
    state: Annotated[
        Path | None,
        typer.Option(
            "--state",
            metavar="DIR",
            help="A folder of this node that keeps its gates.",
            show_default="/var/lib/stackcheck/gate for root, else the user's state folder",
        ),
    ] = None,
    limit: Annotated[
        float,
        typer.Option(
            "--limit", metavar="SECONDS", min=1, help="Stop a run without an image after this time."
        ),
    ] = 120,
    drain: Annotated[
        Literal["slurm", "kubernetes"] | None,
        typer.Option(
            "--drain",
            help="Drain this node there, with the reason, if a part of it is broken.",
            show_default="never",
        ),
    ] = None,
    form: Annotated[
        Form, typer.Option("--form", help="npd: exit codes and line of node-problem-detector's plug-ins.")
    ] = "text",
    install: Annotated[
        Literal["slurm", "health", "kubernetes", "npd", "systemd"] | None,
        typer.Option(
            "--install",
            help="Write the files with which this is called before each job or each hour.",
            show_default="look at this node",
        ),
    ] = None,
    folder: Into = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
    root: Root = HERE,
) -> None:
    """Say in under a minute whether this node is fit for an image: exit 0 fit, 9 unfit, 6 a check failed.

    It runs the checks that find broken machines, and holds each figure to this node's own last gates.
    """
    base = root.resolve()
    if install:
        from stackcheck.nightly import gate_files

        wanted = gate_files.GateSettings(
            root=base, image=image, vendor=vendor, python=python, state=state, drain=drain
        )
        write_installation(gate_files.installation(install, wanted, folder), as_json=as_json, dry_run=dry_run)
        return
    from stackcheck.fleet import fitness

    looking = fitness.Gate(
        root=base,
        state=(state or fitness.default_state()).resolve(),
        vendor=vendor,
        python=python,
        limit_s=limit,
        report=Progress(),
    )
    try:
        found = looking.look(image, _connect)
    except StackcheckError as error:
        if form != "npd":
            raise
        raise typer.Exit(
            _npd(NOT_OK if isinstance(error, MachineUnfitError) else UNKNOWN, error.what)
        ) from error
    if drain and found.drains and not dry_run:
        _drain(drain, found)
    if form == "npd":
        codes = {"fit": OK, "unfit": NOT_OK, "failed": NOT_OK if found.parts else UNKNOWN}
        raise typer.Exit(_npd(codes[found.state], found.words))
    print(json.dumps({"node": _node(), **found.as_json()}) if as_json else shown(found.words))
    raise typer.Exit(fitness.EXIT_CODES[found.state])


def _npd(code: int, words: str) -> int:
    print(shown(words)[:NPD_COLUMNS])
    return code


def _node() -> str:
    from stackcheck.fleet.node import name_of_node

    return name_of_node(os.environ)


def _connect() -> Engine:
    from stackcheck.engine.client import Engine

    return Engine.connect()


def _drain(scheduler: Scheduler, found: Fitness) -> None:
    """Keep further jobs away from this node; who may do it is the scheduler's to decide."""
    reason = f"stackcheck gate: {found.words}"[:120]
    if scheduler == "slurm":
        from stackcheck.fleet.slurm import drain

        drain(_node(), reason)
    else:
        from stackcheck.fleet.kubernetes import cordon

        cordon(_node(), reason)
    Progress()(f"{_node()}: drained: {reason}")
