"""The verbs of the main job: images runs all of it; test, certify and publish run one part each.

In: stacks or an image. Out: a table or JSON on stdout, and an exit code.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stackcheck import flow
from stackcheck.certificate import signing
from stackcheck.cli import build as building
from stackcheck.cli import outcomes, outlooks
from stackcheck.cli.consumer import against_words
from stackcheck.cli.options import (
    HERE,
    AcceptPython,
    AsJson,
    DryRun,
    Force,
    MirrorsFile,
    Name,
    NoCache,
    PlainHttp,
    Platform,
    Root,
    Rows,
    Selectors,
    SigningKey,
    SignWith,
    Target,
    Tier,
    Vendor,
    WheelCache,
    Wheelhouse,
    accepted_python,
    key_path,
    new_app,
    sign_words,
)
from stackcheck.cli.output import Progress, print_facts, print_json
from stackcheck.errors import NothingSelectedError
from stackcheck.files.checkout_lock import exclusive
from stackcheck.imaging import forecast, plans
from stackcheck.imaging.wheels import origins
from stackcheck.matrix import matrix
from stackcheck.oci.store import parse_target
from stackcheck.suite import outlook
from stackcheck.suite import rows as published_rows
from stackcheck.suite import subject as subjects

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from stackcheck.certificate.verify import Verified
    from stackcheck.engine.client import Engine
    from stackcheck.matrix.stack import Stack
    from stackcheck.policy import Tier as TierName
    from stackcheck.suite.judged import JudgedRun
    from stackcheck.suite.outlook import Outlook
    from stackcheck.suite.subject import Subject
    from stackcheck.vendors import Vendor as VendorName

app = new_app()

Against = Annotated[
    str | None,
    typer.Option(
        "--against",
        metavar="REF",
        help="A certified image: run both in turn on this node, and refuse this one if it is slower.",
        show_default="bounds alone decide",
    ),
]


@app.command("images")
def make_images(
    selectors: Selectors = None,
    *,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Also build what cannot be certified on this machine.")
    ] = False,
    machine: outlooks.MachineName = None,
    force: Force = False,
    driver: outlooks.DriverName = None,
    to: Target = None,
    key: SigningKey = None,
    sign_with: SignWith = None,
    wheelhouse: Wheelhouse = None,
    wheel_cache: WheelCache = None,
    mirrors: MirrorsFile = None,
    platform: Platform = None,
    no_cache: NoCache = False,
    as_json: AsJson = False,
    dry_run: DryRun = False,
    root: Root = HERE,
) -> None:
    """Build, test, certify and publish the selected stacks, or all that can be certified on this host."""
    on = outlooks.machine(machine, driver)
    chosen = building.selected(root, selectors, on.vendor)
    options = building.build_options(wheelhouse, wheel_cache, platform, no_cache=no_cache, mirrors=mirrors)
    target = _target(root, to)
    locks = options.wheelhouse is not None and origins.load(options.wheelhouse) is not None
    found = () if anyway else outlook.of_all(chosen, on, root.resolve(), site_locks=locks)
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
    report = Progress()
    settings = _settings(root, target=target, key=key, sign_with=sign_with, force=force)
    settings = dataclasses.replace(settings, build=options)
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
    outcomes.show(ended, as_json=as_json)
    for outcome in ended:
        if outcome.error:
            raise typer.Exit(outcome.error.exit_code)


def _not_built(one: Outlook) -> flow.StackOutcome:
    error = one.error()
    return flow.StackOutcome(
        name=one.stack_id, state="not built", reason=error.what, seconds=0.0, error=error
    )


def _end(refused: Mapping[str, Outlook], able: Sequence[Stack], selectors: Sequence[str] | None) -> None:
    """The exit code of a dry run: what the run itself would end with, before anything is built."""
    if refused and selectors:
        raise typer.Exit(next(iter(refused.values())).error().exit_code)
    if refused and not able:
        raise typer.Exit(NothingSelectedError.exit_code)


@app.command("test")
def run_suites(
    name: Name,
    *,
    accept_python: AcceptPython = None,
    tier: Tier = None,
    vendor: Vendor = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
    root: Root = HERE,
) -> None:
    """Run the acceptance suites inside an image and judge the result; always run them, and sign nothing."""
    if dry_run:
        _show_plan(name, root, "test, judge")
        return
    report = Progress()
    settings = _settings(
        root, tier=tier, vendor=vendor, force=True, accepted=accepted_python(accept_python, name)
    )
    with exclusive(settings.root, "stackcheck test", report):
        engine = building.connected(report, builds=not subjects.is_reference(name))
        subject = flow.find_subject(name, engine, settings, report)
        judged = flow.test(subject, engine, settings, report)
    facts = {
        "image": subject.image.reference,
        "verdict": judged.verdict.status,
        "passed": str(len(judged.verdict.passed)),
        "failed": str(len(judged.verdict.failed)),
        "skipped": str(len(judged.verdict.skipped)),
        "result": str(judged.folder / "run" / "result.json"),
    }
    facts["state"] = "tested"
    if judged.verdict.status == "PASSED":
        facts["next"] = f"stackcheck certify {name}"
    print_json(judged.verdict.as_json()) if as_json else print_facts(facts)
    judged.require("PASSED")


@app.command("certify")
def certify_image(
    name: Name,
    *,
    against: Against = None,
    rows: Rows = None,
    accept_python: AcceptPython = None,
    vendor: Vendor = None,
    force: Force = False,
    key: SigningKey = None,
    sign_with: SignWith = None,
    plain_http: PlainHttp = False,
    as_json: AsJson = False,
    dry_run: DryRun = False,
    root: Root = HERE,
) -> None:
    """Run the suites, judge the result and sign the verdict; `publish` then publishes the image with it.

    With --against, exit 6 if the image is slower than REF in a figure, and 9 if this node is too noisy.
    """
    settings = _settings(
        root,
        vendor=vendor,
        key=key,
        sign_with=sign_with,
        force=force,
        plain_http=plain_http,
        accepted=accepted_python(accept_python, name),
    )
    reference = _reference(against, settings) if against else None
    if rows:  # a wrong name is refused before the build, which takes minutes
        published_rows.document_of(settings.root, rows)
    if dry_run:
        document = f"rows of {rows}, " if rows else ""
        pair = f"run in turn with {reference.reference}, " if reference else ""
        _show_plan(name, root, f"test, {document}judge, {pair}sign")
        return
    report = Progress()
    with exclusive(settings.root, "stackcheck certify", report):
        engine = building.connected(report, builds=not subjects.is_reference(name))
        subject = flow.find_subject(name, engine, settings, report)
        if rows:  # before the suites, which take minutes, too
            flow.require_rows(rows, subject, settings)
        judged, paired = flow.test(subject, engine, settings, report), None
        if rows:
            judged = flow.hold_to_rows(rows, subject, judged, engine=engine, settings=settings, report=report)
        if reference:
            judged, paired = _paired(subject, judged, reference, engine, settings=settings, report=report)
        flow.sign(subject, judged, settings, paired)
    _show_signed(name, subject, judged, paired, as_json=as_json)
    judged.require("PASSED")


def _show_signed(
    name: str, subject: Subject, judged: JudgedRun, paired: dict[str, Any] | None, *, as_json: bool
) -> None:
    facts: dict[str, Any] = {
        "verdict": judged.verdict.status,
        "digest": subject.image.manifest_digest,
        "statements": str(judged.folder / "statements"),
    }
    if paired:
        facts["against"] = paired if as_json else against_words(paired)
    if judged.verdict.status == "PASSED":
        facts["next"] = f"stackcheck publish {name}"
    print_json(facts) if as_json else print_facts(facts)


@app.command("publish")
def publish_image(
    name: Name,
    *,
    to: Target = None,
    key: SigningKey = None,
    sign_with: SignWith = None,
    plain_http: PlainHttp = False,
    as_json: AsJson = False,
    dry_run: DryRun = False,
    root: Root = HERE,
) -> None:
    """Publish an image that `certify` signed as PASSED: copy, attach, verify, and move the tag last."""
    target = _target(root, to)
    settings = _settings(root, target=target, key=key, sign_with=sign_with, plain_http=plain_http)
    image = subjects.find_image(name, settings.root)
    tag = image.layout.parent.name
    signing.require_signed(settings.folder(tag))  # before the key: without statements it is not needed
    envelopes = signing.load_signed(settings.folder(tag), settings.signer().public_key())
    if dry_run:
        print(f"{image.manifest_digest}: publish to {target}:{tag} with {len(envelopes)} statements")
        return
    done = flow.publish_signed(image, tag, envelopes, settings, Progress())
    facts = {
        "reference": str(done.reference),
        "digest": image.manifest_digest,
        "next": f"stackcheck verify {done.reference}",
    }
    print_json(facts) if as_json else print_facts(facts)


def _reference(name: str, settings: flow.FlowSettings) -> Verified:
    from stackcheck.compare import paired_gate

    return paired_gate.certified(name, settings, settings.signer().public_key())


def _paired(
    subject: Subject,
    judged: JudgedRun,
    reference: Verified,
    engine: Engine,
    *,
    settings: flow.FlowSettings,
    report: Progress,
) -> tuple[JudgedRun, dict[str, Any] | None]:
    """The verdict after the pair; an image that failed its suites is not compared."""
    from stackcheck.compare import paired_gate

    signing.forget(judged.folder)
    if judged.verdict.status != "PASSED":
        report(f"{subject.name}: not compared with {reference.reference}, as it did not pass")
        return judged, None
    return paired_gate.gate(subject, judged, reference, engine, settings=settings, report=report)


def _settings(
    root: Path,
    *,
    tier: TierName | None = None,
    target: str = "oci:dist",
    key: Path | None = None,
    sign_with: str | None = None,
    vendor: VendorName | None = None,
    force: bool = False,
    plain_http: bool = False,
    accepted: tuple[str, ...] = (),
) -> flow.FlowSettings:
    return flow.FlowSettings(
        root=root.resolve(),
        tier=tier,
        target=target,
        key=key_path(key, sign_with),
        sign_with=sign_words(sign_with),
        vendor=vendor,
        force=force,
        plain_http=plain_http,
        accepted_python=accepted,
        build=building.build_options(None, None, None, no_cache=False),
    )


def _target(root: Path, to: str | None) -> str:
    """Where images are published: the option's value, else the one in matrix.yaml."""
    return parse_target(to or matrix.load(root.resolve() / "matrix.yaml").publish)


def _show_plan(name: str, root: Path, steps: str) -> None:
    """The dry run of a verb that takes STACK|IMAGE; it refuses what a real run would refuse."""
    found = subjects.find_stack(name, root.resolve())
    if found:
        plans.checked_files(found, root.resolve())
    print(f"{found.id if found else name}: {steps}")
