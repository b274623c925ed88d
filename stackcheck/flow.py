"""The main job for one image: run, judge, sign, publish; each step leaves its file and may be skipped.

In: a built stack or any image in the engine, and `Settings`. Out: an `Outcome`. A step is skipped only when
all that it depends on is unchanged, and the outcome says so.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import time
from typing import TYPE_CHECKING, Literal

from stackcheck import build, certificate, keys, publish, pull, suite, vendors, verdict
from stackcheck.errors import (
    CertificateError,
    ChecksFailedError,
    ConfigurationError,
    MachineUnfitError,
    PublishError,
    StackcheckError,
)
from stackcheck.oci import RegistryError
from stackcheck.predicates import Provenance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from stackcheck.build import Image
    from stackcheck.engine import Engine
    from stackcheck.matrix import Matrix
    from stackcheck.resolve import Stack
    from stackcheck.results import RunResult
    from stackcheck.verdict import Verdict, Waiver

State = Literal["certified", "unchanged", "failed", "unfit", "not built", "not published"]

# The next `stackcheck images` renews a certificate older than this; `verify` accepts 30 days by default.
RENEW_AFTER = dt.timedelta(days=7)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What a user can choose.

    Attributes:
        root: The checkout.
        target: Where to publish (`oci:DIR` or `HOST/REPO`).
        key: Signing key, PEM; made on first use.
        tier: How thorough the suites are.
        vendor: The vendor whose checks run; None means the stack's own.
        waivers: Named exceptions; each is signed into the certificate.
        force: Run again even when nothing changed.
    """

    root: Path
    target: str
    key: Path
    tier: suite.Tier = "smoke"
    vendor: vendors.Vendor | None = None
    waivers: tuple[Waiver, ...] = ()
    force: bool = False

    def folder(self, name: str) -> Path:
        """Where the steps of one stack or image leave their files."""
        return self.root / "build" / name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """An image that is to be judged, and by what.

    Attributes:
        name: Stack id, or a file-safe form of the reference.
        image: The image, with its layout.
        vendor: Whose checks run.
        required: The checks that have to pass.
        provenance: How it came to be.
        experimental: Whether the matrix itself calls the combination unproven.
    """

    name: str
    image: Image
    vendor: vendors.Vendor
    required: tuple[str, ...]
    provenance: Provenance
    experimental: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How far one stack came, and why no further."""

    name: str
    state: State
    reason: str
    seconds: float
    image: Image | None = None
    result: RunResult | None = None
    verdict: Verdict | None = None
    reference: str | None = None
    error: StackcheckError | None = None


def candidate(stack: Stack, image: Image, settings: Settings) -> Candidate:
    """A built stack as a candidate, with the provenance that its files give."""
    return Candidate(
        name=stack.id,
        image=image,
        vendor=settings.vendor or stack.vendor,
        required=stack.required_checks,
        provenance=build.provenance(stack, image, root=settings.root),
        experimental=stack.experimental,
    )


def foreign(image: Image, name: str, matrix: Matrix, settings: Settings) -> Candidate:
    """An image not built here: the vendor's required checks hold, and nothing is known of its making."""
    vendor = settings.vendor or vendors.detect()
    return Candidate(
        name=name,
        image=image,
        vendor=vendor,
        required=matrix.required[vendor],
        provenance=Provenance(
            parameters={"origin": "not built by this project", "reference": image.reference}
        ),
    )


def images(
    stacks: Iterable[Stack], engine: Engine, settings: Settings, report: Callable[[str], None]
) -> Iterator[Outcome]:
    """Build, test, certify and publish each stack; one that fails does not keep the others back."""
    for stack in stacks:
        start = time.monotonic()
        try:
            (image,) = build.build((stack,), engine, root=settings.root, report=report)
        except StackcheckError as error:
            yield _stopped(stack.id, "not built", error, start)
            continue
        yield _certified_and_published(candidate(stack, image, settings), engine, settings, report, start)


def _certified_and_published(
    subject: Candidate, engine: Engine, settings: Settings, report: Callable[[str], None], start: float
) -> Outcome:
    try:
        result, judged, reused = examine(subject, engine, settings, report)
    except StackcheckError as error:
        return _stopped(subject.name, "failed", error, start, image=subject.image)
    if judged.status != "PASSED":
        state: State = "unfit" if judged.status == "UNFIT" else "failed"
        refused = refusal(judged, settings.folder(subject.name))
        return _stopped(
            subject.name, state, refused, start, image=subject.image, result=result, verdict=judged
        )
    try:
        reference, unchanged = _published(subject, result, judged, settings, report, may_keep=reused)
    except StackcheckError as error:
        return _stopped(
            subject.name, "not published", error, start, image=subject.image, result=result, verdict=judged
        )
    return Outcome(
        name=subject.name,
        state="unchanged" if unchanged else "certified",
        reason="same image, suites, thresholds and host; certificate still valid" if unchanged else "",
        seconds=time.monotonic() - start,
        image=subject.image,
        result=result,
        verdict=judged,
        reference=reference,
    )


