"""What was revoked stays revoked until a later run, and tags go back to what is still certified."""

from __future__ import annotations

from typing import Any

import pytest

import result_files
from small_images import NOW, STACK_ID, certify, new_key, no_disk_flushes, quiet  # noqa: F401  # a fixture
from small_target import HOUR, World, refused, world_of_one_target  # noqa: F401  # a fixture
from stackcheck.certificate import attachments, publish, revoke
from stackcheck.certificate.statement import VSA, not_before, status
from stackcheck.errors import CertificateError, PublishError
from stackcheck.oci.layout import OciLayout


def test_a_revoked_image_no_longer_verifies_and_its_tag_goes_back(world: World) -> None:
    first, second = world.image(b"first"), world.image(b"second")
    world.publish(first)
    two = world.publish(second)
    done = world.revoke(world.reference)
    assert done.moved == {STACK_ID: first.manifest_digest}
    assert world.verify().digest == first.manifest_digest
    with pytest.raises(CertificateError, match="FAILED"):
        world.verify(str(two.unique))


def test_revoking_the_only_image_takes_its_tag_away(world: World) -> None:
    image = world.image(b"first")
    one = world.publish(image)
    assert world.revoke(world.reference).removed == (STACK_ID,)
    assert STACK_ID not in world.tags()
    with pytest.raises(CertificateError, match="FAILED"):
        world.verify(str(one.unique))


def test_a_tag_never_goes_back_to_an_image_that_was_revoked_before(world: World) -> None:
    images = [world.image(name) for name in (b"first", b"second", b"third")]
    published = [world.publish(image) for image in images]
    world.revoke(str(published[1].unique))
    assert world.revoke(world.reference).moved == {STACK_ID: images[0].manifest_digest}


def test_only_the_key_that_certified_can_revoke(world: World) -> None:
    world.publish(world.image(b"first"))
    with pytest.raises(CertificateError):
        revoke.revoke(world.reference, reason="x", key=new_key(), now=NOW, report=quiet)
    assert world.verify()


def test_signing_the_old_run_again_does_not_supersede_a_revocation(world: World) -> None:
    image = world.image(b"first")
    world.publish(image)
    world.revoke(world.reference, now=NOW + HOUR)
    assert "revoked after the run" in refused(world, image, now=NOW + HOUR).what
    assert world.tags().get(STACK_ID) is None


def test_a_later_run_supersedes_a_revocation_in_both_forms(world: World) -> None:
    image = world.image(b"first")
    world.publish(image)
    world.revoke(world.reference, now=NOW + HOUR)
    world.publish(image, now=NOW + 2 * HOUR)
    assert world.verify().verified_at == NOW + 2 * HOUR
    known = attachments.read_envelopes(
        OciLayout(world.folder / "dist"), image.manifest_digest, world.key.public_key()
    )
    summaries = [item.statement for item in known if item.statement.predicate_type == VSA]
    assert [(status(item), not_before(item)) for item in summaries] == [("PASSED", NOW + HOUR)]


def test_a_later_run_on_one_host_does_not_supersede_the_revocation_for_another(world: World) -> None:
    image = world.image(b"first")
    tested, elsewhere = (result_files.host("nvidia", "H200", driver=driver) for driver in ("580.1", "570.9"))
    old = certify(image, world.key, host=elsewhere)
    world.publish(image, host=tested)
    world.publish(image, envelopes=old)
    world.revoke(world.reference, now=NOW + HOUR)
    world.publish(image, host=tested, now=NOW + 2 * HOUR)
    assert world.verify(device_model="H200", driver="580.1")
    with pytest.raises(CertificateError, match="not certified for this host"):
        world.verify(device_model="H200", driver="570.9")
    assert "revoked after the run" in refused(world, image, envelopes=old).what


def test_what_a_revocation_ended_does_not_count_when_a_mirror_attaches_it_again(world: World) -> None:
    image = world.image(b"first")
    old = certify(image, world.key, host=result_files.host("nvidia", "H200", driver="570.9"))
    world.publish(image)
    world.revoke(world.reference, now=NOW + HOUR)
    world.publish(image, now=NOW + 2 * HOUR)
    store = OciLayout(world.folder / "dist")
    attachments.attach(store, store.read_manifest(STACK_ID), old, world.key.public_key())
    with pytest.raises(CertificateError, match="not certified for this host"):
        world.verify(device_model="H200", driver="570.9")


def test_promoting_supersedes_no_revocation_of_the_target_without_the_signing_key(world: World) -> None:
    image, other = world.image(b"first"), f"oci:{world.folder / 'other'}"
    one = world.publish(image)
    known: Any = {"public_key": world.key.public_key(), "report": quiet, "now": NOW + 2 * HOUR}
    publish.promote(str(one.reference), target=other, **known)
    world.revoke(f"{other}:{STACK_ID}", now=NOW + HOUR)
    world.publish(image, now=NOW + 2 * HOUR)
    with pytest.raises(PublishError, match="does not supersede the revocation"):
        publish.promote(str(one.reference), target=other, **known)


def test_superseding_a_later_revocation_supersedes_the_earlier_one_of_the_target(world: World) -> None:
    image, other = world.image(b"first"), f"oci:{world.folder / 'other'}"
    world.publish(image)
    known: Any = {"public_key": world.key.public_key(), "report": quiet, "now": NOW + 9 * HOUR}
    publish.promote(world.reference, target=other, **known)
    world.revoke(f"{other}:{STACK_ID}", now=NOW + HOUR)
    world.revoke(world.reference, now=NOW + 2 * HOUR)
    world.publish(image, now=NOW + 4 * HOUR)
    publish.promote(world.reference, target=other, **known)
    assert world.verify(f"{other}:{STACK_ID}", now=NOW + 9 * HOUR).verified_at == NOW + 4 * HOUR


def test_superseding_an_earlier_revocation_does_not_supersede_the_later_one_of_the_target(
    world: World,
) -> None:
    image, other = world.image(b"first"), f"oci:{world.folder / 'other'}"
    world.publish(image)
    known: Any = {"public_key": world.key.public_key(), "report": quiet, "now": NOW + 9 * HOUR}
    publish.promote(world.reference, target=other, **known)
    world.revoke(world.reference, now=NOW + HOUR)
    world.revoke(f"{other}:{STACK_ID}", now=NOW + 2 * HOUR)
    world.publish(image, now=NOW + 4 * HOUR)
    with pytest.raises(PublishError, match="does not supersede the revocation"):
        publish.promote(world.reference, target=other, **known)


def test_a_revoked_image_is_not_promoted(world: World) -> None:
    one = world.publish(world.image(b"first"))
    world.revoke(world.reference)
    with pytest.raises(PublishError):
        publish.promote(
            str(one.unique),
            target=f"oci:{world.folder / 'other'}",
            public_key=world.key.public_key(),
            report=quiet,
        )
    assert not (world.folder / "other").exists()
