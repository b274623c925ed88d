"""The SBOM that is published with an image. In: a reference, a public key. Out: the CycloneDX document."""

from collections.abc import Callable, Sequence
from typing import Any

from stackcheck.certificate import attachments
from stackcheck.certificate.keyring import Pinned
from stackcheck.certificate.statement import (
    SBOM,
    VSA,
    Statement,
    evidence,
    facts,
    lifts,
    newest,
    revocations,
    status,
    time_verified,
)
from stackcheck.certificate.verify import TOTAL_S, as_certificate_error
from stackcheck.errors import CertificateError
from stackcheck.oci.documents import RegistryError
from stackcheck.oci.store import parse_reference
from stackcheck.oci.stores import open_store


def attached(
    reference: str, *, public_key: Pinned, plain_http: bool = False, warn: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """The SBOM that an image's newest certificate names; `warn` gets one line if the image was revoked."""
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
