"""The matrix verbs: list, outdated, lock, render. In: selectors. Out: tables; files in images/."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from stackcheck.cli.options import HERE, AsJson, DryRun, Root, Selectors, new_app
from stackcheck.cli.output import Progress, print_json, print_table
from stackcheck.errors import ConfigurationError
from stackcheck.matrix import resolve

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from stackcheck.matrix.stack import Package, Stack

app = new_app()


@app.command("list")
def list_stacks(
    selectors: Selectors = None,
    *,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table of the README instead.")
    ] = False,
    as_json: AsJson = False,
    root: Root = HERE,
) -> None:
    """List the stacks of the matrix and their state."""
    stacks = resolve.load_stacks(root, selectors or ())
    if markdown:
        from stackcheck.recipe import stack_table

        print(stack_table.markdown(stacks))
        return
    if as_json:
        print_json({"stacks": [summary(stack) | _ran(stack, root) for stack in stacks]})
        return
    rows = [
        (
            stack.id,
            stack.vendor,
            str((summary(stack) | _ran(stack, root))["state"]),
            " ".join(stack.archs) or "-",
            stack.wheels,
        )
        for stack in stacks
    ]
    print_table(("stack", "vendor", "state", "archs", "torch from"), rows)


def state(stack: Stack) -> str:
    """`locked`: every pin and hash is known, so that any host builds the same image; else `unlocked`."""
    return "unlocked" if stack.missing else "locked"


def _ran(stack: Stack, root: Path) -> dict[str, object]:
    """The newest run of a stack and, after one of a lower tier than the policy's, the state `tested`."""
    from stackcheck.matrix import matrix
    from stackcheck.suite import last_run

    found = last_run.last_run(root / "build" / stack.id)
    if found is None:
        return {}
    needed = matrix.load(root / "matrix.yaml").policy.certifies[stack.vendor]
    now = state(stack) if found.certifies(needed) else last_run.TESTED
    return {"state": now, "run": {"tier": found.tier, "verdict": found.verdict}}


def summary(stack: Stack) -> dict[str, object]:
    """A stack in `list --json`; `run` is its newest run in this checkout."""
    return {
        "id": stack.id,
        "vendor": stack.vendor,
        "state": state(stack),
        "missing": list(stack.missing),
        "run": None,
        "runtime": stack.runtime,
        "runtime_version": stack.runtime_version,
        "torch": stack.torch,
        "wheels": stack.wheels,
        "triton": _named(stack.triton),
        "collective": _named(stack.collective),
        "flash_attn": stack.flash_attn and stack.flash_attn.version,
        "python": stack.python,
        "os": stack.os,
        "archs": list(stack.archs),
        "experimental": stack.experimental,
        "tested_on": [target.model_dump() for target in stack.tested_on],
    }


def _named(package: Package | None) -> str | None:
    return f"{package.name}=={package.version}" if package else None


@app.command()
def render(
    selectors: Selectors = None,
    *,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 2 if a file differs from its template.")
    ] = False,
    dry_run: DryRun = False,
    root: Root = HERE,
) -> None:
    """Write the Dockerfiles of stacks, or check them with --check."""
    from stackcheck.recipe import render as rendering
    from stackcheck.recipe import stack_table

    stacks, images = resolve.load_stacks(root, selectors or ()), root / "images"
    pages = () if selectors else [path for path in (images / "README.md",) if path.exists()]
    if check or dry_run:
        drifted = [*rendering.check(stacks, images, whole=not selectors)]
        drifted += [
            f"{page}: the table of stacks is out of date"
            for page in pages
            if not stack_table.is_fresh(page, stacks)
        ]
        if drifted and check:
            raise ConfigurationError("\n".join(drifted), next_step="stackcheck render")
        print("\n".join(drifted) or f"{len(stacks)} stacks match their templates")
        return
    written = [
        *rendering.write(stacks, images),
        *(page for page in pages if stack_table.refresh(page, stacks)),
    ]
    print("\n".join(str(path) for path in written) or f"{len(stacks)} stacks match their templates")


@app.command()
def lock(selectors: Selectors = None, *, dry_run: DryRun = False, root: Root = HERE) -> None:
    """Write the pins and hashes of stacks."""
    from stackcheck.recipe import lock as locking
    from stackcheck.recipe.upstream import Upstream

    report = Progress()
    upstream = Upstream()
    rows = []
    for stack in resolve.load_stacks(root, selectors or ()):
        if dry_run:
            rows.append((stack.id, "would be locked"))
            continue
        report(f"locking {stack.id}")
        done = locking.lock(stack, root / "images", upstream)
        rows.append((stack.id, _locked_or(done.missing)))
        rows += [(stack.id, f"not changed: {reason}") for reason in done.kept]
    print_table(("stack", "result"), rows)


@app.command()
def outdated(selectors: Selectors = None, *, as_json: AsJson = False, root: Root = HERE) -> None:
    """Compare pins with the newest versions in the package indexes."""
    from stackcheck.recipe import indexes

    pinned = _pinned(resolve.load_stacks(root, selectors or ()))
    newest = indexes.newest(sorted({name for name, _ in pinned}))
    behind = [
        (name, version, newest[name], ids)
        for (name, version), ids in sorted(pinned.items())
        if newest[name] != version.partition("+")[0]
    ]
    if as_json:
        keys = ("name", "pinned", "newest", "stacks")
        print_json({"outdated": [dict(zip(keys, pin, strict=True)) for pin in behind]})
        return
    nowhere = "not in the indexes of this machine"
    rows = [(name, version, new or nowhere, f"{len(ids)} stacks") for name, version, new, ids in behind]
    print_table(("package", "pinned", "newest", "in"), rows)


def _locked_or(missing: Sequence[str]) -> str:
    return f"unlocked: {'; '.join(missing)}" if missing else "locked"


def _pinned(stacks: Sequence[Stack]) -> dict[tuple[str, str], list[str]]:
    """Package and version -> the stacks that pin it; FlashAttention is included."""
    pinned: dict[tuple[str, str], list[str]] = {}
    for stack in stacks:
        flash = [f"flash-attn=={stack.flash_attn.version}"] if stack.flash_attn else []
        for requirement in (*stack.requirements, *flash):
            name, _, version = requirement.partition("==")
            pinned.setdefault((name, version), []).append(stack.id)
    return pinned
