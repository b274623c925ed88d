"""What was revoked stays revoked until a later run, and tags go back to what is still certified."""

from __future__ import annotations

from typing import Any

import pytest

import result_files
from small_images import NOW, STACK_ID, certify, new_key, quiet
from small_target import HOUR, Publisher, refused
from stackcheck.certificate import attachments, publish, revoke
from stackcheck.certificate.statement import VSA, not_before, status
from stackcheck.errors import CertificateError, PublishError
from stackcheck.oci.layout import OciLayout

pytestmark = pytest.mark.usefixtures("no_disk_flushes")


def test_a_revoked_image_no_longer_verifies_and_its_tag_goes_back(publisher: Publisher) -> None:
    first, second = publisher.image(b"first"), publisher.image(b"second")
    publisher.publish(first)
    two = publisher.publish(second)
    done = publisher.revoke(publisher.reference)
    assert done.moved == {STACK_ID: first.manifest_digest}
    assert publisher.verify().digest == first.manifest_digest
    with pytest.raises(CertificateError, match="FAILED"):
        publisher.verify(str(two.unique))


def test_revoking_the_only_image_takes_its_tag_away(publisher: Publisher) -> None:
    image = publisher.image(b"first")
    one = publisher.publish(image)
    assert publisher.revoke(publisher.reference).removed == (STACK_ID,)
    assert STACK_ID not in publisher.tags()
    with pytest.raises(CertificateError, match="FAILED"):
        publisher.verify(str(one.unique))


def test_a_tag_never_goes_back_to_an_image_that_was_revoked_before(publisher: Publisher) -> None:
    images = [publisher.image(name) for name in (b"first", b"second", b"third")]
    published = [publisher.publish(image) for image in images]
    publisher.revoke(str(published[1].unique))
    assert publisher.revoke(publisher.reference).moved == {STACK_ID: images[0].manifest_digest}


def test_only_the_key_that_certified_can_revoke(publisher: Publisher) -> None:
    publisher.publish(publisher.image(b"first"))
    with pytest.raises(CertificateError):
        revoke.revoke(publisher.reference, reason="x", key=new_key(), now=NOW, report=quiet)
    assert publisher.verify()


def test_signing_the_old_run_again_does_not_supersede_a_revocation(publisher: Publisher) -> None:
    image = publisher.image(b"first")
    publisher.publish(image)
    publisher.revoke(publisher.reference, now=NOW + HOUR)
    assert "revoked after the run" in refused(publisher, image, now=NOW + HOUR).what
    assert publisher.tags().get(STACK_ID) is None


def test_a_later_run_supersedes_a_revocation_in_both_forms(publisher: Publisher) -> None:
    image = publisher.image(b"first")
    publisher.publish(image)
    publisher.revoke(publisher.reference, now=NOW + HOUR)
    publisher.publish(image, now=NOW + 2 * HOUR)
    assert publisher.verify().verified_at == NOW + 2 * HOUR
    store, digest = OciLayout(publisher.folder / "dist"), image.manifest_digest
    reader = attachments.Reader(store, digest, publisher.key.public_key())
    legacy = store.read_manifest(attachments.legacy_tag(digest))
    for form in ((legacy,), attachments.bundles_of(store, digest)):
        known = [item.statement for item in reader.envelopes(form).values()]
        summaries = [(status(item), not_before(item)) for item in known if item.predicate_type == VSA]
        assert summaries == [("PASSED", NOW + HOUR)]
    mark = reader.envelopes([store.read_manifest(attachments.revoked_tag(digest))])
    assert [status(item.statement) for item in mark.values()] == ["FAILED"]  # what was revoked stays known


