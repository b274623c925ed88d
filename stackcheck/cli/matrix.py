"""The matrix verbs: list, outdated, lock, render. In: selectors. Out: tables; files in images/."""

import dataclasses
import datetime as dt
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from stackcheck import mirrors as sites
from stackcheck.cli import outlooks
from stackcheck.cli.options import (
    HERE,
    AsJson,
    DryRun,
    MirrorsFile,
    Root,
    Selectors,
    Wheelhouse,
    new_app,
    option,
)
from stackcheck.cli.output import Progress, counted, print_json, print_note, print_table
from stackcheck.errors import ConfigurationError
from stackcheck.matrix import compat, matrix, resolve
from stackcheck.matrix.known_issues import KnownIssue
from stackcheck.matrix.stack import Package, Stack
from stackcheck.policy import Policy
from stackcheck.recipe import stack_table
from stackcheck.suite import last_run

app = new_app()


@app.command("list")
def list_stacks(
    selectors: Selectors = None,
    *,
    markdown: Annotated[bool, option("--markdown", "Print the table of the README instead.")] = False,
    issues: Annotated[bool, option("--issues", "Also list the known issues of these stacks.")] = False,
    machine: outlooks.MachineName = None,
    driver: outlooks.DriverName = None,
    as_json: AsJson = False,
    root: Root = HERE,
) -> None:
    """List the stacks of the matrix, their state, and whether each can be certified here."""
    stacks = resolve.load_stacks(root, selectors or (), refused=print_note)
    if markdown:
        print(stack_table.markdown(stacks))
        return

    policy = matrix.load_matrix(root / "matrix.yaml").policy
    on = outlooks.machine(machine, driver)
    found = outlooks.of(stacks, on, root)
    if as_json:
        told = {name: {"outlook": {"machine": on.words()} | one.as_json()} for name, one in found.items()}
        print_json(
            {"stacks": [summary(stack) | _here(stack, root, policy) | told[stack.id] for stack in stacks]}
        )
        return
    rows = [
        (
            stack.id,
            stack.vendor,
            str((summary(stack) | _here(stack, root, policy))["state"]),
            " ".join(stack.archs) or "-",
            stack.wheels,
            str(len(stack.known_issues)),
            found[stack.id].words,
        )
        for stack in stacks
    ]
    columns = ("stack", "vendor", "state", "archs", "torch from", "known issues")
    print_table((*columns, f"certifiable on {on.words()}"), rows)
    if issues:
        _print_issues(stacks)
    _print_waivers(stacks, policy)


def _print_issues(stacks: Sequence[Stack]) -> None:
    """Each known issue once; `explain STACK` says what it is."""
    found = _stacks_by_issue(stacks)
    rows = [
        (issue.id, issue.severity, issue.fixed_in or "-", issue.issue, counted(len(ids), "stack"))
        for issue, ids in found.items()
    ]
    if rows:
        print()
        print_table(("known issue", "severity", "fixed in", "issue", "in"), rows)


def _stacks_by_issue(stacks: Sequence[Stack]) -> dict[KnownIssue, list[str]]:
    found: dict[KnownIssue, list[str]] = {}
    for stack in stacks:
        for issue in stack.known_issues:
            found.setdefault(issue, []).append(stack.id)
    return found


def state(stack: Stack) -> str:
    """`locked`: every pin and hash is known, so that any host builds the same image; else `unlocked`."""
    return "unlocked" if stack.missing else "locked"


def _here(stack: Stack, root: Path, policy: Policy) -> dict[str, object]:
    """What this checkout knows of a stack:
    waivers, its newest run, and the state `tested` after a run of a lower tier than the policy's.
    """
    waivers = policy.waivers_for(stack.id, dt.datetime.now(dt.UTC).date())
    waived: dict[str, object] = {"waivers": [waiver.model_dump(mode="json") for waiver in waivers]}

    found = last_run.last_run(root / "build" / stack.id)
    if found is None:
        return waived
    now = state(stack) if found.certifies(policy.certifies[stack.vendor]) else last_run.TESTED
    return {**waived, "state": now, "run": {"tier": found.tier, "verdict": found.verdict}}


def _print_waivers(stacks: Sequence[Stack], policy: Policy) -> None:
    today = dt.datetime.now(dt.UTC).date()
    for stack in stacks:
        for waiver in policy.waivers_for(stack.id, today):
            print(f"{stack.id}: {waiver.words()}")


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
        "tested_on": _targets(stack),
        "known_issues": [issue.as_json() for issue in stack.known_issues],
    }


