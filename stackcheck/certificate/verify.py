"""Check that an image is certified for a host, without trusting the store that holds it.

In: a reference, a pinned public key, a device model and a driver. Out: `Verified`, or a `CertificateError`
that says why not. The numbered steps are those of docs/guides/certificates.md, "Verify with stackcheck".
"""

from __future__ import annotations

import datetime as dt
import functools
import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from stackcheck.certificate import attachments
from stackcheck.certificate.for_host import Wanted, verdict_for
from stackcheck.certificate.keyring import Pinned
from stackcheck.certificate.policy import MAX_AGE, check_complete, check_subject, valid_verdicts
from stackcheck.certificate.reader import Reader
from stackcheck.certificate.statement import (
    SBOM,
    VSA,
    Envelope,
    Statement,
    carried_from,
    evidence,
    facts,
    lifts,
    name_of,
    newest,
    revocations,
    status,
    subject_digests,
    time_verified,
)
from stackcheck.errors import CertificateError
from stackcheck.oci import tags
from stackcheck.oci.documents import Descriptor, Manifest, MissingError, RegistryError
from stackcheck.oci.layout import OciLayout
from stackcheck.oci.store import Reference, Store, parse_reference
from stackcheck.oci.stores import open_store

TOTAL_S = 300.0  # for all that a registry is asked for
ATTEMPTS = 3  # to read from a registry, where another host may take statements away meanwhile


@dataclass(frozen=True, kw_only=True)
class Verified:
    """An image whose certificate is valid for a host."""

    reference: Reference  # the image by digest: what to run
    digest: str  # digest of the manifest
    config_digest: str  # digest of the config: the tested container was started from it
    stack_id: str | None  # the stack, or None for an image that was not built by this project
    device_model: str  # the device model that was asked for and certified
    driver: str | None  # the driver that was asked for and certified; None for a host without one
    verified_at: dt.datetime
    facts: dict[str, Any]  # everything else that the certificate states
    statement: str = ""  # digest of the certificate


def verify(
    reference: str,
    wanted: Wanted,
    *,
    public_key: Pinned,
    max_age: dt.timedelta = MAX_AGE,
    now: dt.datetime | None = None,
    plain_http: bool = False,
) -> Verified:
    """Check that an image is certified for a host: `oci:DIR:TAG`, `HOST/REPO:TAG`, or either by `@sha256:…`.

    Statements that other keys signed do not count. `max_age` limits how long a store can hide a revocation.

    Raises:
        CertificateError: The image is not certified, or the store does not hold what was certified.
    """
    return read(reference, public_key=public_key, max_age=max_age, now=now, plain_http=plain_http).for_host(
        wanted
    )


@dataclass(frozen=True, kw_only=True)
class CertifiedImage:
    """An image with valid verdicts, of which none is chosen yet.

    Attributes:
        below: Reads the certified image that this one was made from, under the same conditions.
    """

    reference: str
    moment: dt.datetime  # when ages and waivers are judged
    manifest: Manifest
    statements: tuple[Statement, ...]  # what the pinned key signed about it
    verdicts: tuple[Statement, ...]  # the valid verdicts among them, for any host
    below: Callable[[str], CertifiedImage] | None = None

    def for_host(self, wanted: Wanted) -> Verified:
        """The image, certified for a host.

        Raises:
            CertificateError: It is not, or the store does not hold what was certified.
        """
        today = self.moment.astimezone(dt.UTC).date()
        parsed = parse_reference(self.reference)
        # 6. Choose the newest of these for this host.
        chosen = verdict_for(self.reference, self.verdicts, wanted, today)
        # 7. Compare the tag.
        _check_tag(self.reference, parsed, chosen)
        # 8. Compare the image.
        check_subject(self.reference, chosen, self.manifest)
        # 9. Check that nothing was removed.
        check_complete(self.reference, chosen, self.statements)
        # 10. Check that the certificate of the image below still holds, if checks were taken over from it.
        if carried_from(chosen):
            self._check_below(parsed.target, chosen, wanted)
        return _verified(Reference(target=parsed.target, digest=self.manifest.digest), chosen, wanted)

    def _check_below(self, target: str, chosen: Statement, wanted: Wanted) -> None:
        """Refuse an image if the one below is not certified any more, or was revoked since."""
        taken = carried_from(chosen)
        where = f"{target}@{taken['digest']}"
        why = "it was not read"
        try:
            if self.below:
                found = self.below(where).for_host(wanted)
                lifted, since = found.facts.get("notBefore"), dt.datetime.fromisoformat(taken["verifiedAt"])
                revoked = lifted and dt.datetime.fromisoformat(lifted) >= since
                why = f"it was revoked at {lifted}, after its checks were taken over" if revoked else ""
        except CertificateError as error:
            why = f"{error.what}: {error.got}"
        if why:
            raise CertificateError(
                "the certificate of the image below does not hold, and this one takes checks over from it",
                where=self.reference,
                got=f"{where}: {why}",
                expected="an image below that is certified here and in the same target",
                next_step="certify this image again: stackcheck certify IMAGE; or bring the image below:"
                f" stackcheck promote REF --to {target}",
            )


