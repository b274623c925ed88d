"""The verbs test, certify and publish: each runs one part of the main job, which `images` runs whole.

In: a stack or an image. Out: facts or JSON on stdout, and an exit code.
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

from stackcheck import flow
from stackcheck.certificate import derived, signing
from stackcheck.certificate.derived import Below
from stackcheck.certificate.verify import Verified
from stackcheck.cli import build as building
from stackcheck.cli import options as opt
from stackcheck.cli.consumer import against_words
from stackcheck.cli.output import Progress, counted, print_facts, print_json, print_table
from stackcheck.compare import paired_runs
from stackcheck.engine.client import Engine
from stackcheck.errors import ChecksFailedError, ConfigurationError
from stackcheck.files.checkout import exclusive
from stackcheck.imaging import plans
from stackcheck.imaging.build import Options as BuildOptions
from stackcheck.policy import Tier as TierName
from stackcheck.suite import some
from stackcheck.suite import subject as subjects
from stackcheck.suite.judged import JudgedRun
from stackcheck.suite.subject import Subject
from stackcheck.vendors import Vendor as VendorName

app = opt.new_app()

Against = Annotated[
    str | None,
    opt.option(
        "--against REF",
        "A certified image: run both in turn on this node, and refuse this one if it is slower.",
        "bounds alone decide",
    ),
]

DerivedFrom = Annotated[
    str | None,
    opt.option(
        "--derived-from REF",
        "The certified image that this one was made FROM: run what its layers can have changed.",
        "every check runs",
    ),
]


@app.command("test")
def run_suites(
    name: opt.Name,
    *,
    some: Annotated[
        str | None, opt.option("-k EXPR", "Only checks that match, as pytest's -k.", "all checks")
    ] = None,
    last_failed: Annotated[
        bool, opt.option("--last-failed --lf", "Only the checks that failed last time.")
    ] = False,
    accept_python: opt.AcceptPython = None,
    tier: opt.Tier = None,
    vendor: opt.Vendor = None,
    as_json: opt.AsJson = False,
    dry_run: opt.DryRun = False,
    root: opt.Root = opt.HERE,
) -> None:
    """Run the acceptance suites inside an image and judge the result; always run them, and sign nothing.

    With -k or --last-failed only some checks run: there is no verdict, and the history does not keep them.
    """
    if some and last_failed:
        raise ConfigurationError("-k and --last-failed both choose the checks", next_step="leave one out")
    if dry_run:
        _show_plan(name, root, "test, judge")
        return
    report = Progress()
    settings = settings_of(
        root, tier=tier, vendor=vendor, force=True, accepted=opt.accepted_python(accept_python, name)
    )
    with exclusive(settings.root, "stackcheck test", report):
        engine = building.connected(report, builds=not subjects.is_reference(name))
        subject = flow.find_subject(name, engine, settings, report)
        if some or last_failed:
            _run_some(name, subject, engine, settings, report=report, chosen=some, as_json=as_json)
            return
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


def _run_some(
    name: str,
    subject: Subject,
    engine: Engine,
    settings: flow.FlowSettings,
    *,
    report: Progress,
    chosen: str | None,
    as_json: bool,
) -> None:
    """Run the checks that -k names, or else those that failed last time; print how each ended."""
    found = some.run_some(
        subject,
        engine,
        only=chosen,
        tier=settings.tier_of(subject),
        root=settings.root,
        out=settings.folder(subject.name),
        report=report,
    )
    checks = found.result.checks
    bad = [check.id for check in checks if check.outcome not in some.GOOD]
    if as_json:
        print_json({check.id: check.outcome for check in checks})
    else:
        print_table(("CHECK", "OUTCOME"), [(check.id, check.outcome) for check in checks])
        print_facts({"verdict": "none: some checks alone", "result": str(found.file)})
    if bad:
        raise ChecksFailedError(
            f"{counted(len(bad), 'check')} did not pass",
            got="\n    ".join(bad),
            next_step=f"correct it, then: stackcheck test {name} --last-failed",
        )


@app.command("certify")
def certify_image(
    name: opt.Name,
    *,
    against: Against = None,
    derived_from: DerivedFrom = None,
    accept_python: opt.AcceptPython = None,
    vendor: opt.Vendor = None,
    force: opt.Force = False,
    key: opt.SigningKey = None,
    sign_with: opt.SignWith = None,
    plain_http: opt.PlainHttp = False,
    as_json: opt.AsJson = False,
    dry_run: opt.DryRun = False,
    root: opt.Root = opt.HERE,
) -> None:
    """Run the suites, judge the result and sign the verdict; `publish` then publishes the image with it.

    With --against, exit 6 if the image is slower than REF in a figure, and 9 if this node is too noisy.
    With --derived-from, the certificate counts only as long as that of REF does, in the same target.
    """
    settings = settings_of(
        root,
        vendor=vendor,
        key=key,
        sign_with=sign_with,
        force=force,
        plain_http=plain_http,
        accepted=opt.accepted_python(accept_python, name),
    )
    reference = _reference(against, settings) if against else None
    below = _below(name, derived_from, settings) if derived_from else None
    if dry_run:
        pair = f"run in turn with {reference.reference}, " if reference else ""
        what = f"test what it adds to {below.verified.reference}" if below else "test"
        _show_plan(name, root, f"{what}, judge, {pair}sign")
        return
    report = Progress()
    with exclusive(settings.root, "stackcheck certify", report):
        engine = building.connected(report, builds=not subjects.is_reference(name))
        subject = flow.find_subject(name, engine, settings, report)
        taken = flow.look_below(subject, below, settings, report) if below else None
        settings = dataclasses.replace(settings, carried=taken.carried) if taken else settings
        judged, paired = flow.test(subject, engine, settings, report), None
        judged = flow.hold_to_certified(subject, judged, settings, report)
        if reference:
            judged, paired = _paired(subject, judged, reference, engine, settings=settings, report=report)
        flow.sign(subject, judged, settings, paired, taken)
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
    name: opt.Name,
    *,
    to: opt.Target = None,
    key: opt.SigningKey = None,
    sign_with: opt.SignWith = None,
    plain_http: opt.PlainHttp = False,
    as_json: opt.AsJson = False,
    dry_run: opt.DryRun = False,
    root: opt.Root = opt.HERE,
) -> None:
    """Publish an image that `certify` signed as PASSED: copy, attach, verify, and move the tag last."""
    target = opt.target_of(root, to)
    settings = settings_of(root, target=target, key=key, sign_with=sign_with, plain_http=plain_http)
    image = subjects.find_image(name, settings.root)
    tag = image.layout.parent.name
    signing.require_signed(settings.folder(tag))  # before the key: without statements it is not needed
    envelopes = signing.load_signed(settings.folder(tag), settings.signer().public_key())
    if dry_run:
        print(
            f"{image.manifest_digest}: publish to {target}:{tag} with {counted(len(envelopes), 'statement')}"
        )
        return
    done = flow.publish_signed(image, tag, envelopes, settings, Progress())
    facts = {
        "reference": str(done.reference),
        "digest": image.manifest_digest,
        "next": f"stackcheck verify {done.reference}",
    }
    print_json(facts) if as_json else print_facts(facts)


def _below(name: str, reference: str, settings: flow.FlowSettings) -> Below:
    """The certified image that `name` was made from."""
    if not subjects.is_reference(name):
        raise ConfigurationError(
            "--derived-from is for images that were not built here",
            got=f"the stack {name}",
            expected="the reference of an image that was made FROM a certified one",
            next_step="leave the option out",
        )
    wanted = paired_runs.this_host(settings)
    key = settings.signer().public_key()
    return derived.read(reference, wanted, public_key=key, plain_http=settings.plain_http)


def _reference(name: str, settings: flow.FlowSettings) -> Verified:

    return paired_runs.certified(name, settings, settings.signer().public_key())


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
    signing.forget(judged.folder)
    if judged.verdict.status != "PASSED":
        report(f"{subject.name}: not compared with {reference.reference}, as it did not pass")
        return judged, None
    return paired_runs.gate(subject, judged, reference, engine, settings=settings, report=report)


def settings_of(
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
    build: BuildOptions | None = None,
) -> flow.FlowSettings:
    """The settings of a command line; nothing is read or made yet."""
    return flow.FlowSettings(
        root=root.resolve(),
        tier=tier,
        target=target,
        key=opt.key_path(key, sign_with),
        sign_with=opt.sign_words(sign_with),
        vendor=vendor,
        force=force,
        plain_http=plain_http,
        accepted_python=accepted,
        build=build or building.build_options(),
    )


def _show_plan(name: str, root: Path, steps: str) -> None:
    """The dry run of a verb that takes STACK|IMAGE; it refuses what a real run would refuse."""
    found = subjects.find_stack(name, root.resolve())
    if found:
        plans.checked_files(found, root.resolve())
    print(f"{found.id if found else name}: {steps}")