def examine(
    subject: Candidate,
    engine: Engine,
    settings: Settings,
    report: Callable[[str], None],
    *,
    selection: tuple[str, ...] = (),
) -> tuple[RunResult, Verdict, bool]:
    """Run the suites, or take the earlier result when nothing changed; then judge.

    Returns:
        The result, the verdict, and whether the result is an earlier one.
    """
    out = settings.folder(subject.name)
    plan = suite.plan(
        _subject(subject),
        vendor=subject.vendor,
        tier=settings.tier,
        root=settings.root,
        out=out,
        selection=selection,
    )
    earlier = None if settings.force else suite.earlier_result(plan, out)
    if earlier is not None:
        report(f"{subject.name}: not run again: same image, suites, thresholds and host")
    result = earlier or suite.run(plan, engine, out=out, report=report)
    judged = verdict.judge(
        result,
        subject.required,
        image_config_digest=subject.image.config_digest,
        vendor=subject.vendor,
        waivers=settings.waivers,
    )
    text = json.dumps(dataclasses.asdict(judged), indent=2)
    (out / "verdict.json").write_text(text, encoding="utf-8")
    report(f"{subject.name}: {judged.status}, {len(judged.passed)} of {len(result.checks)} checks passed")
    return result, judged, earlier is not None


def sign(
    subject: Candidate, result: RunResult, judged: Verdict, settings: Settings
) -> tuple[certificate.Envelope, ...]:
    """Sign the statements about a judged image and keep them under `build/`."""
    envelopes = certificate.certify(
        subject.image,
        result,
        judged,
        subject.provenance,
        key=keys.load_or_create(settings.key),
        now=dt.datetime.now(dt.UTC),
        experimental=subject.experimental,
    )
    folder = settings.folder(subject.name) / "statements"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.json"):
        old.unlink()
    for number, envelope in enumerate(envelopes):
        (folder / f"{number}.dsse.json").write_bytes(envelope.body)
    return envelopes


def signed(name: str, settings: Settings) -> tuple[certificate.Envelope, ...]:
    """The statements that `certify` left for a stack or image.

    Raises:
        ConfigurationError: There are none.
        CertificateError: Another key signed them.
    """
    paths = sorted((settings.folder(name) / "statements").glob("*.dsse.json"))
    if not paths:
        raise ConfigurationError(
            "there is no certificate to publish",
            where=str(settings.folder(name) / "statements"),
            next_step=f"stackcheck certify {name}",
        )
    public = keys.load_or_create(settings.key).public_key()
    return tuple(certificate.open_envelope(path.read_bytes(), public) for path in paths)


def refusal(judged: Verdict, folder: Path) -> StackcheckError:
    """The error that a verdict other than PASSED ends with: the first reasons, and where all of them are."""
    kind = MachineUnfitError if judged.status == "UNFIT" else ChecksFailedError
    shown = "\n    ".join(judged.reasons[:8])
    more = f"\n    … and {len(judged.reasons) - 8} more" if len(judged.reasons) > 8 else ""
    return kind(
        f"the verdict is {judged.status}; nothing is published",
        got=shown + more,
        expected="every required check passed",
        next_step=f"read {folder / 'run' / 'container.log'}",
    )


def _published(
    subject: Candidate,
    result: RunResult,
    judged: Verdict,
    settings: Settings,
    report: Callable[[str], None],
    *,
    may_keep: bool,
) -> tuple[str, bool]:
    """Publish unless the same image stands there under a certificate that is still fresh."""
    reference = f"{settings.target}:{subject.name}"
    public = keys.load_or_create(settings.key).public_key()
    if may_keep and _still_valid(reference, subject, result, settings):
        return reference, True
    envelopes = sign(subject, result, judged, settings)
    try:
        done = publish.publish(
            subject.image.layout,
            tag=subject.name,
            envelopes=envelopes,
            target=settings.target,
            public_key=public,
            report=report,
        )
    except RegistryError as error:
        raise _with_a_way_on(error, settings.target) from error
    return str(done.reference), False


def _with_a_way_on(error: RegistryError, target: str) -> PublishError:
    """Damage besides the image may hide a withdrawal: only the layout's owner may put it aside."""
    folder = target.removeprefix("oci:")
    if error.next_step or folder == target:
        return error
    return PublishError(
        error.what,
        where=error.where,
        got=error.got,
        expected=error.expected,
        next_step=f"move {folder} away, then run the same command again: what it holds is published anew",
    )


def _still_valid(reference: str, subject: Candidate, result: RunResult, settings: Settings) -> bool:
    """Whether the target holds this image under a fresh certificate of this run and these waivers."""
    host = vendors.host(subject.vendor)
    try:
        verified = pull.verify(
            reference,
            public_key=keys.load_or_create(settings.key).public_key(),
            max_age=RENEW_AFTER,
            device_model=host.devices[0].model if host.devices else "none",
            driver=host.driver,
        )
    except (CertificateError, ConfigurationError, PublishError):
        return False  # nothing there, too old, or damaged: publish again
    waivers = [dataclasses.asdict(waiver) for waiver in settings.waivers]
    found = (verified.digest, verified.facts["run"]["id"], verified.facts["waivers"])
    return found == (subject.image.manifest_digest, result.run_id, waivers)


def _subject(subject: Candidate) -> suite.Subject:
    return suite.Subject(
        name=subject.name,
        reference=subject.image.reference,
        config_digest=subject.image.config_digest,
        manifest_digest=subject.image.manifest_digest,
        stack_id=subject.image.stack_id,
    )


def _stopped(
    name: str,
    state: State,
    error: StackcheckError,
    start: float,
    *,
    image: Image | None = None,
    result: RunResult | None = None,
    verdict: Verdict | None = None,
) -> Outcome:
    return Outcome(
        name=name,
        state=state,
        reason=error.what,
        seconds=time.monotonic() - start,
        image=image,
        result=result,
        verdict=verdict,
        error=error,
    )
