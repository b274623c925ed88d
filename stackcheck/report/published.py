"""What a target publishes, and for which machines it is certified.

In: a target, a pinned public key, a time. Out: a `PublishedImage` for each image, with a `CertifiedFor` for
each device model and driver. The page lists; before an image runs, `stackcheck verify` reads its bytes too.
"""

import datetime as dt
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stackcheck.certificate import attachments
from stackcheck.certificate.keyring import Pinned
from stackcheck.certificate.policy import CLOCK_SKEW, valid_verdicts
from stackcheck.certificate.statement import VSA, Statement, facts, newest, status, time_verified
from stackcheck.errors import CertificateError
from stackcheck.oci import tags
from stackcheck.oci.documents import MissingError
from stackcheck.oci.store import Store
from stackcheck.oci.stores import open_store

Standing = Literal["certified", "expired", "revoked", "not certified"]
_ANY_AGE = dt.timedelta(days=36500)


@dataclass(frozen=True, kw_only=True)
class CertifiedFor:
    """One machine that an image is certified for, with the waivers and bounds of that certificate.

    Attributes:
        expires: From when on `stackcheck verify` refuses it.
        bounds: Class of bounds -> how many figures they judged.
    """

    device_model: str
    device_count: int
    driver: str | None
    tier: str
    verified: dt.datetime
    expires: dt.datetime
    run_id: str
    warned: tuple[str, ...] = ()
    waivers: tuple[dict[str, Any], ...] = ()
    bounds: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class PublishedImage:
    """One image in a target.

    Attributes:
        current: Whether the floating tag of its stack names it.
        stack: The stack id; for another image its tag.
        machines: What it is or was certified for, the newest verdict for each.
    """

    digest: str
    reference: str
    current: bool
    stack: str
    standing: Standing
    reason: str | None = None
    machines: tuple[CertifiedFor, ...] = ()
    known_issues: tuple[dict[str, Any], ...] = ()
    experimental: bool = False


@dataclass(frozen=True, kw_only=True)
class _Counted:
    """Which statements count: of which key, how old, at which time."""

    public_key: Pinned
    now: dt.datetime
    max_age: dt.timedelta


def published(
    target: str, public_key: Pinned, now: dt.datetime, max_age: dt.timedelta, *, plain_http: bool = False
) -> tuple[PublishedImage, ...]:
    """Every image of a target, by stack, the current one of a stack first."""
    store = open_store(target, plain_http=plain_http)
    rule = _Counted(public_key=public_key, now=now, max_age=max_age)
    found = [_image(store, digest, names, rule) for digest, names in _images(store).items()]
    return tuple(sorted(found, key=lambda image: (image.stack, not image.current, image.reference)))


def is_there(target: str) -> bool:
    """Whether anything was ever published: a layout on disk that does not exist holds nothing."""
    return not target.startswith("oci:") or Path(target.removeprefix("oci:"), "index.json").is_file()


def _images(store: Store) -> dict[str, list[str]]:
    """Digest -> its tags, for the images among what the tags name."""
    found: dict[str, list[str]] = {}
    for tag in store.tags():
        if tag.startswith(("sha256-", "cert-")):  # attestations (certificate/attachments.py)
            continue
        digest = tags.digest_of(store, tag)
        if digest:
            found.setdefault(digest, []).append(tag)
    return found


def _image(store: Store, digest: str, names: Sequence[str], rule: _Counted) -> PublishedImage:
    floating = [name for name in names if not tags.is_unique(name)]
    name = min(floating or names)
    statements = _statements(store, digest, rule.public_key)
    latest = newest(statements)
    certificate = facts(latest) if latest else {}
    revoked = latest is not None and status(latest) != "PASSED"
    # The newest verdict for each device model, driver and number of devices.
    verdicts = _passed(statements, rule.now)
    found: dict[tuple[str, str, int], CertifiedFor] = {}
    for statement in sorted(verdicts, key=time_verified):
        for machine in _of(statement, rule.max_age):
            found[machine.device_model, machine.driver or "", machine.device_count] = machine
    machines = tuple(found[key] for key in sorted(found))
    return PublishedImage(
        digest=digest,
        reference=f"{store.target}:{name}",
        current=bool(floating),
        stack=str(certificate.get("stackId") or tags.floating(name)),
        standing=_standing(latest, machines, rule.now),
        reason="; ".join(certificate.get("reasons", ())) or None if revoked else None,
        machines=machines,
        known_issues=tuple(certificate.get("knownIssues", ())),
        experimental=bool(certificate.get("experimental")),
    )


def _statements(store: Store, digest: str, public_key: Pinned) -> list[Statement]:
    try:
        return [item.statement for item in attachments.read_envelopes(store, digest, public_key)]
    except MissingError:  # removed since the tags were listed
        return []


def _passed(statements: Sequence[Statement], now: dt.datetime) -> list[Statement]:
    """The PASSED summaries that no revocation reaches, whatever their age; of a revoked image all."""
    try:
        return valid_verdicts("", statements, now, _ANY_AGE)
    except CertificateError:
        return [item for item in statements if item.predicate_type == VSA and status(item) == "PASSED"]


def _of(statement: Statement, max_age: dt.timedelta) -> Iterable[CertifiedFor]:
    certificate, verified = facts(statement), time_verified(statement)
    host, run = certificate["host"], certificate["run"]
    for model in sorted({device["model"] for device in host["devices"]}):
        yield CertifiedFor(
            device_model=model,
            device_count=len(host["devices"]),
            driver=host["driver"],
            tier=run["tier"],
            verified=verified,
            expires=verified + max_age,
            run_id=run["id"],
            warned=tuple(certificate.get("warned", ())),
            waivers=tuple(certificate.get("waivers", ())),
            bounds=tuple(sorted(certificate.get("bounds", {}).items())),
        )


def _standing(latest: Statement | None, machines: Sequence[CertifiedFor], now: dt.datetime) -> Standing:
    if latest is None or time_verified(latest) > now + CLOCK_SKEW:
        return "not certified"
    if status(latest) != "PASSED":
        return "revoked"
    return "certified" if any(machine.expires > now for machine in machines) else "expired"
