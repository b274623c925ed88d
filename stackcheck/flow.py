"""The main job on one page: build, test, judge, sign, publish. Every verb runs a part of it.

In: stacks or an image, and `FlowSettings`. Out: a `StackOutcome` for each stack, and the files of each step
under `build/<name>/`. A step is skipped only if nothing that it depends on has changed; the outcome says so.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from stackcheck import vendors
from stackcheck.certificate import derived, policy, predecessor, publish, signers, signing, verify
from stackcheck.certificate.for_host import Wanted
from stackcheck.certificate.signers import Signer
from stackcheck.certificate.statement import Envelope
from stackcheck.engine.client import Engine
from stackcheck.errors import (
    CertificateError,
    ConfigurationError,
    MachineUnfitError,
    PublishError,
    StackcheckError,
)
from stackcheck.history import recorder
from stackcheck.imaging import build
from stackcheck.imaging.image import Image
from stackcheck.matrix import matrix
from stackcheck.matrix.stack import Stack
from stackcheck.oci.documents import RegistryError
from stackcheck.oci.tags import label
from stackcheck.policy import Policy, Tier, is_enough
from stackcheck.suite import added, contents, interpreter, requirements, run, sbom
from stackcheck.suite import subject as subjects
from stackcheck.suite.judged import JudgedRun, run_and_judge
from stackcheck.suite.last_run import CANNOT_CERTIFY
from stackcheck.suite.results import RunResult
from stackcheck.suite.subject import Subject
from stackcheck.suite.verdict import Verdict
from stackcheck.vendors import Vendor

StackState = Literal["certified", "unchanged", "failed", "unfit", "not built", "not published"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlowSettings:
    """What a user can choose.

    Attributes:
        tier: How thorough the suites are; None: the tier that the policy of matrix.yaml certifies.
        accepted_python: Digests of the files that may be an image's Python although no package owns them.
        carried: Ids of the checks that the certificate of the image below vouches for.
    """

    root: Path
    target: str  # where to publish (`oci:DIR` or `HOST/REPO`)
    key: Path  # path of the signing key (PEM); it is made on first use. With `sign_with`, of its public key
    sign_with: tuple[str, ...] = ()  # a program that signs; none: the key itself
    tier: Tier | None = None
    vendor: Vendor | None = None  # the vendor whose checks run; None: the stack's own
    force: bool = False  # run the suites again even if nothing changed
    plain_http: bool = False  # use http for a registry that is not on a loopback address
    build: build.Options = build.DEFAULTS  # how images are built
    accepted_python: tuple[str, ...] = ()
    carried: frozenset[str] = frozenset()

    def signer(self, *, create: bool = False) -> Signer:
        """What signs: the program, or the key. A missing key is made if `create` is true."""
        return signers.choose(self.key, self.sign_with, create=create)

    def tier_of(self, subject: Subject) -> Tier:
        """The tier that the user chose, else the one that certifies the subject's vendor."""
        return self.tier or subject.policy.certifies[subject.vendor]

    def folder(self, name: str) -> Path:
        """Where the steps of one stack or image leave their files."""
        return self.root / "build" / name


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackOutcome:
    """How far one stack got in the flow, and why no further.

    Attributes:
        image: The built image; None if the build failed. The following are None if their step did not run.
    """

    name: str
    state: StackState  # what is true of the stack now
    reason: str  # why it is in this state; empty for `certified`
    seconds: float  # how long the flow took
    image: Image | None = None
    result: RunResult | None = None
    verdict: Verdict | None = None
    reference: str | None = None  # the published image, by its floating tag
    error: StackcheckError | None = None


def images(
    stacks: Iterable[Stack], engine: Engine, settings: FlowSettings, report: Callable[[str], None]
) -> Iterator[StackOutcome]:
    """Build, test, certify and publish each stack, in order. If one fails, the next ones still run."""
    for stack in stacks:
        start = time.monotonic()
        ended = _image(stack, engine, settings, report)
        yield dataclasses.replace(ended, seconds=time.monotonic() - start)


