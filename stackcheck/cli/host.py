"""The verb `doctor`. In: this host. Out: what it has and lacks, each with the command that fixes it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from stackcheck.cli.options import HERE, AsJson, Root, new_app
from stackcheck.cli.output import Progress, print_json, print_table
from stackcheck.engine import doctor, host_setup
from stackcheck.errors import EngineError
from stackcheck.matrix import matrix

app = new_app()


@app.command("doctor")
def examine_host(
    *,
    fix: Annotated[
        bool,
        typer.Option(
            "--fix",
            help="Install and start what is missing (needs root). If disk space is short, remove build "
            "cache of a daemon that stackcheck started.",
        ),
    ] = False,
    room: Annotated[
        float, typer.Option("--room", metavar="GB", min=0, help="Disk space that must be free.")
    ] = doctor.DISK_NEEDED_BYTES / 1e9,
    stop: Annotated[bool, typer.Option("--stop", help="Stop the daemon that stackcheck started.")] = False,
    as_json: AsJson = False,
    root: Root = HERE,
) -> None:
    """Show what this host has and lacks, each with the command that fixes it; exit 4 if it cannot build."""
    if stop:
        stopped = host_setup.stop_daemon()
        print("stopped dockerd" if stopped else "stackcheck started no dockerd that is still running")
        return
    needed = int(room * 1e9)
    if fix:
        host_setup.ensure_engine(Progress())
        host_setup.free_build_cache(lambda: doctor.free_room(root.resolve())[0] >= needed, Progress())
    findings = doctor.examine(root.resolve(), _registries(root), room_bytes=needed)
    if as_json:
        print_json([dataclasses.asdict(finding) for finding in findings])
    else:
        print_table(("what", "state", "found", "fix with"), [_row(finding) for finding in findings])
    lacking = [finding for finding in findings if finding.needed and not finding.ok]
    if lacking:
        raise EngineError(
            "this host lacks what a build needs",
            got=", ".join(finding.name for finding in lacking),
            next_step=lacking[0].fix,
        )


def _row(finding: doctor.HostFinding) -> tuple[str, ...]:
    state = "ok" if finding.ok else "missing" if finding.needed else "-"
    return (finding.name, state, finding.found, finding.fix or "")


def _registries(root: Path) -> list[str]:
    """The registry that matrix.yaml publishes to; empty for a layout on disk, or outside a checkout."""
    path = root / "matrix.yaml"
    target = matrix.load(path).publish if path.exists() else "oci:"
    return [] if target.startswith("oci:") else [target.split("/")[0]]
