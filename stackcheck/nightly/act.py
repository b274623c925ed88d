"""What a decision changes: certificates and tags. In: an image of the night. Out: what was done, in words."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from stackcheck import flow
from stackcheck.certificate import predecessor
from stackcheck.certificate import renew as renewing
from stackcheck.certificate.pull import pulled_subject
from stackcheck.certificate.revoke import revoke as revoke_image
from stackcheck.certificate.statement import SBOM
from stackcheck.certificate.verify import Verified
from stackcheck.engine.client import Engine
from stackcheck.errors import ConfigurationError
from stackcheck.imaging import build
from stackcheck.matrix import matrix, resolve
from stackcheck.matrix.stack import Stack
from stackcheck.nightly.decide import Decision
from stackcheck.nightly.planning import NightSettings
from stackcheck.nightly.state import Item, Plan
from stackcheck.oci.store import parse_reference
from stackcheck.suite import foreign, interpreter, sbom
from stackcheck.suite import subject as subjects
from stackcheck.suite.judged import JudgedRun
from stackcheck.suite.subject import Subject


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workplace:
    """What every step of a night needs: the choices of the user, an engine, and where progress goes."""

    settings: NightSettings
    engine: Engine
    report: Callable[[str], None]


def subject_of(item: Item, plan: Plan, place: Workplace) -> Subject:
    """The image of an item in the engine, as the suites run in it: exactly the published bytes.

    Raises:
        ConfigurationError: The matrix does not have the image's stack any more.
        CertificateError: The store does not hold what was certified.
        EngineError: The engine refused the image.
    """
    settings, engine = place.settings, place.engine
    policy = matrix.load_matrix(settings.flow.root / "matrix.yaml").policy
    if item.image_id:
        # An image that is not published yet, with the layout that will be.
        flow_settings = place.settings.flow
        folder = flow_settings.folder(item.tag)
        _require_known_python(item, place.engine)  # before minutes are spent on a layout
        image = build.adopt(item.reference, place.engine, folder=folder, report=place.report)
        labels = place.engine.inspect(image.reference).labels
        stack = subjects.labelled_stack(labels, flow_settings.root, item.reference)
        return subjects.of_image(
            image,
            policy,
            stack,
            name=item.tag,
            vendor=plan.fingerprint.vendor,
            accepted_python=item.accept_python,
        )
    stack = _stack(item, settings)
    verified = Verified(
        reference=parse_reference(item.reference),
        digest=item.digest,
        config_digest=item.config_digest,
        stack_id=item.stack_id,
        device_model=plan.fingerprint.device_model,
        driver=plan.fingerprint.driver,
        verified_at=plan.started,
        facts={"python": item.python},
    )
    return pulled_subject(
        verified,
        engine,
        policy,
        name=item.tag,
        vendor=plan.fingerprint.vendor,
        layout=settings.flow.folder(item.tag) / "oci",
        stack=stack,
        report=place.report,
        plain_http=settings.flow.plain_http,
    )


def _require_known_python(item: Item, engine: Engine) -> None:
    """A night has no option for it: what is accepted is in matrix.yaml."""
    try:
        interpreter.find(item.reference, engine, item.accept_python)
    except interpreter.UnownedPythonError as error:
        files = " and ".join(f"{file} is {digest}" for file, digest in error.of_file.items())
        entry = f"accept_python: [{', '.join(error.of_file.values())}]"
        error.got = (
            f"{files}; if an image that you trust has the same, add {entry} under foreign: in matrix.yaml"
        )
        raise


def _stack(item: Item, settings: NightSettings) -> Stack | None:
    if item.stack_id is None:
        return None
    found = {stack.id: stack for stack in resolve.usable(settings.flow.root)}.get(item.stack_id)
    if found is None:
        raise ConfigurationError(
            "the matrix does not have the stack of a published image",
            where=item.reference,
            got=item.stack_id,
            expected="a stack that `stackcheck list` shows: its machines and waivers apply",
            next_step=f"put the stack back; or stackcheck revoke {item.reference} --reason TEXT",
        )
    return found


def _show_changes(item: Item, packages: Mapping[str, Any], place: Workplace) -> None:
    """Report what changed in the packages of a followed tag since its image was certified last."""
    settings = place.settings.flow
    known = predecessor.read(
        settings.target, item.tag, place.settings.key.public_key(), plain_http=settings.plain_http
    )
    before = next((each for each in known or () if each.predicate_type == SBOM), None)
    if before:
        found = foreign.changes(before.predicate, packages)
        place.report(f"{item.tag}: {len(found)} packages changed since the last certificate")
        for line in found:
            place.report(f"{item.tag}:   {line}")


def certify(item: Item, subject: Subject, judged: JudgedRun, place: Workplace) -> str:
    """Renew or widen the certificate of a published image; certify and publish one that is not published."""
    settings, report = place.settings, place.report
    judged.require("PASSED")
    if item.image_id:
        accepted = subject.accepted_python
        packages = sbom.load_or_create(subject.image, place.engine, judged.folder, report, accepted=accepted)
        _show_changes(item, packages, place)
        judged = flow.hold_to_certified(subject, judged, settings.flow, report)
        judged.require("PASSED")
        envelopes = flow.sign(subject, judged, settings.flow)
        done = flow.publish_signed(subject.image, item.tag, envelopes, settings.flow, report)
        return f"; published as {done.reference}"
    renewing.renew(
        item.reference,
        subject,
        judged.result,
        judged.verdict,
        key=settings.key,
        verified=item.runs[-1].judged,
        now=settings.clock(),
        report=report,
        plain_http=settings.flow.plain_http,
    )
    return ""


def revoke(item: Item, decision: Decision, place: Workplace) -> str:
    """Revoke an image and move its floating tags back to the last certified digest; what the tags name now.

    Raises:
        PublishError: The store failed; a second call finishes the work.
    """
    done = revoke_image(
        item.reference,
        reason=f"nightly validation: {decision.because}",
        key=place.settings.key,
        now=item.runs[-1].judged,
        report=place.report,
        plain_http=place.settings.flow.plain_http,
    )
    words = [f"; {tag} names {digest} again" for tag, digest in done.moved.items()]
    words += [f"; {tag} is removed, as no earlier image is certified" for tag in done.removed]
    words += [f"; {tag} still names it, as no earlier image is certified" for tag in done.left]
    return "".join(words)
