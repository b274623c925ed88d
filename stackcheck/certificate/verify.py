"""Is a reference certified for this host? The consumer's question, answered without trusting the store.

In: a reference, a pinned public key, a device model and a driver. Out: `Verified`, or a `CertificateError`
that says why not. Digests are recomputed, signatures checked, and of all verdicts of the pinned key the
newest counts.
"""

from __future__ import annotations

import datetime as dt
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stackcheck.certificate import attachments
from stackcheck.certificate.policy import MAX_AGE, standing
from stackcheck.certificate.statement import (
    Statement,
    evidence,
    facts,
    newest,
    subject_digests,
    time_verified,
)
from stackcheck.errors import CertificateError
from stackcheck.oci import tags
from stackcheck.oci.documents import IMAGE_MANIFESTS, Descriptor, Manifest, MissingError, RegistryError
from stackcheck.oci.layout import OciLayout
from stackcheck.oci.store import Reference, parse_reference
from stackcheck.oci.stores import open_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

    from stackcheck.certificate.statement import Envelope
    from stackcheck.oci.store import Store


@dataclass(frozen=True, kw_only=True)
class Verified:
    """An image whose certificate holds on this host.

    Args:
        reference: The image by digest: what to run.
        digest: The manifest's digest.
        config_digest: The config's digest: the image that was tested.
        stack_id: The stack, or None for an image that was not built by this project.
        device_model: The device model that was asked for, and was certified.
        driver: The driver that was asked for, and was certified; None where there is none.
        verified_at: When the verdict was given.
        facts: Everything else that the certificate says.
    """

    reference: Reference
    digest: str
    config_digest: str
    stack_id: str | None
    device_model: str
    driver: str | None
    verified_at: dt.datetime
    facts: dict[str, Any]


def verify(
    reference: str,
    *,
    public_key: EllipticCurvePublicKey,
    max_age: dt.timedelta = MAX_AGE,
    device_model: str,
    driver: str | None,
    now: dt.datetime | None = None,
    plain_http: bool = False,
) -> Verified:
    """Check that an image is certified for a host.

    In an OCI layout every blob and manifest of the image and its attestations is checked against its digest.
    In a registry only manifests and attestations are fetched: `pull` checks the layers as they arrive.

    Args:
        reference: `oci:DIR:TAG`, `HOST/REPO:TAG`, or either with a digest.
        public_key: The pinned key; what others signed does not count.
        max_age: How old the verdict may be: what withdraws a certificate may have been dropped on the way.
        device_model: As in devices.json: H200, MI300X, CPU.
        driver: The host's driver; None where there is none.
        now: The time to judge the age by.
        plain_http: Talk http to a registry that is not on a loopback address.

    Raises:
        CertificateError: It is not certified, or the store does not hold what was certified.
    """
    parsed = parse_reference(reference)
    try:
        store = open_store(parsed.target, plain_http=plain_http)
        manifest, known = _read(store, parsed.name, public_key)
    except RegistryError as error:
        raise refused(error, reference) from error
    verdict = standing(reference, [item.statement for item in known], now or dt.datetime.now(dt.UTC), max_age)
    chosen = _fitting(reference, verdict, device_model, driver)
    _same_stack(reference, parsed, chosen)
    _same_image(reference, chosen, manifest)
    _complete(reference, chosen, [item.statement for item in known])
    return Verified(
        reference=Reference(target=parsed.target, digest=manifest.digest),
        digest=manifest.digest,
        config_digest=facts(chosen)["configDigest"],
        stack_id=facts(chosen)["stackId"],
        device_model=device_model,
        driver=driver,
        verified_at=time_verified(chosen),
        facts=facts(chosen),
    )


def blobs_of(manifest: Manifest) -> tuple[Descriptor, ...]:
    """Config and layers of a manifest."""
    return (*manifest.descriptors("config"), *manifest.descriptors("layers"))


