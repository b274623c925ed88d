"""Find certified images for a host. In: a registry or layout, a key, a host. Out: what fits, newest first.

Every image is verified as `stackcheck verify` does it; one that does not fit says why.
"""

import dataclasses
import datetime as dt
import time
from collections.abc import Iterable
from typing import Any

from stackcheck.certificate import verify
from stackcheck.certificate.for_host import Wanted
from stackcheck.certificate.keyring import Pinned
from stackcheck.certificate.policy import MAX_AGE
from stackcheck.certificate.statement import (
    RUN_FIELD,
    TEST_RESULT,
    Statement,
    evidence,
    facts,
    recency,
    time_verified,
)
from stackcheck.certificate.verify import CertifiedImage
from stackcheck.errors import CertificateError, ConfigurationError, StackcheckError
from stackcheck.oci import tags
from stackcheck.oci.documents import RegistryError
from stackcheck.oci.stores import open_store
from stackcheck.policy import Tier
from stackcheck.versions import matches

UNKNOWN = "unknown"
TOTAL_S = 900.0  # for all tags of a store
BEGINNING = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageQuery:
    """The host, and what is asked of an image; None: any.

    Attributes:
        exact: Whether the driver is that of a host, so that no other version fits; None is then no driver.
    """

    device_model: str | None = None  # as in devices.json
    driver: str | None = None  # a version or a pattern of versions (`580`, `>=6.4`)
    exact: bool = False
    devices: int = 1  # how many devices must have been tested together
    torch: str | None = None  # a version or a pattern of versions
    tier: Tier | None = None  # the lowest tier; None: the one that certifies the vendor
    waivers: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """One tag of the store."""

    tag: str  # the floating tag
    reference: str | None  # the image by digest: what to run; None if nothing valid is certified
    machine: str  # what it is certified for, in words
    torch: str  # the version that ran; `unknown` if the certificate does not say
    verified_at: dt.datetime  # when the verdict was given
    refused: str | None  # why it does not fit; None if it does


def find(
    target: str,
    wanted: ImageQuery,
    *,
    public_key: Pinned,
    max_age: dt.timedelta = MAX_AGE,
    now: dt.datetime | None = None,
    plain_http: bool = False,
) -> list[Candidate]:
    """Every image of a store (`oci:DIR`, `HOST/REPO`); those that fit come first, and of them the newest.

    Raises:
        CertificateError: The store does not answer, or does not exist.
    """
    try:
        names = tags.all_floating(open_store(target, plain_http=plain_http))
    except RegistryError as error:
        raise verify.as_certificate_error(error, target) from error

    end = time.monotonic() + TOTAL_S

    def candidate(tag: str) -> Candidate:
        try:
            certified = verify.read(
                f"{target}:{tag}",
                public_key=public_key,
                max_age=max_age,
                now=now,
                plain_http=plain_http,
                total_s=_left(end),
            )
        except (CertificateError, ConfigurationError) as error:  # also a tag that no reference can have
            return Candidate(
                tag=tag, reference=None, machine="-", torch="-", verified_at=BEGINNING, refused=_why(error)
            )
        return _judged(tag, certified, wanted)

    found = [candidate(tag) for tag in names]
    return sorted(found, key=lambda each: (each.refused is not None, BEGINNING - each.verified_at, each.tag))


def _left(end: float) -> float:
    """The seconds that one more tag may take.

    Raises:
        CertificateError: None is left.
    """
    left = end - time.monotonic()
    if left <= 0:
        raise CertificateError("not looked at", got=f"all tags together may take {TOTAL_S:g} s")
    return min(left, verify.TOTAL_S)


def _judged(tag: str, certified: CertifiedImage, wanted: ImageQuery) -> Candidate:
    """The newest verdict that fits; else the newest one, with the reason why it does not."""
    last: Candidate | None = None
    for verdict in sorted(certified.verdicts, key=recency, reverse=True):
        host = facts(verdict)["host"]
        torch = _torch(verdict, certified.statements)
        problem = _misfit(host, torch, wanted)
        candidate = Candidate(
            tag=tag,
            reference=None,
            machine=_machine(host),
            torch=torch,
            verified_at=time_verified(verdict),
            refused=problem,
        )
        if problem is None:
            candidate = _checked(candidate, certified, host, wanted)
        if candidate.refused is None:
            return candidate
        last = last or candidate
    assert last is not None  # `verify.read` refuses an image without a valid verdict
    return last


def _checked(
    candidate: Candidate, certified: CertifiedImage, host: dict[str, Any], wanted: ImageQuery
) -> Candidate:
    """The rest of what `stackcheck verify` checks, for the host that this verdict is about."""
    models = {device["model"].casefold(): device["model"] for device in host["devices"]}
    model = models[wanted.device_model.casefold()] if wanted.device_model else next(iter(models.values()))
    try:
        verified = certified.for_host(
            Wanted(
                device_model=model,
                driver=host["driver"],
                devices=wanted.devices,
                tier=wanted.tier,
                waivers=wanted.waivers,
            )
        )
    except CertificateError as error:
        return dataclasses.replace(candidate, refused=_why(error))
    return dataclasses.replace(candidate, reference=str(verified.reference))


def _misfit(host: dict[str, Any], torch: str, wanted: ImageQuery) -> str | None:
    """Why a verdict about this machine is not for the wanted one; None if it is."""
    models = {device["model"].casefold() for device in host["devices"]}
    if wanted.device_model and wanted.device_model.casefold() not in models:
        return f"certified for {_machine(host)}, not for {wanted.device_model}"
    if not _has_driver(host["driver"], wanted):
        return f"certified with driver {host['driver'] or 'none'}, not with {wanted.driver or 'none'}"
    if wanted.torch and (torch == UNKNOWN or not matches("torch", wanted.torch, torch)):
        return f"torch {torch} is not {wanted.torch}"
    return None


def _has_driver(driver: str | None, wanted: ImageQuery) -> bool:
    if wanted.exact:
        return driver == wanted.driver
    return wanted.driver is None or (driver is not None and matches("driver", wanted.driver, driver))


def _torch(verdict: Statement, statements: Iterable[Statement]) -> str:
    """The torch that ran, from the signed test result that the verdict names."""
    named = evidence(verdict)
    for statement in statements:
        if statement.predicate_type == TEST_RESULT and statement.digest in named:
            software = statement.predicate.get(RUN_FIELD, {}).get("software", {})
            return str(software.get("torch") or UNKNOWN)
    return UNKNOWN


def _machine(host: dict[str, Any]) -> str:
    models = sorted({device["model"] for device in host["devices"]})
    driver = f", driver {host['driver']}" if host["driver"] else ""
    return f"{' + '.join(models)} x{len(host['devices'])}{driver}"


def _why(error: StackcheckError) -> str:
    return f"{error.what}: {error.got}" if error.got else error.what
