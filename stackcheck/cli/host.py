"""The verbs `doctor` and `first-host`. In: this host. Out: what it has and lacks; what its first run saw."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from stackcheck import mirrors as sites
from stackcheck.cli import options as opt
from stackcheck.cli import outlooks
from stackcheck.cli.output import Progress, print_facts, print_json, print_table
from stackcheck.engine import doctor, host_setup
from stackcheck.engine import first_host as hour
from stackcheck.errors import EngineError, StackcheckError
from stackcheck.files import atomic
from stackcheck.imaging import bootstrap
from stackcheck.matrix import matrix, resolve
from stackcheck.suite.outlook import Machine

app = opt.new_app()


@app.command("doctor")
def examine_host(
    *,
    fix: Annotated[
        bool,
        opt.option(
            "--fix",
            "Install and start what is missing (needs root). If disk space is short, remove build "
            "cache of a daemon that stackcheck started.",
        ),
    ] = False,
    room: Annotated[
        float, opt.option("--room GB", "Disk space that must be free.", min=0)
    ] = doctor.DISK_NEEDED_BYTES / 1e9,
    stop: Annotated[bool, opt.option("--stop", "Stop the daemon that stackcheck started.")] = False,
    machine: outlooks.MachineName = None,
    driver: outlooks.DriverName = None,
    as_json: opt.AsJson = False,
    root: opt.Root = opt.HERE,
) -> None:
    """Show what this host has and lacks, each with the command that fixes it; exit 4 if it cannot build.

    And which stacks can be certified on it; with --machine, only which can on that machine.
    """
    if stop:
        stopped = host_setup.stop_daemon()
        print("stopped dockerd" if stopped else "stackcheck started no dockerd that is still running")
        return
    needed = int(room * 1e9)
    if fix:
        host_setup.ensure_engine(Progress())
        host_setup.free_build_cache(lambda: doctor.free_room(root.resolve())[0] >= needed, Progress())
    host = () if machine else doctor.examine(root.resolve(), _registries(root), room_bytes=needed)
    on = outlooks.machine(machine, driver)
    findings = (*host, *(() if machine else _bases(root, on)), *_stacks(root, on))
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


def _bases(root: Path, on: Machine) -> list[doctor.HostFinding]:
    """Where this host gets each base that it would bootstrap; empty outside a checkout."""
    if not (root / "matrix.yaml").exists():
        return []
    stacks = [stack for stack in resolve.usable(root) if stack.vendor == on.vendor]
    suites = {stack.os: stack.base.suite for stack in stacks if stack.base.kind == "bootstrap"}
    mirrors = sites.load_mirrors()
    return [_base(system, suite or "", mirrors.apt.get(system, ())) for system, suite in suites.items()]


def _base(system: str, suite: str, mirror: Sequence[str]) -> doctor.HostFinding:
    name = f"base {system}"
    try:
        way, *_ = bootstrap.ready(suite, system, mirror)
    except StackcheckError as error:
        found = (error.got or error.what).splitlines()[0]
        return doctor.HostFinding(name=name, ok=False, needed=True, found=found, fix=error.next_step)
    return doctor.HostFinding(name=name, ok=True, needed=True, found=f"from {way.name}")


def _stacks(root: Path, on: Machine) -> list[doctor.HostFinding]:
    """Whether each stack for the vendor of a machine can be certified there; empty outside a checkout."""
    if not (root / "matrix.yaml").exists():
        return []
    stacks = [stack for stack in resolve.usable(root) if stack.vendor == on.vendor]
    return [
        doctor.HostFinding(
            name=f"certify {one.stack_id}",
            ok=not one.reasons,
            needed=False,
            found=one.words if one.reasons else f"can be certified on {on.words()}",
            fix=f"stackcheck images {one.stack_id} --dry-run" if one.reasons else None,
        )
        for one in outlooks.of(stacks, on, root).values()
    ]


def _row(finding: doctor.HostFinding) -> tuple[str, ...]:
    state = "ok" if finding.ok else "missing" if finding.needed else "-"
    return (finding.name, state, finding.found, finding.fix or "")


def _registries(root: Path) -> list[str]:
    """The registry that matrix.yaml publishes to; empty for a layout on disk, or outside a checkout."""
    path = root / "matrix.yaml"
    target = matrix.load_matrix(path).publish if path.exists() else "oci:"
    return [] if target.startswith("oci:") else [target.split("/")[0]]


@app.command("first-host")
def first_host(
    stack: Annotated[str, opt.argument("STACK", "The id of the stack to build and test.")],
    *,
    record: Annotated[Path, opt.option("--record FILE", "Where what was seen goes.")] = Path(
        "first-host.json"
    ),
    root: opt.Root = opt.HERE,
) -> None:
    """Look, lock, build, test three times and judge; stop at the first surprise, and pack what was seen.

    A run that only lacks bounds, or only misses derived ones, is no surprise: three such runs measure them.
    The exit code is that of the step that stopped. The file has no serial numbers, UUIDs, names or addresses.
    """
    root = root.resolve()
    wanted = hour.steps(resolve.load_stack(root, stack, "STACK").id, root)
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