def test_a_later_run_on_one_host_does_not_supersede_the_revocation_for_another(publisher: Publisher) -> None:
    image = publisher.image(b"first")
    tested, elsewhere = (result_files.host("nvidia", "H200", driver=driver) for driver in ("580.1", "570.9"))
    old = certify(image, publisher.key, host=elsewhere)
    publisher.publish(image, host=tested)
    publisher.publish(image, envelopes=old)
    publisher.revoke(publisher.reference, now=NOW + HOUR)
    publisher.publish(image, host=tested, now=NOW + 2 * HOUR)
    assert publisher.verify(device_model="H200", driver="580.1")
    with pytest.raises(CertificateError, match="not certified for this host"):
        publisher.verify(device_model="H200", driver="570.9")
    assert "revoked after the run" in refused(publisher, image, envelopes=old).what


def test_what_a_revocation_ended_does_not_count_when_a_mirror_attaches_it_again(publisher: Publisher) -> None:
    image = publisher.image(b"first")
    old = certify(image, publisher.key, host=result_files.host("nvidia", "H200", driver="570.9"))
    publisher.publish(image)
    publisher.revoke(publisher.reference, now=NOW + HOUR)
    publisher.publish(image, now=NOW + 2 * HOUR)
    store = OciLayout(publisher.folder / "dist")
    attachments.attach(store, store.read_manifest(STACK_ID), old, publisher.key.public_key())
    with pytest.raises(CertificateError, match="not certified for this host"):
        publisher.verify(device_model="H200", driver="570.9")


def test_promoting_supersedes_no_revocation_of_the_target_without_the_signing_key(
    publisher: Publisher,
) -> None:
    image, other = publisher.image(b"first"), f"oci:{publisher.folder / 'other'}"
    one = publisher.publish(image)
    known: Any = {"public_key": publisher.key.public_key(), "report": quiet, "now": NOW + 2 * HOUR}
    publish.promote(str(one.reference), target=other, **known)
    publisher.revoke(f"{other}:{STACK_ID}", now=NOW + HOUR)
    publisher.publish(image, now=NOW + 2 * HOUR)
    with pytest.raises(PublishError, match="does not supersede the revocation"):
        publish.promote(str(one.reference), target=other, **known)


def test_superseding_a_later_revocation_supersedes_the_earlier_one_of_the_target(
    publisher: Publisher,
) -> None:
    image, other = publisher.image(b"first"), f"oci:{publisher.folder / 'other'}"
    publisher.publish(image)
    known: Any = {"public_key": publisher.key.public_key(), "report": quiet, "now": NOW + 9 * HOUR}
    publish.promote(publisher.reference, target=other, **known)
    publisher.revoke(f"{other}:{STACK_ID}", now=NOW + HOUR)
    publisher.revoke(publisher.reference, now=NOW + 2 * HOUR)
    publisher.publish(image, now=NOW + 4 * HOUR)
    publish.promote(publisher.reference, target=other, **known)
    assert publisher.verify(f"{other}:{STACK_ID}", now=NOW + 9 * HOUR).verified_at == NOW + 4 * HOUR


def test_superseding_an_earlier_revocation_does_not_supersede_the_later_one_of_the_target(
    publisher: Publisher,
) -> None:
    image, other = publisher.image(b"first"), f"oci:{publisher.folder / 'other'}"
    publisher.publish(image)
    known: Any = {"public_key": publisher.key.public_key(), "report": quiet, "now": NOW + 9 * HOUR}
    publish.promote(publisher.reference, target=other, **known)
    publisher.revoke(publisher.reference, now=NOW + HOUR)
    publisher.revoke(f"{other}:{STACK_ID}", now=NOW + 2 * HOUR)
    publisher.publish(image, now=NOW + 4 * HOUR)
    with pytest.raises(PublishError, match="does not supersede the revocation"):
        publish.promote(publisher.reference, target=other, **known)


def test_a_revoked_image_is_not_promoted(publisher: Publisher) -> None:
    one = publisher.publish(publisher.image(b"first"))
    publisher.revoke(publisher.reference)
    with pytest.raises(PublishError):
        publish.promote(
            str(one.unique),
            target=f"oci:{publisher.folder / 'other'}",
            public_key=publisher.key.public_key(),
            report=quiet,
        )
    assert not (publisher.folder / "other").exists()