def _image(
    stack: Stack, engine: Engine, settings: FlowSettings, report: Callable[[str], None]
) -> StackOutcome:
    """One stack through all steps. The first error ends it and decides the state."""
    reached = StackOutcome(name=stack.id, state="not built", reason="", seconds=0.0)
    try:
        subject = build_subject(stack, engine, settings, report)
        reached = dataclasses.replace(reached, state="failed", image=subject.image)
        judged = test(subject, engine, settings, report)
        judged = hold_to_certified(subject, judged, settings, report)
        reached = dataclasses.replace(reached, result=judged.result, verdict=judged.verdict)
        judged.require("PASSED")
        reached = dataclasses.replace(reached, state="not published")
        reference = f"{settings.target}:{subject.name}"
        if judged.reused and _still_valid(reference, subject, judged, settings):
            reason = "same image, suites, thresholds and host; certificate still valid"
            return dataclasses.replace(reached, state="unchanged", reason=reason, reference=reference)
        envelopes = sign(subject, judged, settings)
        published = publish_signed(subject.image, subject.name, envelopes, settings, report)
    except MachineUnfitError as error:
        return dataclasses.replace(reached, state="unfit", reason=error.what, error=error)
    except StackcheckError as error:
        return dataclasses.replace(reached, reason=error.what, error=error)
    return dataclasses.replace(reached, state="certified", reference=str(published.reference))


def find_subject(name: str, engine: Engine, settings: FlowSettings, report: Callable[[str], None]) -> Subject:
    """The subject that the user typed as STACK|IMAGE: a stack, which is built if needed, or an image.

    Raises:
        NothingSelectedError: The name matches no stack, or several.
        ConfigurationError: The image's label names a stack that the matrix does not have.
        BuildError: The build failed.
        EngineError: The engine does not have the image.
    """
    found = subjects.find_stack(name, settings.root)
    if found:
        return build_subject(found, engine, settings, report)
    tag = label(name)
    build.bring(name, engine, report)
    interpreter.announced(name, engine, settings.accepted_python, report)  # a layout takes minutes
    image = build.adopt(name, engine, folder=settings.folder(tag), report=report)
    labels = engine.inspect(image.reference).labels
    stack = subjects.labelled_stack(labels, settings.root, name)
    return subjects.of_image(
        image,
        _policy(settings),
        stack,
        name=tag,
        vendor=settings.vendor,
        accepted_python=settings.accepted_python,
    )


def build_subject(
    stack: Stack, engine: Engine, settings: FlowSettings, report: Callable[[str], None]
) -> Subject:
    """The subject of a stack, whose image is built unless nothing changed.

    Raises:
        BuildError: The build failed.
    """
    (image,) = build.build((stack,), engine, root=settings.root, report=report, options=settings.build)
    return subjects.of_stack(stack, image, _policy(settings), vendor=settings.vendor)


def _policy(settings: FlowSettings) -> Policy:
    return matrix.load_matrix(settings.root / "matrix.yaml").policy


def look_below(
    subject: Subject, below: derived.Below, settings: FlowSettings, report: Callable[[str], None]
) -> derived.TakenOver:
    """Find what an image adds to the certified one that it was made from, and which checks that leaves alone.

    Raises:
        ConfigurationError: It was not made from that one.
    """
    folder, tier = settings.folder(subject.name), settings.tier_of(subject)
    plan = run.plan(subject, tier=tier, root=settings.root, out=folder)
    report(f"{subject.name}: comparing with {below.verified.reference}")
    found = added.look(subject.image.layout, subject.image.manifest_digest, below.config, folder / "suite")
    checks = requirements.of(subject, plan.host, tier, settings.root).checks
    taken = derived.take_over(below, found, plan, checks)
    report(f"{subject.name}: paths added or changed: {found.paths}; {taken.words(len(checks))}")
    return taken


def test(
    subject: Subject, engine: Engine, settings: FlowSettings, report: Callable[[str], None]
) -> JudgedRun:
    """Write the SBOM, run and judge the suites, or take the earlier result; keep the run in the history.

    The history keeps no run that leaves checks to the certificate of the image below.

    Raises:
        ChecksFailedError: The run has no valid result, the image's packages cannot be listed, or it has files
            that no package vouches for.
    """
    folder = settings.folder(subject.name)
    contents.require(subject, folder, report)
    sbom.load_or_create(subject.image, engine, folder, report, accepted=subject.accepted_python)
    judged = run_and_judge(
        subject,
        engine,
        tier=settings.tier_of(subject),
        root=settings.root,
        out=folder,
        report=report,
        reuse=lambda _earlier: not settings.force,
        carried=settings.carried,
    )
    return judged if settings.carried else dataclasses.replace(judged, record=_keep(judged, settings, report))