def read(
    reference: str,
    *,
    public_key: Pinned,
    max_age: dt.timedelta = MAX_AGE,
    now: dt.datetime | None = None,
    plain_http: bool = False,
    total_s: float = TOTAL_S,
) -> CertifiedImage:
    """The valid verdicts on an image, for any host; `verify` explains the arguments.

    All that a registry is asked for must be answered within `total_s` seconds.

    Raises:
        CertificateError: No verdict on the image is valid.
    """
    parsed = parse_reference(reference)
    # 1. Read the manifest. 2. Check the bytes. 3. Collect the statements that the pinned key signed.
    manifest, envelopes = _signed(reference, parsed, public_key, plain_http=plain_http, total_s=total_s)
    statements = tuple(item.statement for item in envelopes)
    # 4. Look at the newest VSA. 5. Keep the valid verdicts.
    moment = now or dt.datetime.now(dt.UTC)
    verdicts = tuple(valid_verdicts(reference, statements, moment, max_age))
    return CertifiedImage(
        reference=reference,
        moment=moment,
        manifest=manifest,
        statements=statements,
        verdicts=verdicts,
        below=functools.partial(
            read, public_key=public_key, max_age=max_age, now=moment, plain_http=plain_http, total_s=total_s
        ),
    )


def _verified(image: Reference, chosen: Statement, wanted: Wanted) -> Verified:
    assert image.digest is not None
    return Verified(
        reference=image,
        digest=image.digest,
        config_digest=facts(chosen)["configDigest"],
        stack_id=facts(chosen)["stackId"],
        device_model=wanted.device_model,
        driver=wanted.driver,
        verified_at=time_verified(chosen),
        facts=facts(chosen),
        statement=chosen.digest,
    )


def image_blobs(manifest: Manifest) -> tuple[Descriptor, ...]:
    """Config and layers of an image's manifest, each once: it may name one blob thousands of times."""
    blobs = (*manifest.descriptors("config"), *manifest.descriptors("layers"))
    return tuple({(blob.digest, blob.size): blob for blob in blobs}.values())


def as_certificate_error(error: RegistryError, reference: str) -> CertificateError:
    """A store's error as the reason why an image is not accepted."""
    next_step = error.next_step or "fetch the image again from where it was published"
    return error.but(CertificateError, where=error.where or reference, next_step=next_step)


def _signed(
    reference: str, parsed: Reference, public_key: Pinned, *, plain_http: bool, total_s: float
) -> tuple[Manifest, tuple[Envelope, ...]]:
    try:
        store = open_store(parsed.target, plain_http=plain_http, total_s=total_s)
        return _read(store, parsed.name, public_key)
    except RegistryError as error:
        raise as_certificate_error(error, reference) from error


def _read(store: Store, name: str, public_key: Pinned) -> tuple[Manifest, tuple[Envelope, ...]]:
    """Steps 1 to 3: the manifest and its statements. From a registry, `pull` checks the layers as they come.

    They are read again if another process changed the store and removed something meanwhile.
    """
    for attempt in itertools.count(1):
        state = store.state() if isinstance(store, OciLayout) else attempt
        try:
            manifest = store.read_manifest(name)
            if isinstance(store, OciLayout):
                _check_layout(store, manifest)
            return manifest, _statements(store, manifest.digest, public_key)
        except MissingError:
            unchanged = store.state() == state if isinstance(store, OciLayout) else attempt >= ATTEMPTS
            if unchanged:
                raise
    raise AssertionError  # `count` has no end


