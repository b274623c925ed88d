"""The verb `build`, and the steps that it shares with the other verbs that build.

In: selectors and options. Out: images in the engine and under build/, and a table.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import typer

from stackcheck import mirrors as sites
from stackcheck import vendors
from stackcheck.cli import options as opt
from stackcheck.cli import outlooks
from stackcheck.cli.output import Progress, print_json, print_table
from stackcheck.engine import host_setup
from stackcheck.engine.client import Engine
from stackcheck.errors import NothingSelectedError
from stackcheck.files.checkout import exclusive
from stackcheck.imaging import build, forecast, platforms
from stackcheck.imaging.image import Image
from stackcheck.imaging.wheels.wheel_cache import OFF, default_folder
from stackcheck.matrix import resolve
from stackcheck.matrix.stack import Stack
from stackcheck.recipe import site_lock
from stackcheck.suite.outlook import Outlook
from stackcheck.vendors import Vendor as VendorName

app = opt.new_app()
NONE: Mapping[str, Outlook] = MappingProxyType({})


def build_options(
    *,
    wheelhouse: opt.Wheelhouse = None,
    wheel_cache: opt.WheelCache = None,
    mirrors: opt.MirrorsFile = None,
    platform: opt.Platform = None,
    no_cache: opt.NoCache = False,
) -> build.Options:
    """The build options of a command line; the wheel cache is on unless it is disabled."""
    cache = default_folder()
    if wheel_cache:
        cache = None if wheel_cache == OFF else Path(wheel_cache).expanduser().resolve()
    return build.Options(
        wheelhouse=wheelhouse.resolve() if wheelhouse else None,
        wheel_cache=cache,
        platform=platforms.checked(platform) if platform else None,
        no_cache=no_cache,
        mirrors=sites.load_mirrors(mirrors),
    )


chosen_build = opt.taking("options", build_options)


@app.command("build")
@chosen_build
def build_images(
    selectors: opt.Selectors = None,
    *,
    options: build.Options,
    as_json: opt.AsJson = False,
    dry_run: opt.DryRun = False,
    root: opt.Root = opt.HERE,
) -> None:
    """Build the images of stacks without testing them; stages that stacks share are built once."""
    chosen = selected(root, selectors)
    if dry_run:
        show_forecast(forecast.forecast(chosen, root.resolve(), options), as_json=as_json)
        return
    report = Progress()
    with exclusive(root.resolve(), "stackcheck build", report):
        if options.wheelhouse:
            chosen = locked_to(options.wheelhouse, chosen, root.resolve(), report)
        engine = connected(report)
        built = build.build(chosen, engine, root=root.resolve(), report=report, options=options)
    if as_json:
        print_json([_row(image) for image in built])
    else:
        print_table(("stack", "image", "size", "stages", "shared", "seconds"), [_cells(i) for i in built])


def locked_to(
    wheelhouse: Path, stacks: Sequence[Stack], root: Path, report: Callable[[str], None]
) -> tuple[Stack, ...]:
    """The stacks, locked to this folder of wheels if `stackcheck wheelhouse` made it."""
    return tuple(site_lock.ready(stack, wheelhouse, root, report) for stack in stacks)


def connected(report: Progress, *, builds: bool = True) -> Engine:
    """Connect to the engine; install and start one first if this host has none."""
    host_setup.ensure_engine(report, builds=builds)
    return Engine.connect()


def selected(
    root: Path, selectors: Sequence[str] | None, vendor: VendorName | None = None
) -> tuple[Stack, ...]:
    """The stacks that the selectors match; without a selector, those for a vendor, by default this host's.

    Raises:
        NothingSelectedError: No stack is left.
    """
    stacks = resolve.load_stacks(root.resolve(), tuple(selectors or ()))
    if selectors:
        return stacks
    vendor = vendor or vendors.detect()
    runnable = tuple(stack for stack in stacks if stack.vendor == vendor)
    if not runnable:
        raise NothingSelectedError(
            f"no stack of the matrix runs on this host ({vendor})", next_step="stackcheck list"
        )
    return runnable


def show_forecast(
    found: Iterable[forecast.Forecast],
    uncertifiable: Mapping[str, Outlook] = NONE,
    *,
    then: str = "",
    as_json: bool = False,
) -> None:
    """Print what a build would do; if it would fail, exit with the code of the first failure."""
    forecasts = list(found)
    if as_json:
        left_out = [{"id": name, "state": "refuse", **one.as_json()} for name, one in uncertifiable.items()]
        print_json([*map(_forecast_row, forecasts), *left_out])
    else:
        outlooks.show_refused(uncertifiable.values())
    for one in () if as_json else forecasts:
        follows = f", then {then}" if then and one.state != "refuse" else ""
        print(f"{one.stack_id}: {one.state}{follows}{f' ({one.reason})' if one.reason else ''}")
        for stage in one.stages:
            print(f"  {stage.name:20} {(stage.key or '-')[:12]}  {stage.source}")
        if one.error:
            print("  " + str(one.error).replace("\n", "\n  "))
    refused = [one.error for one in forecasts if one.error]
    if refused:
        raise typer.Exit(refused[0].exit_code)


def gigabytes(image: Image) -> str:
    """An image's unpacked size for a table."""
    return f"{image.size_bytes / 1e9:.2f} GB"


def _forecast_row(one: forecast.Forecast) -> dict[str, Any]:
    stages = [{"name": stage.name, "key": stage.key, "from": stage.source} for stage in one.stages]
    return {"id": one.stack_id, "state": one.state, "reason": one.reason, "stages": stages}


def _row(image: Image) -> dict[str, Any]:
    return {
        "id": image.stack_id,
        "reference": image.reference,
        "digest": image.manifest_digest,
        "size_bytes": image.size_bytes,
        "shared_bytes": image.shared_bytes,
        "reused": image.reused,
        "stages": [{"name": use.name, "key": use.key, "how": use.how} for use in image.stages],
    }


def _cells(image: Image) -> tuple[str, ...]:
    built = sum(use.how == "built" for use in image.stages)
    stages = "kept" if image.reused else f"{built} built, {len(image.stages) - built} reused"
    shared = f"{image.shared_bytes / 1e9:.2f} GB"
    return (image.stack_id or "-", image.reference, gigabytes(image), stages, shared, f"{image.seconds:.1f}")