def _targets(stack: Stack) -> list[dict[str, object]] | None:
    """The machines that the stack names; None if any machine with a complete set of bounds certifies it."""
    return None if stack.tested_on is None else [target.model_dump() for target in stack.tested_on]


def _named(package: Package | None) -> str | None:
    return f"{package.name}=={package.version}" if package else None


@app.command()
def render(
    selectors: Selectors = None,
    *,
    check: Annotated[
        bool, option("--check", "Write nothing; exit 2 if a file differs from its template or is stale.")
    ] = False,
    dry_run: DryRun = False,
    root: Root = HERE,
) -> None:
    """Write the Dockerfiles of stacks, or check them with --check."""
    from stackcheck.recipe import render as rendering

    stacks, images = resolve.load_stacks(root, selectors or ()), root / "images"
    pages = () if selectors else [path for path in (images / "README.md",) if path.exists()]
    if check or dry_run:
        drifted = [*rendering.check(stacks, images, whole=not selectors)]
        drifted += [
            f"{page}: the table of stacks is out of date"
            for page in pages
            if not stack_table.is_fresh(page, stacks)
        ]
        old = [line for stack in stacks for line in rendering.stale(stack, images)]
        if (drifted or old) and check:
            steps = ["stackcheck render"] if drifted else []
            steps += [f"stackcheck lock {name}" for name in dict.fromkeys(line.split("/")[1] for line in old)]
            raise ConfigurationError("\n".join([*drifted, *old]), next_step="\n    ".join(steps))
        print("\n".join([*drifted, *old]) or f"matches its template: {counted(len(stacks), 'stack')}")
        return
    written = [
        *rendering.write(stacks, images),
        *(page for page in pages if stack_table.refresh(page, stacks)),
    ]
    print(
        "\n".join(str(path) for path in written) or f"matches its template: {counted(len(stacks), 'stack')}"
    )


@app.command()
def lock(
    selectors: Selectors = None,
    *,
    wheelhouse: Wheelhouse = None,
    mirrors: MirrorsFile = None,
    dry_run: DryRun = False,
    root: Root = HERE,
) -> None:
    """Write the pins and hashes of stacks."""
    from stackcheck.recipe import lock as locking
    from stackcheck.recipe import site_lock
    from stackcheck.recipe.upstream import Upstream

    report = Progress()
    upstream = Upstream(mirrors=sites.load_mirrors(mirrors))
    rows = []
    for stack in resolve.load_stacks(root, selectors or ()):
        if dry_run:
            rows.append((stack.id, "would be locked"))
            continue
        report(f"locking {stack.id}")
        if wheelhouse:
            now = site_lock.lock_to(stack, wheelhouse.resolve(), root.resolve())
            rows.append((stack.id, _locked_or(now.missing)))
            continue
        done = locking.lock(stack, root / "images", upstream)
        rows.append((stack.id, _locked_or(done.missing)))
        rows += [(stack.id, f"not changed: {reason}") for reason in done.kept]
    print_table(("stack", "result"), rows)


@app.command()
def outdated(selectors: Selectors = None, *, as_json: AsJson = False, root: Root = HERE) -> None:
    """Compare pins with the newest versions in the package indexes, and list known issues of the stacks."""
    from stackcheck.recipe import indexes
    from stackcheck.recipe.upstream import Upstream

    stacks = resolve.load_stacks(root, selectors or ())
    issues, upstream = _stacks_by_issue(stacks), Upstream(mirrors=sites.load_mirrors())

    def versions(name: str, pre: bool, stack: Stack) -> Sequence[str]:
        also = tuple(f"{option}={place}" for option, place in upstream.beside(stack))
        return indexes.versions(name, python=stack.python, pre=pre, also=also)

    behind = indexes.behind(stacks, compat.load_rules(root / "images" / "compat.yaml"), versions)
    if as_json:
        told = [{**issue.as_json(), "stacks": ids} for issue, ids in issues.items()]
        print_json({"outdated": [dataclasses.asdict(one) for one in behind], "known_issues": told})
        return
    nowhere = "not in the indexes of this machine"
    rows = [
        (one.name, one.pinned, one.newest or nowhere, counted(len(one.stacks), "stack")) for one in behind
    ]
    print_table(("package", "pinned", "newest", "in"), rows)
    _print_issues(stacks)


def _locked_or(missing: Sequence[str]) -> str:
    return f"unlocked: {'; '.join(missing)}" if missing else "locked"
