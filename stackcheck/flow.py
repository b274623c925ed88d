"""The main job: build, run, judge, sign and publish, stack by stack; each step leaves its file.

In: stacks and `Settings`. Out: an `Outcome` each. A step is skipped only when all that it depends on is
unchanged, and the outcome says so.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Literal

from stackcheck import build, candidate, keys, publish, pull, signing, vendors
from stackcheck.errors import (
    CertificateError,
    ConfigurationError,
    PublishError,
    StackcheckError,
)
from stackcheck.examine import examine, refusal
from stackcheck.oci import RegistryError
from stackcheck.suite import RENEW_AFTER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from stackcheck.build import Image
    from stackcheck.candidate import Candidate, Settings
    from stackcheck.engine import Engine
    from stackcheck.results import RunResult
    from stackcheck.stack import Stack
    from stackcheck.verdict import Verdict

State = Literal["certified", "unchanged", "failed", "unfit", "not built", "not published"]


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


def images(
    stacks: Iterable[Stack], engine: Engine, settings: Settings, report: Callable[[str], None]
) -> Iterator[Outcome]:
    """Build, test, certify and publish each stack; one that fails does not keep the others back."""
    for stack in stacks:
        start = time.monotonic()
        try:
            (image,) = build.build(
                (stack,), engine, root=settings.root, report=report, options=settings.build
            )
        except StackcheckError as error:
            yield _stopped(stack.id, "not built", error, start)
            continue
        subject = candidate.of_stack(stack, image, settings)
        yield _certified_and_published(subject, engine, settings, report, start)


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
    key = keys.load_or_create(settings.key)
    if may_keep and _still_valid(reference, subject, result, settings):
        return reference, True
    envelopes = signing.sign(subject, result, judged, settings)
    try:
        done = publish.publish(
            subject.image.layout,
            tag=subject.name,
            envelopes=envelopes,
            target=settings.target,
            public_key=key.public_key(),
            report=report,
            key=key,
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
