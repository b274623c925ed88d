"""The verb `images`: the main job, for all stacks that can be certified on this host.

In: selectors. Out: a table or JSON on stdout, and an exit code.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stackcheck.cli import build as building
from stackcheck.cli import options as opt
from stackcheck.cli import outlooks
from stackcheck.cli.build import gigabytes
from stackcheck.cli.output import Progress, print_json, print_table
from stackcheck.errors import NothingSelectedError
from stackcheck.files import origins
from stackcheck.files.checkout import exclusive
from stackcheck.imaging import forecast
from stackcheck.imaging.build import Options as BuildOptions
from stackcheck.matrix.stack import Stack
from stackcheck.suite.outlook import Outlook

if TYPE_CHECKING:
    from stackcheck.flow import StackOutcome

app = opt.new_app()


@app.command("images")
@building.chosen_build
def make_images(
    selectors: opt.Selectors = None,
    *,
    anyway: Annotated[
        bool, opt.option("--anyway", "Also build what cannot be certified on this machine.")
    ] = False,
    machine: outlooks.MachineName = None,
    force: opt.Force = False,
    driver: outlooks.DriverName = None,
    to: opt.Target = None,
    key: opt.SigningKey = None,
    sign_with: opt.SignWith = None,
    options: BuildOptions,
    as_json: opt.AsJson = False,
    dry_run: opt.DryRun = False,
    root: opt.Root = opt.HERE,
) -> None:
    """Build, test, certify and publish the selected stacks, or all that can be certified on this host."""
    on = outlooks.machine(machine, driver)
    chosen = building.selected(root, selectors, on.vendor)
    target = opt.target_of(root, to)
    locks = options.wheelhouse is not None and origins.load_origins(options.wheelhouse) is not None
    found = () if anyway else tuple(outlooks.of(chosen, on, root, site_locks=locks).values())
    refused = {one.stack_id: one for one in found if one.reasons}
    able = tuple(stack for stack in chosen if stack.id not in refused)
    if dry_run:
        if (refused or on.named) and not as_json:
            print(f"{outlooks.counted(found, on)}\n")
        forecasts = forecast.forecast(able, root.resolve(), options)
        building.show_forecast(
            forecasts, refused, then=f"test, certify, publish to {target}", as_json=as_json
        )
        _end(refused, able, selectors)
        return
    outlooks.require_here(on)
    from stackcheck import flow  # here: a dry run goes without most of the tool, so that it answers at once
    from stackcheck.cli.images import settings_of

    report = Progress()
    settings = settings_of(root, target=target, key=key, sign_with=sign_with, force=force, build=options)
    ended = [_not_built(one) for one in refused.values()] if selectors else []
    if not selectors:
        outlooks.require_some(found, on)
        for name, one in refused.items():
            report(f"{name}: not built: {one.words.removeprefix('no: ')}")
    if able:
        with exclusive(settings.root, "stackcheck images", report):
            if options.wheelhouse:
                able = building.locked_to(options.wheelhouse, able, settings.root, report)
            ended += flow.images(able, building.connected(report), settings, report)
    show(ended, as_json=as_json)
    for outcome in ended:
        if outcome.error:
            raise typer.Exit(outcome.error.exit_code)


def _not_built(one: Outlook) -> StackOutcome:
    from stackcheck.flow import StackOutcome

    error = one.error()
    return StackOutcome(name=one.stack_id, state="not built", reason=error.what, seconds=0.0, error=error)


def _end(refused: Mapping[str, Outlook], able: Sequence[Stack], selectors: Sequence[str] | None) -> None:
    """The exit code of a dry run: what the run itself would end with, before anything is built."""
    if refused and selectors:
        raise typer.Exit(next(iter(refused.values())).error().exit_code)
    if refused and not able:
        raise typer.Exit(NothingSelectedError.exit_code)


def show(outcomes: Sequence[StackOutcome], *, as_json: bool) -> None:
    """Print a table and the next commands to type, or one JSON document."""
    if as_json:
        print_json([_row(outcome) for outcome in outcomes])
        return
    columns = ("stack", "state", "passed/failed/skipped", "digest", "size", "time")
    print_table(columns, [_cells(outcome) for outcome in outcomes])
    for outcome in outcomes:
        _print_one(outcome)


def _print_one(outcome: StackOutcome) -> None:
    print()
    if outcome.error:
        print(f"{outcome.name}: {outcome.error}")
        return
    for name, value in _figures(outcome):
        print(f"  {name}: {value}")
    print(f"{outcome.name}: {outcome.state}{': ' + outcome.reason if outcome.reason else ''}")
    print(f"  certificate: {outcome.reference}")
    print(f"  next: {_program()} verify {outcome.reference}")
    print(
        f"        {_program()} run {outcome.reference} -- python3 -c 'import torch; print(torch.__version__)'"
    )


def _program() -> str:
    """How the user types this program: its name if it is on PATH, else the path it was started by."""
    return "stackcheck" if shutil.which("stackcheck") else os.path.relpath(sys.argv[0])


def _figures(outcome: StackOutcome) -> list[tuple[str, str]]:
    """The first measured rates (metrics in some unit per second), as name and value."""
    checks = outcome.result.checks if outcome.result else ()
    metrics = [metric for check in checks for metric in check.metrics if "/s" in metric.unit]
    return [(metric.name, f"{metric.value:,.1f} {metric.unit}") for metric in metrics if metric.value][:6]


def _cells(outcome: StackOutcome) -> tuple[str, ...]:
    judged = outcome.verdict
    counts = f"{len(judged.passed)}/{len(judged.failed)}/{len(judged.skipped)}" if judged else "-"
    image = outcome.image
    digest = image.manifest_digest[:19] if image else "-"
    size = gigabytes(image) if image else "-"
    return (outcome.name, outcome.state, counts, digest, size, f"{outcome.seconds:.1f} s")


def _row(outcome: StackOutcome) -> dict[str, Any]:
    return {
        "id": outcome.name,
        "state": outcome.state,
        "reason": outcome.reason,
        "digest": outcome.image.manifest_digest if outcome.image else None,
        "size_bytes": outcome.image.size_bytes if outcome.image else None,
        "verdict": outcome.verdict.status if outcome.verdict else None,
        "reference": outcome.reference,
        "seconds": round(outcome.seconds, 3),
    }