def _statements(store: Store, digest: str, public_key: Pinned) -> tuple[Envelope, ...]:
    """The statements of an image that the pinned key signed; refuse those that were changed afterwards."""
    reader = Reader(store, digest, public_key)
    found = tuple(reader.envelopes(attachments.manifests(store, digest)).values())
    nothing = newest(item.statement for item in found) is None
    if reader.retired and nothing:
        raise reader.retired
    if reader.changed and nothing:
        raise CertificateError(
            "the attestations were changed after they were signed",
            where=f"{store.target}@{digest}",
            got=f"{reader.changed} attestations that name the pinned key, with signatures that do not fit",
            expected="the bytes that the key signed",
            next_step="fetch the image again from where it was published",
        )
    return found


def _check_layout(store: OciLayout, manifest: Manifest) -> None:
    """Hash every blob of the image and its attestations, in threads: hashing releases Python's lock."""
    store.check_version()
    holders = (manifest, *attachments.manifests(store, manifest.digest))
    blobs = {(blob.digest, blob.size): blob for item in holders for blob in image_blobs(item)}
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        largest_first = sorted(blobs.values(), key=lambda blob: -blob.size)
        for checking in [pool.submit(store.check_blob, blob) for blob in largest_first]:
            checking.result()


def _check_tag(reference: str, parsed: Reference, chosen: Statement) -> None:
    """Refuse a tag of another image: who can move tags must not offer one certified image as another.

    A tag is checked also if the reference has a digest too.
    """
    name = name_of(chosen)
    if parsed.tag is None or tags.names(parsed.tag, name, facts(chosen)["stackId"]):
        return
    digest = subject_digests(chosen)[0]
    raise CertificateError(
        "the certificate is for a different image than the tag names",
        where=reference,
        got=f"a certificate for {name or 'an image that it does not name'}",
        expected=f"a certificate for {tags.floating(parsed.tag)}",
        next_step=f"if you want this image, name it by its digest: {parsed.target}@{digest}",
    )


def attached_sbom(
    reference: str, *, public_key: Pinned, plain_http: bool = False, warn: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """The SBOM that an image's newest certificate names; `warn` gets one line if the image was revoked.

    Raises:
        CertificateError: The key signed no SBOM for this image, or the store does not hold what was signed.
    """
    parsed = parse_reference(reference)
    try:
        store = open_store(parsed.target, plain_http=plain_http, total_s=TOTAL_S)
        digest = store.read_manifest(parsed.name).digest
        known = [item.statement for item in attachments.read_envelopes(store, digest, public_key)]
    except RegistryError as error:
        raise as_certificate_error(error, reference) from error
    if warn is not None:
        _warn_if_revoked(known, warn)
    summaries = sorted((item for item in known if item.predicate_type == VSA), key=time_verified)
    latest = {name: time_verified(item) for item in summaries for name in evidence(item)}
    documents = [item for item in known if item.predicate_type == SBOM and item.digest in latest]
    if not documents:
        raise CertificateError(
            "there is no SBOM signed with the pinned key",
            where=reference,
            got=f"{len(known)} statements of this key, no SBOM that a certificate names",
            expected="an SBOM and a certificate that names it",
            next_step="name the publisher's public key: --key PATH; or certify the image again",
        )
    return max(documents, key=lambda item: latest[item.digest]).predicate


def _warn_if_revoked(known: Sequence[Statement], warn: Callable[[str], None]) -> None:
    latest, revoked = newest(known), revocations(known)
    if latest is not None and revoked and (status(latest) == "FAILED" or not lifts(latest, revoked)):
        reasons = "; ".join(facts(latest).get("reasons", ())) or "no reason is signed"
        warn(f"this image was revoked (FAILED) at {revoked.last}: {reasons}")
