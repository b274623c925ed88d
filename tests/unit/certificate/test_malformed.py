"""A signature says who wrote a statement, not that it is well formed: a wrong field is exit 7."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import pytest

from memory_registry import MemoryRegistry
from small_dist import KEY, verified
from small_images import certify
from stackcheck.certificate import attached_sbom, attachments, reader
from stackcheck.certificate.statement import VSA, Envelope, Statement, open_envelope, sign
from stackcheck.errors import CertificateError
from stackcheck.oci.documents import compact_json
from stackcheck.oci.layout import OciLayout

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from small_images import SmallImage

pytestmark = pytest.mark.usefixtures("no_disk_flushes")
FIELD = "urn:stackcheck:certificate:v1"
WRONG: tuple[Any, ...] = (None, 7, "text", [], {}, [None], {"a": None}, True)
# What verification, or what is shown after it, reads.
READ = (
    *(("verifier",), ("timeVerified",), ("inputAttestations",), ("verificationResult",), ("verifiedLevels",)),
    *(("inputAttestations", 0), ("inputAttestations", 0, "digest"), ("policy",), ("resourceUri",)),
    *((FIELD,), (FIELD, "host"), (FIELD, "host", "devices"), (FIELD, "host", "vendor"), (FIELD, "run")),
    *((FIELD, "run", "tier"), (FIELD, "run", "started"), (FIELD, "configDigest"), (FIELD, "experimental")),
    *((FIELD, "passed"), (FIELD, "warned"), (FIELD, "waivers"), (FIELD, "required"), (FIELD, "bounds")),
    *((FIELD, "archs"), (FIELD, "archs", "staticOnly"), (FIELD, "knownIssues"), (FIELD, "reasons")),
)


def changes() -> Iterator[tuple[tuple[object, ...], object]]:
    for path in READ:
        for value in WRONG:
            yield path, value


def summary_with(image: SmallImage, path: tuple[Any, ...], value: object) -> Envelope:
    (good,) = (item for item in certify(image, KEY) if item.statement.predicate_type == VSA)
    document = copy.deepcopy(good.statement.document)
    place = document["predicate"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return sign(Statement(predicate_type=VSA, payload=compact_json(document)), KEY)


def test_no_wrong_type_in_a_signed_summary_is_a_traceback(image: SmallImage) -> None:
    """Most are refused as malformed. An empty list or an unknown field may be right, and is read as one."""
    refused = [1 for path, value in changes() if is_refused(image, path, value)]
    assert len(refused) > 150


def is_refused(image: SmallImage, path: tuple[object, ...], value: object) -> bool:
    try:
        open_envelope(summary_with(image, path, value).body, KEY.public_key())
    except CertificateError as error:
        return "malformed" in error.what
    harmless = ([], {}, "text", True, *([{"a": None}] if path == (FIELD, "archs") else []))
    assert value in harmless, (path, value)
    return False


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((FIELD, "host", "devices"), None),
        (("timeVerified",), "2026-03-04"),
        (("verificationResult",), "passed"),
    ],
)
def test_a_malformed_summary_of_the_pinned_key_is_refused_and_not_passed_over(
    dist: Path, image: SmallImage, path: tuple[str, ...], value: object
) -> None:
    """It may be the revocation."""
    store, bad = OciLayout(dist), summary_with(image, path, value)
    layer = attachments.legacy_layer(store, bad)
    tag = attachments.legacy_tag(image.manifest_digest)
    kept = store.read_manifest(tag).descriptors("layers")
    store.write_manifest(attachments.legacy_manifest(store, (*kept, layer)), tag)
    with pytest.raises(CertificateError, match="malformed") as caught:
        verified(dist)
    assert caught.value.exit_code == 7


def test_duplicate_keys_in_a_signed_statement_are_refused(image: SmallImage) -> None:
    (good,) = (item for item in certify(image, KEY) if item.statement.predicate_type == VSA)
    twice = good.statement.payload[:-1] + b',"predicateType":"' + VSA.encode() + b'"}'
    assert json.loads(twice)
    with pytest.raises(CertificateError, match="malformed"):
        open_envelope(sign(Statement(predicate_type=VSA, payload=twice), KEY).body, KEY.public_key())


def test_a_passed_summary_without_the_level_of_a_certificate_is_refused(image: SmallImage) -> None:
    for levels in (["SLSA_BUILD_LEVEL_3"], ["STACKCHECK_CERTIFIED", "STACKCHECK_TIER_SOAK"]):
        with pytest.raises(CertificateError, match="malformed") as caught:
            open_envelope(summary_with(image, ("verifiedLevels",), levels).body, KEY.public_key())
        assert "verifiedLevels" in str(caught.value)


def test_the_packages_of_a_revoked_image_are_shown_with_a_word_of_warning(
    dist: Path, image: SmallImage
) -> None:
    from small_dist import DAY
    from small_images import NOW, quiet
    from stackcheck.certificate.revoke import revoke

    told: list[str] = []
    reference = f"oci:{dist}@{image.manifest_digest}"
    attached_sbom.attached(reference, public_key=KEY.public_key(), warn=told.append)
    assert told == []
    revoke(reference, reason="NaN", key=KEY, now=NOW + DAY, report=quiet)
    assert attached_sbom.attached(reference, public_key=KEY.public_key(), warn=told.append)
    assert len(told) == 1
    assert "NaN" in told[0]


def test_a_changed_certificate_is_called_changed_and_not_one_of_another_key(
    dist: Path, image: SmallImage
) -> None:
    store: Any = MemoryRegistry()
    source = OciLayout(dist)
    subject = source.read_manifest(image.manifest_digest)
    attachments.attach(store, subject, certify(image, KEY), KEY.public_key())
    store.manifests[subject.digest] = subject
    del store.names[attachments.legacy_tag(subject.digest)]
    for item in attachments.bundles_of(store, subject.digest):
        (layer,) = item.descriptors("layers")
        body = store.blobs[layer.digest].replace(b'"sig":"M', b'"sig":"N')
        store.blobs[layer.digest] = body
    from stackcheck.certificate import verify

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "read_small_blob", lambda store, layer: store.blobs[layer.digest])
        with pytest.raises(CertificateError, match="changed after they were signed"):
            verify._statements(store, subject.digest, KEY.public_key())