def _keep(judged: JudgedRun, settings: FlowSettings, report: Callable[[str], None]) -> str | None:
    """Keep a run in the history. A history that cannot be written is reported, and changes no verdict."""
    name = judged.plan.subject.name
    try:
        return recorder.keep(settings.root, judged)
    except StackcheckError as error:
        report(f"{name}: WARNING: this run is not in the history: {error}")
        result = judged.folder / "run" / "result.json"
        report(f"{name}: when the history works again: stackcheck history import {result}")
    return None


def hold_to_certified(
    subject: Subject, judged: JudgedRun, settings: FlowSettings, report: Callable[[str], None]
) -> JudgedRun:
    """Hold a run to the best figures that the target's certificates of the same tag and machine state.

    Raises:
        PublishError: They cannot be read; a tag that was never published has none.
    """
    if judged.verdict.status != "PASSED" or judged.result.host.vendor == "cpu":
        return judged
    key = settings.signer(create=True).public_key()
    try:
        known = predecessor.read(settings.target, subject.name, key, plain_http=settings.plain_http)
    except RegistryError as error:
        raise publish.with_next_step(error, settings.target) from error
    if known is not None and not known:
        report(f"{subject.name}: this key certified nothing under its tag: only the floors judge its speed")
    return judged.judged_as(predecessor.held(judged.verdict, judged.result, known or ()))


def sign(
    subject: Subject,
    judged: JudgedRun,
    settings: FlowSettings,
    against: Mapping[str, Any] | None = None,
    taken: derived.TakenOver | None = None,
) -> tuple[Envelope, ...]:
    """Sign the statements about an image, PASSED or FAILED, and write them to `build/<name>/statements/`.

    `against` is what a pair with a certified image found, `taken` what the image below vouches for.

    Raises:
        MachineUnfitError: The verdict is UNFIT, so nothing can be stated about the image.
    """
    judged.require("PASSED", "FAILED")
    needed = subject.policy.certifies[subject.vendor]
    if not is_enough(judged.result.tier, needed):
        raise ConfigurationError(
            f"a run of this tier cannot be certified: {CANNOT_CERTIFY}",
            where=subject.name,
            got=judged.result.tier,
            expected=f"{needed}, which certifies {subject.vendor} (policy in matrix.yaml)",
            next_step=f"stackcheck certify {subject.name}",
        )
    signer = settings.signer(create=True)
    return signing.sign_to_files(
        subject,
        judged.result,
        judged.verdict,
        judged.folder,
        signer,
        sbom=sbom.load_sbom(subject.image, judged.folder),
        files=contents.require(subject, judged.folder, lambda _line: None),  # it was reported before
        against=against,
        derived=taken.signed([check.id for check in judged.result.checks]) if taken else None,
    )


def publish_signed(
    image: Image,
    tag: str,
    envelopes: tuple[Envelope, ...],
    settings: FlowSettings,
    report: Callable[[str], None],
) -> publish.Published:
    """Publish an image with its signed statements under a floating tag.

    Raises:
        PublishError: The certificate is not valid for the image, or the target refused or is damaged.
    """
    policy.require_tier(envelopes, tag, _policy(settings))
    key = settings.signer()  # it signed the envelopes
    try:
        return publish.publish(
            image.layout,
            tag=tag,
            envelopes=envelopes,
            target=settings.target,
            public_key=key.public_key(),
            report=report,
            key=key,
            plain_http=settings.plain_http,
        )
    except RegistryError as error:
        raise publish.with_next_step(error, settings.target) from error


def _still_valid(reference: str, subject: Subject, judged: JudgedRun, settings: FlowSettings) -> bool:
    """Whether the target has a certificate of this image and run, not due, with these waivers and issues."""
    host = vendors.host(subject.vendor)
    try:
        verified = verify.verify(
            reference,
            Wanted(
                device_model=host.devices[0].model if host.devices else "none",
                driver=host.driver,
                devices=len(host.devices),
            ),
            public_key=settings.signer(create=True).public_key(),
            max_age=subject.policy.renew_after,
        )
    except (CertificateError, ConfigurationError, PublishError):
        return False  # missing, too old or damaged: publish again
    waivers = [waiver.model_dump(mode="json") for waiver in judged.verdict.waivers]
    facts = verified.facts
    found = (verified.digest, facts["run"]["id"], facts["waivers"], facts.get("knownIssues"))
    return found == (
        subject.image.manifest_digest,
        judged.result.run_id,
        waivers,
        [issue.as_json() for issue in judged.verdict.known_issues],
    )
