"""The verbs that make images trustworthy: test, certify, publish, and images for all of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from stackcheck import build, candidate, flow, forecast, keys, matrix, publish, resolve, signing
from stackcheck.cli import build as building
from stackcheck.cli import named, outcomes
from stackcheck.cli.build import (
    HERE,
    AsJson,
    DryRun,
    NoCache,
    Platform,
    Root,
    Selectors,
    WheelCache,
    Wheelhouse,
    build_options,
)
from stackcheck.cli.output import Progress, print_facts, print_json
from stackcheck.examine import examine, refusal
from stackcheck.registry import parse_target
from stackcheck.tags import label

if TYPE_CHECKING:
    from stackcheck.engine import Engine

app = typer.Typer()

TierName = Literal["smoke", "standard", "soak"]
VendorName = Literal["amd", "nvidia", "cpu"]

Name = Annotated[str, typer.Argument(metavar="STACK|IMAGE", help="A stack id, or any image reference.")]
Tier = Annotated[TierName, typer.Option(help="How thorough: smoke, standard or soak.")]
Vendor = Annotated[VendorName | None, typer.Option("--gpu-vendor", help="Whose checks run (the stack's).")]
Target = Annotated[
    str | None, typer.Option("--to", help="Where to publish: oci:DIR or HOST/REPO (the matrix's).")
]
Key = Annotated[Path | None, typer.Option(help="Signing key, PEM (made on first use).")]
Force = Annotated[bool, typer.Option("--force", help="Run again even when nothing changed.")]


@app.command("images")
def make_images(
    selectors: Selectors = None,
    *,
    tier: Tier = "smoke",
    to: Target = None,
    key: Key = None,
    force: Force = False,
    wheelhouse: Wheelhouse = None,
    wheel_cache: WheelCache = None,
    platform: Platform = None,
    no_cache: NoCache = False,
    as_json: AsJson = False,
    dry_run: DryRun = False,
    root: Root = HERE,
) -> None:
    """Build, test, certify and publish every stack this host can run, or the selected ones."""
    chosen = building.selected(root, selectors)
    options = build_options(wheelhouse, wheel_cache, platform, no_cache=no_cache)
    target = _target(root, to)
    if dry_run:
        found = forecast.forecast(chosen, root.resolve(), options)
        then = f"{tier} suites, certify, publish to {target}"
        building.show_forecast(found, then=then, as_json=as_json)
        return
    report = Progress()
    settings = _settings(root, tier=tier, target=target, key=key, force=force)
    settings = dataclasses.replace(settings, build=options)
    with build.exclusive(settings.root, "stackcheck images", report):
        ended = list(flow.images(chosen, building.connected(report), settings, report))
    outcomes.show(ended, as_json=as_json)
    errors = [outcome.error for outcome in ended if outcome.error]
    if errors:
        raise typer.Exit(errors[0].exit_code)


@app.command("test")
def run_suites(
    name: Name,
    *,
    tier: Tier = "smoke",
    vendor: Vendor = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
    root: Root = HERE,
) -> None:
    """Run the acceptance suites inside an image, also when nothing changed, and judge; sign nothing."""
    if dry_run:
        _show_plan(name, root, f"{tier} suites, judge")
        return
    report = Progress()
    settings = _settings(root, tier=tier, vendor=vendor, force=True)
    with build.exclusive(settings.root, "stackcheck test", report):
        engine = building.connected(report, builds=not named.is_reference(name))
        subject = _candidate(name, engine, settings, report)
        _result, judged, _reused = examine(subject, engine, settings, report)
    facts = {
        "image": subject.image.reference,
        "verdict": judged.status,
        "passed": str(len(judged.passed)),
        "failed": str(len(judged.failed)),
        "skipped": str(len(judged.skipped)),
        "result": str(settings.folder(subject.name) / "run" / "result.json"),
    }
    if judged.status == "PASSED":
        facts["next"] = f"stackcheck certify {name}"
    print_json(dataclasses.asdict(judged)) if as_json else print_facts(facts)
    if judged.status != "PASSED":
        raise refusal(judged, settings.folder(subject.name))


@app.command("certify")
def certify_image(
    name: Name,
    *,
    tier: Tier = "smoke",
    vendor: Vendor = None,
    key: Key = None,
    force: Force = False,
    as_json: AsJson = False,
    dry_run: DryRun = False,
    root: Root = HERE,
) -> None:
    """Run the suites, judge, and sign the verdict; `publish` then promotes the image with it."""
    if dry_run:
        _show_plan(name, root, f"{tier} suites, judge, sign")
        return
    report = Progress()
    settings = _settings(root, tier=tier, vendor=vendor, key=key, force=force)
    with build.exclusive(settings.root, "stackcheck certify", report):
        engine = building.connected(report, builds=not named.is_reference(name))
        subject = _candidate(name, engine, settings, report)
        result, judged, _reused = examine(subject, engine, settings, report)
        if judged.status == "UNFIT":
            raise refusal(judged, settings.folder(subject.name))
        signing.sign(subject, result, judged, settings)
    facts = {
        "verdict": judged.status,
        "digest": subject.image.manifest_digest,
        "statements": str(settings.folder(subject.name) / "statements"),
    }
    if judged.status == "PASSED":
        facts["next"] = f"stackcheck publish {name}"
    print_json(facts) if as_json else print_facts(facts)
    if judged.status != "PASSED":
        raise refusal(judged, settings.folder(subject.name))


@app.command("publish")
def publish_image(
    name: Name,
    *,
    to: Target = None,
    key: Key = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
    root: Root = HERE,
) -> None:
    """Publish an image that `certify` signed as PASSED: candidate, attach, verify, tag last."""
    target = _target(root, to)
    settings = _settings(root, target=target, key=key)
    image = named.image(name, settings.root)
    tag = image.layout.parent.name
    envelopes = signing.signed(tag, settings)
    if dry_run:
        print(f"{image.manifest_digest}: publish to {target}:{tag} with {len(envelopes)} statements")
        return
    signing_key = keys.load_or_create(settings.key)
    done = publish.publish(
        image.layout,
        tag=tag,
        envelopes=envelopes,
        target=target,
        public_key=signing_key.public_key(),
        report=Progress(),
        key=signing_key,
    )
    facts = {
        "reference": str(done.reference),
        "digest": image.manifest_digest,
        "next": f"stackcheck verify {done.reference}",
    }
    print_json(facts) if as_json else print_facts(facts)


def _settings(
    root: Path,
    *,
    tier: TierName = "smoke",
    target: str = "oci:dist",
    key: Path | None = None,
    vendor: VendorName | None = None,
    force: bool = False,
) -> candidate.Settings:
    return candidate.Settings(
        root=root.resolve(),
        tier=tier,
        target=target,
        key=key or keys.default_path(),
        vendor=vendor,
        force=force,
        build=build_options(None, None, None, no_cache=False),
    )


def _target(root: Path, to: str | None) -> str:
    """Where images are published: as the user says, else as the matrix does."""
    return parse_target(to or matrix.load(root.resolve() / "matrix.yaml").publish)


def _candidate(
    name: str, engine: Engine, settings: candidate.Settings, report: Progress
) -> candidate.Candidate:
    """A stack of the matrix (built when it has to be), or any image reference."""
    found = named.stack(name, settings.root)
    if found:
        (image,) = build.build((found,), engine, root=settings.root, report=report, options=settings.build)
        return candidate.of_stack(found, image, settings)
    image = build.adopt(name, engine, folder=settings.folder(label(name)), report=report)
    loaded = matrix.load(settings.root / "matrix.yaml")
    labels = engine.inspect(image.reference).labels
    stack = candidate.declared(labels, resolve.load_stacks(settings.root), name)
    return candidate.foreign(image, label(name), loaded, settings, stack)


def _show_plan(name: str, root: Path, steps: str) -> None:
    """The dry run of a verb that takes STACK|IMAGE; a stack that is not there is refused as in a run."""
    found = named.stack(name, root.resolve())
    print(f"{found.id if found else name}: {steps}")
