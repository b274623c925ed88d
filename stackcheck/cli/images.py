"""The verbs that make images: build, test, certify, publish, images."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from stackcheck import build, candidate, flow, keys, matrix, publish, resolve, signing, vendors
from stackcheck.cli.output import Progress, print_facts, print_json, print_table
from stackcheck.engine import Engine
from stackcheck.errors import NothingSelectedError
from stackcheck.examine import examine, refusal
from stackcheck.image import label

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stackcheck.stack import Stack

app = typer.Typer()

TierName = Literal["smoke", "standard", "soak"]
VendorName = Literal["amd", "nvidia", "cpu"]

Selectors = Annotated[list[str] | None, typer.Argument(metavar="[SELECTOR]…", help="Patterns on stack ids.")]
Name = Annotated[str, typer.Argument(metavar="STACK|IMAGE", help="A stack id, or any image reference.")]
Root = Annotated[Path, typer.Option(help="The checkout.", show_default=False)]
Tier = Annotated[TierName, typer.Option(help="How thorough: smoke, standard or soak.")]
Vendor = Annotated[VendorName | None, typer.Option("--gpu-vendor", help="Whose checks run [the stack's].")]
Target = Annotated[
    str | None, typer.Option("--to", help="Where to publish: oci:DIR or HOST/REPO [the matrix's].")
]
Key = Annotated[Path | None, typer.Option(help="Signing key, PEM [made on first use].")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]
Force = Annotated[bool, typer.Option("--force", help="Run again even when nothing changed.")]

HERE = Path()


@app.command("images")
def make_images(
    selectors: Selectors = None,
    *,
    tier: Tier = "smoke",
    to: Target = None,
    key: Key = None,
    force: Force = False,
    as_json: AsJson = False,
    dry_run: DryRun = False,
    root: Root = HERE,
) -> None:
    """Build, test, certify and publish every stack this host can run, or the selected ones."""
    chosen = _selected(root, selectors)
    target = to or _target(root)
    if dry_run:
        for stack in chosen:
            print(f"{stack.id}: build, {tier} suites, certify, publish to {target}")
        return
    report = Progress()
    settings = _settings(root, tier=tier, target=target, key=key, force=force)
    with build.exclusive(settings.root, "stackcheck images", report):
        outcomes = list(flow.images(chosen, _engine(report), settings, report))
    if as_json:
        print_json([_row(outcome) for outcome in outcomes])
    else:
        _print_outcomes(outcomes)
    errors = [outcome.error for outcome in outcomes if outcome.error]
    if errors:
        raise typer.Exit(errors[0].exit_code)


@app.command("build")
def build_images(
    selectors: Selectors = None, *, as_json: AsJson = False, dry_run: DryRun = False, root: Root = HERE
) -> None:
    """Build the images of stacks, without testing them."""
    chosen = _selected(root, selectors)
    if dry_run:
        for stack in chosen:
            print(f"{stack.id}: build")
        return
    report = Progress()
    with build.exclusive(root.resolve(), "stackcheck build", report):
        built = build.build(chosen, _engine(report), root=root.resolve(), report=report)
    rows = [_image_row(image) for image in built]
    if as_json:
        print_json(rows)
    else:
        print_table(("stack", "image", "size", "seconds"), [_image_cells(image) for image in built])


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
        print(f"{name}: {tier} suites, judge")
        return
    report = Progress()
    settings = _settings(root, tier=tier, vendor=vendor, force=True)
    with build.exclusive(settings.root, "stackcheck test", report):
        engine = _engine(report, builds=not _is_reference(name))
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
        print(f"{name}: {tier} suites, judge, sign")
        return
    report = Progress()
    settings = _settings(root, tier=tier, vendor=vendor, key=key, force=force)
    with build.exclusive(settings.root, "stackcheck certify", report):
        engine = _engine(report, builds=not _is_reference(name))
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
    target = to or _target(root)
    settings = _settings(root, target=target, key=key)
    tag = label(name)
    image = build.load_image(settings.folder(tag) / "image.json")
    envelopes = signing.signed(tag, settings)
    if dry_run:
        print(f"{image.manifest_digest}: publish to {target}:{tag} with {len(envelopes)} statements")
        return
    done = publish.publish(
        image.layout,
        tag=tag,
        envelopes=envelopes,
        target=target,
        public_key=keys.load_or_create(settings.key).public_key(),
        report=Progress(),
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
    )


def _target(root: Path) -> str:
    """Where the matrix says that images are published."""
    return matrix.load(root.resolve() / "matrix.yaml").publish


def _engine(report: Progress, *, builds: bool = True) -> Engine:
    from stackcheck import host_setup

    host_setup.ensure_engine(report, builds=builds)
    return Engine.connect()


def _selected(root: Path, selectors: Sequence[str] | None) -> tuple[Stack, ...]:
    stacks = resolve.load_stacks(root.resolve(), tuple(selectors or ()))
    if selectors:
        return stacks
    vendor = vendors.detect()
    runnable = tuple(stack for stack in stacks if stack.vendor == vendor)
    if not runnable:
        raise NothingSelectedError(
            f"no stack of the matrix runs on this host ({vendor})", next_step="stackcheck list"
        )
    return runnable


def _candidate(
    name: str, engine: Engine, settings: candidate.Settings, report: Progress
) -> candidate.Candidate:
    """A stack of the matrix (built when it has to be), or any image reference."""
    stacks = resolve.load_stacks(settings.root)
    found = () if _is_reference(name) else resolve.select(stacks, (name,))
    if len(found) > 1:
        raise NothingSelectedError(
            f"{name} matches {len(found)} stacks, and this verb takes one",
            got=", ".join(stack.id for stack in found),
        )
    if found:
        (image,) = build.build(found, engine, root=settings.root, report=report)
        return candidate.of_stack(found[0], image, settings)
    image = build.adopt(name, engine, folder=settings.folder(label(name)), report=report)
    loaded = matrix.load(settings.root / "matrix.yaml")
    return candidate.foreign(image, label(name), loaded, settings)


def _is_reference(name: str) -> bool:
    """Whether a name is an image and no stack: stack ids hold neither `/`, `:` nor `@`."""
    return re.search(r"[/:@]", name) is not None


def _print_outcomes(outcomes: Sequence[flow.Outcome]) -> None:
    columns = ("stack", "state", "passed/failed/skipped", "digest", "size", "time")
    print_table(columns, [_cells(outcome) for outcome in outcomes])
    for outcome in outcomes:
        _print_one(outcome)


def _print_one(outcome: flow.Outcome) -> None:
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
    """How the user types this program: by its name where the shell finds it, else as it was started."""
    return "stackcheck" if shutil.which("stackcheck") else os.path.relpath(sys.argv[0])


def _figures(outcome: flow.Outcome) -> list[tuple[str, str]]:
    """The figures worth a line: what was measured with a rate as its unit."""
    checks = outcome.result.checks if outcome.result else ()
    metrics = [metric for check in checks for metric in check.metrics if "/s" in metric.unit]
    return [(metric.name, f"{metric.value:,.1f} {metric.unit}") for metric in metrics if metric.value][:6]


def _cells(outcome: flow.Outcome) -> tuple[str, ...]:
    judged = outcome.verdict
    counts = f"{len(judged.passed)}/{len(judged.failed)}/{len(judged.skipped)}" if judged else "-"
    image = outcome.image
    digest = image.manifest_digest[:19] if image else "-"
    size = _gigabytes(image) if image else "-"
    return (outcome.name, outcome.state, counts, digest, size, f"{outcome.seconds:.1f} s")


def _row(outcome: flow.Outcome) -> dict[str, Any]:
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


def _image_row(image: build.Image) -> dict[str, Any]:
    return {
        "id": image.stack_id,
        "reference": image.reference,
        "digest": image.manifest_digest,
        "size_bytes": image.size_bytes,
        "reused": image.reused,
    }


def _image_cells(image: build.Image) -> tuple[str, ...]:
    return (image.stack_id or "-", image.reference, _gigabytes(image), f"{image.seconds:.1f}")


def _gigabytes(image: build.Image) -> str:
    return f"{image.size_bytes / 1e9:.2f} GB"
