"""Verbs about the matrix: list, explain, outdated, compat, lock, render."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stackcheck import resolve
from stackcheck.cli.output import Progress, print_json, print_table
from stackcheck.errors import ConfigurationError

app = typer.Typer(add_completion=False, rich_markup_mode=None)

Selectors = Annotated[list[str] | None, typer.Argument(help="Patterns on stack ids; all stacks without one.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document for machines.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be written.")]
Root = Annotated[Path, typer.Option("--root", help="The checkout.", hidden=True)]
HERE = Path()


@app.command("list")
def list_stacks(selectors: Selectors = None, json: Json = False, root: Root = HERE) -> None:
    """List the stacks of the matrix and their state."""
    stacks = resolve.load_stacks(root, selectors or ())
    if json:
        print_json({"stacks": [summary(stack) for stack in stacks]})
        return
    rows = [
        (stack.id, stack.vendor, state(stack), " ".join(stack.archs) or "-", stack.wheels) for stack in stacks
    ]
    print_table(("stack", "vendor", "state", "archs", "torch from"), rows)


def state(stack: resolve.Stack) -> str:
    """`locked`: can be built anywhere with the same result; else `unlocked`."""
    return "unlocked" if stack.missing else "locked"


def summary(stack: resolve.Stack) -> dict[str, object]:
    """A stack as `list --json` tells it."""
    return {
        "id": stack.id,
        "vendor": stack.vendor,
        "state": state(stack),
        "missing": list(stack.missing),
        "runtime": stack.runtime,
        "runtime_version": stack.runtime_version,
        "torch": stack.torch,
        "python": stack.python,
        "os": stack.os,
        "archs": list(stack.archs),
        "experimental": stack.experimental,
        "tested_on": [target.model_dump() for target in stack.tested_on],
    }


@app.command()
def render(
    selectors: Selectors = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 2 on drift.")] = False,
    dry_run: DryRun = False,
    root: Root = HERE,
) -> None:
    """Write the Dockerfiles of stacks, or check them with --check."""
    from stackcheck import render as rendering

    stacks, images = resolve.load_stacks(root, selectors or ()), root / "images"
    if check or dry_run:
        drifted = [
            line for line in rendering.check(stacks, images) if not selectors or "no stack" not in line
        ]
        if drifted and check:
            raise ConfigurationError("\n".join(drifted), next_step="stackcheck render")
        print("\n".join(drifted) or f"{len(stacks)} stacks are as their templates say")
        return
    for path in rendering.write(stacks, images):
        print(path)


@app.command()
def lock(selectors: Selectors = None, dry_run: DryRun = False, root: Root = HERE) -> None:
    """Write pins and hashes of stacks."""
    from stackcheck import lock as locking

    report = Progress()
    rows = []
    for stack in resolve.load_stacks(root, selectors or ()):
        report(f"locking {stack.id}")
        missing = () if dry_run else locking.lock(stack, root / "images")
        rows.append((stack.id, "would be locked" if dry_run else "; ".join(missing) or "locked"))
    print_table(("stack", "result"), rows)