def refused(error: RegistryError, reference: str) -> CertificateError:
    """What a store's failure means to whoever verifies: the image is refused."""
    return CertificateError(
        error.what,
        where=error.where or reference,
        got=error.got,
        expected=error.expected,
        next_step=error.next_step or "fetch the image again from where it was published",
    )


def _read(
    store: Store, name: str, public_key: EllipticCurvePublicKey
) -> tuple[Manifest, tuple[Envelope, ...]]:
    """The manifest and its statements; once more if a writer of the layout removed what it replaced."""
    while True:
        state = store.state() if isinstance(store, OciLayout) else None
        try:
            manifest = store.read_manifest(name)
            if isinstance(store, OciLayout):
                _check_layout(store, manifest)
            return manifest, attachments.read(store, manifest.digest, public_key)
        except MissingError:
            if not isinstance(store, OciLayout) or store.state() == state:
                raise


def _check_layout(store: OciLayout, manifest: Manifest) -> None:
    """Hash every blob that belongs to the image, two and more at a time: hashing lets other threads run."""
    store.check_version()
    carriers = (manifest, *attachments.manifests(store, manifest.digest))
    blobs = {blob.digest: blob for item in carriers for blob in blobs_of(item)}
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        largest_first = sorted(blobs.values(), key=lambda blob: -blob.size)
        for checking in [pool.submit(store.check_blob, blob) for blob in largest_first]:
            checking.result()


def _fitting(
    reference: str, verdicts: Sequence[Statement], device_model: str, driver: str | None
) -> Statement:
    """The newest verdict that was given on this device model and driver."""
    hosts = [facts(item)["host"] for item in verdicts]
    fit = [
        item
        for item, host in zip(verdicts, hosts, strict=True)
        if device_model in {device["model"] for device in host["devices"]} and host["driver"] == driver
    ]
    chosen = newest(fit)
    if chosen is None:
        raise CertificateError(
            "the image is not certified for this host",
            where=reference,
            got=_machine(device_model, driver),
            expected=" or ".join(sorted({_certified_for(host) for host in hosts})),
            next_step="run the suites here: stackcheck certify; or name a host: --device-model, --driver",
        )
    return chosen


def _complete(reference: str, chosen: Statement, known: Sequence[Statement]) -> None:
    """Everything that the verdict was given on is still there: test result, provenance, SBOM."""
    absent = evidence(chosen) - {item.digest for item in known}
    if absent:
        raise CertificateError(
            "statements that the certificate names are not attached to the image",
            where=reference,
            got=f"without {', '.join(sorted(absent))}",
            next_step="fetch the image again from where it was published",
        )


def _certified_for(host: dict[str, Any]) -> str:
    return _machine("/".join(sorted({device["model"] for device in host["devices"]})), host["driver"])


def _machine(device_model: str, driver: str | None) -> str:
    return f"{device_model} with {f'driver {driver}' if driver else 'no driver'}"


def _same_stack(reference: str, parsed: Reference, chosen: Statement) -> None:
    """A tag says which stack is meant: who may move tags cannot pass one certified image for another."""
    stack_id = facts(chosen)["stackId"]
    if parsed.digest or tags.names(parsed.tag or "", stack_id):
        return
    digest = subject_digests(chosen)[0]
    raise CertificateError(
        "the tag names another image than the certificate",
        where=reference,
        got=f"a certificate of {stack_id or 'an image of no stack'}",
        expected=f"one of {tags.floating(parsed.tag or '')}",
        next_step=f"if this image is wanted, name it by its digest: {parsed.target}@{digest}",
    )


def _same_image(reference: str, chosen: Statement, manifest: Manifest) -> None:
    """The certificate's subject and config are this manifest's, and this is an image."""
    configs = tuple(blob.digest for blob in manifest.descriptors("config"))
    if manifest.media_type not in IMAGE_MANIFESTS or configs != (facts(chosen)["configDigest"],):
        raise CertificateError(
            "the certificate is about another image",
            where=reference,
            got=f"config {' '.join(configs)}",
            expected=f"config {facts(chosen)['configDigest']} of {' '.join(subject_digests(chosen))}",
        )
