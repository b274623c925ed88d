"""The verb `bisect`. In: a stack that passes a check, one that fails it. Out: the component to blame."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from stackcheck.cli.options import (
    HERE,
    AsJson,
    DryRun,
    MirrorsFile,
    Root,
    Vendor,
    Wheelhouse,
    new_app,
    option,
)
from stackcheck.cli.output import Progress, print_facts, print_json, print_table
from stackcheck.errors import ConfigurationError
from stackcheck.policy import Tier as TierName

if TYPE_CHECKING:
    from stackcheck.compare.bisect import SearchResult, Tried

app = new_app()

COLUMNS = ("CHECK", "FROM THE BAD STACK", "")
STEP_COLUMNS = ("STEP", "COMPONENT", "GOOD", "BAD")


@app.command("bisect")
def bisect_stacks(
    *,
    good: Annotated[str, option("--good STACK", "A stack in which the check passes.")],
    bad: Annotated[str, option("--bad STACK", "A stack in which it fails.")],
    check: Annotated[str, option("--check ID", "test_….py::test_…[…]")],
    tier: Annotated[TierName, option("--tier", "A tier that has the check.")] = "standard",
    vendor: Vendor = None,
    force: Annotated[
        bool, option("--force", "Forget what an earlier call of the same search found.")
    ] = False,
    wheelhouse: Wheelhouse = None,
    mirrors: MirrorsFile = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
    root: Root = HERE,
) -> None:
    """Find which component makes a check fail: build stacks between two, and run only this check in each.

    Each answer is kept, and the same command goes on where it was interrupted. Exit 0: the component is
    named; 2: the check does not pass in the good stack, or does not fail in the bad one; 9: the machine is
    unfit.
    """
    from stackcheck.cli import build as building
    from stackcheck.cli.images import settings_of
    from stackcheck.compare import bisect
    from stackcheck.files.checkout import exclusive
    from stackcheck.recipe.upstream import Upstream

    folder = root.resolve()
    if dry_run:
        steps = bisect.between(folder, good, bad).steps()
        rows = [(str(number), *each.texts) for number, step in enumerate(steps, start=1) for each in step]
        print_table(STEP_COLUMNS, rows)
        return
    report = Progress()
    options = building.build_options(wheelhouse=wheelhouse, mirrors=mirrors)
    settings = settings_of(folder, vendor=vendor, force=force, build=options)
    with exclusive(folder, "stackcheck bisect", report):
        engine, upstream = building.connected(report), Upstream(mirrors=options.mirrors)
        search = bisect.Search(
            good, bad, check, settings, engine, tier=tier, upstream=upstream, report=report
        )
        found = search.run()
    print_json(_document(found)) if as_json else _print(found)
    _require_ends(found, good, bad, check)


def _print(found: SearchResult) -> None:
    print_table(COLUMNS, [_row(found, each) for each in found.tried])
    print()
    print_facts({"cause": _cause(found)})


def _row(found: SearchResult, tried: Tried) -> tuple[str, str, str]:
    taken = found.named(sorted(tried.steps)) if tried.steps else "nothing"
    everything = len(tried.steps) == len(found.steps)
    note = tried.why or ("" if tried.new else "known from an earlier call")
    return tried.outcome, "everything" if everything else taken, note


def _cause(found: SearchResult) -> str:
    kind, steps = found.culprit.kind, found.culprit.steps
    match kind:
        case "one":
            return found.named(steps)
        case "together":
            return f"{found.named(steps)}: only together; one alone does not break the check"
        case "one of":
            return f"one of these (no stack between them could be tested): {found.named(steps)}"
        case "more":
            return f"{found.named(steps[:1])}, together with several of: {found.named(steps[1:])}"
    return f"none: {kind}"


def _document(found: SearchResult) -> dict[str, Any]:
    return {
        "kind": found.culprit.kind,
        "cause": _cause(found),
        "components": [each.name for number in found.culprit.steps for each in found.steps[number]],
        "tried": [
            {
                "outcome": each.outcome,
                "components": [part.name for number in sorted(each.steps) for part in found.steps[number]],
                "why": each.why,
                "new": each.new,
            }
            for each in found.tried
        ],
    }


def _require_ends(found: SearchResult, good: str, bad: str, check: str) -> None:
    """Refuse a good stack in which the check fails, and a bad one in which it passes."""
    ends = {"good fails": ("--good", good, "pass", "passes"), "bad passes": ("--bad", bad, "fail", "fails")}
    if found.culprit.kind not in ends:
        return
    option, name, verb, expected = ends[found.culprit.kind]
    last = found.tried[-1]
    raise ConfigurationError(
        f"{option} names a stack in which the check does not {verb}",
        where=name,
        got=f"{check}: {last.outcome}{last.why and f' ({last.why})'}",
        expected=f"a stack in which it {expected}",
        next_step=f"stackcheck test {name}, or name another stack",
    )
