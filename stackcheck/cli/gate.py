"""The verb `gate`. In: this node, an image or none. Out: one line, and an exit code for schedulers."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from stackcheck.cli import options as opt
from stackcheck.cli.nightly import Into, write_installation
from stackcheck.cli.output import Progress, shown
from stackcheck.engine.client import Engine
from stackcheck.errors import MachineUnfitError, StackcheckError

if TYPE_CHECKING:
    from stackcheck.fleet.fitness import Fitness, NodeGate

app = opt.new_app()

Scheduler = Literal["slurm", "kubernetes"]
NPD_COLUMNS = 80  # of a message of node-problem-detector's custom plug-in monitor
OK, NOT_OK, UNKNOWN = 0, 1, 2  # its exit codes

Image = Annotated[
    str | None,
    opt.argument(
        "STACK|IMAGE", "The image of the job, as in this checkout.", "none: the node alone, by pytest"
    ),
]
Python = Annotated[str, opt.option("--python PATH", "Without an image: the Python with torch.", "this one")]
State = Annotated[
    Path | None,
    opt.option(
        "--state DIR",
        "A folder of this node that keeps its gates.",
        "/var/lib/stackcheck/gate for root, else the user's state folder",
    ),
]
Limit = Annotated[
    float,
    opt.option(
        "--within SECONDS",
        "How long it may take: then no second run begins, and one without an image is stopped.",
        min=1,
    ),
]
Drain = Annotated[
    Scheduler | None,
    opt.option("--drain", "Drain this node there, with the reason, if a part of it is broken.", "never"),
]
As = Annotated[
    Literal["text", "npd"],
    opt.option("--form", "npd: exit codes and line of node-problem-detector's plug-ins."),
]
Install = Annotated[
    Literal["slurm", "health", "kubernetes", "npd", "systemd"] | None,
    opt.option(
        "--install", "Write the files that call this before each job or each hour.", "look at this node"
    ),
]


@app.command("gate")
def is_fit(
    image: Image = None,
    *,
    python: Python = sys.executable,
    state: State = None,
    limit: Limit = 120,
    drain: Drain = None,
    form: As = "text",
    install: Install = None,
    folder: Into = None,
    vendor: opt.Vendor = None,
    as_json: opt.AsJson = False,
    dry_run: opt.DryRun = False,
    root: opt.Root = opt.HERE,
) -> None:
    """Say in a minute whether this node is fit for an image: exit 0 fit, 9 unfit, 6 a check failed.

    It runs the checks that find broken machines, and holds each figure to this node's own last gates.
    """
    if install:
        from stackcheck.nightly import gate_files

        wanted = gate_files.GateSettings(
            root=root.resolve(), image=image, vendor=vendor, python=python, state=state, drain=drain
        )
        made = gate_files.installation(install, wanted, folder)
        write_installation(made, as_json=as_json, dry_run=dry_run)
        return
    from stackcheck.fleet import fitness

    looking = fitness.NodeGate(
        root=root.resolve(),
        state=(state or fitness.default_state()).resolve(),
        vendor=vendor,
        python=python,
        limit_s=limit,
        report=Progress(),
    )
    if form == "npd":
        raise typer.Exit(_condition(looking, image))
    found = looking.look(image, _connect)
    if drain and found.drains:
        _drain(drain, found, dry_run=dry_run)
    print(json.dumps({"node": _node(), **found.as_json()}) if as_json else shown(found.words))
    raise typer.Exit(fitness.EXIT_CODES[found.state])


def _condition(looking: NodeGate, image: str | None) -> int:
    """Print the node's condition for node-problem-detector, which acts by it; the exit code."""
    try:
        found = looking.look(image, _connect)
    except StackcheckError as error:
        return _npd(NOT_OK if isinstance(error, MachineUnfitError) else UNKNOWN, error.what)
    code = OK if found.state == "fit" else NOT_OK if found.drains else UNKNOWN
    return _npd(code, found.words)


def _npd(code: int, words: str) -> int:
    print(shown(words)[:NPD_COLUMNS])
    return code


def _node() -> str:
    from stackcheck.fleet.node import name_of_node

    return name_of_node(os.environ)


def _connect() -> Engine:

    return Engine.connect()


def _drain(scheduler: Scheduler, found: Fitness, *, dry_run: bool) -> None:
    """Keep further jobs away from this node; who may do it is the scheduler's to decide."""
    reason = f"stackcheck gate: {found.words}"[:120]
    if not dry_run and scheduler == "slurm":
        from stackcheck.fleet.slurm import drain

        drain(_node(), reason)
    elif not dry_run:
        from stackcheck.fleet.kubernetes import cordon

        cordon(_node(), reason)
    Progress()(f"{_node()}: {'would be ' if dry_run else ''}drained: {reason}")
