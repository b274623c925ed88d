"""What was revoked stays revoked until a later run, and tags go back to what is still certified."""

import datetime as dt
import errno
import shutil
from pathlib import Path
from typing import Any

import pytest

import result_files
from small_images import NOW, STACK_ID, certify, new_key, quiet
from small_target import HOUR, refused
from stackcheck.certificate import attachments, predicates, publish, revoke
from stackcheck.certificate.statement import VSA, Revocations, evidence, revocations, sign, status
from stackcheck.errors import CertificateError, PublishError
from stackcheck.oci import layout
from stackcheck.oci.layout import OciLayout

pytestmark = pytest.mark.usefixtures("no_disk_flushes")


def test_a_revoked_image_no_longer_verifies_and_its_tag_goes_back(publisher):
    first, second = publisher.image(b"first"), publisher.image(b"second")
    publisher.publish(first)
    two = publisher.publish(second)
    done = publisher.revoke(publisher.reference)
    assert done.moved == {STACK_ID: first.manifest_digest}
    assert publisher.verify().digest == first.manifest_digest
    with pytest.raises(CertificateError, match="FAILED"):
        publisher.verify(str(two.unique))


def test_a_tag_never_goes_back_to_an_image_that_was_revoked_before(publisher):
    images = [publisher.image(name) for name in (b"first", b"second", b"third")]
    published = [publisher.publish(image) for image in images]
    publisher.revoke(str(published[1].unique))
    assert publisher.revoke(publisher.reference).moved == {STACK_ID: images[0].manifest_digest}


def test_only_the_key_that_certified_can_revoke(publisher):
    publisher.publish(publisher.image(b"first"))
    with pytest.raises(CertificateError):
        revoke.revoke(publisher.reference, reason="x", key=new_key(), now=NOW, report=quiet)
    assert publisher.verify()


def test_a_later_run_on_one_host_does_not_supersede_the_revocation_for_another(publisher):
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


@pytest.mark.parametrize(("here", "there"), [(None, 1), (2, 1), (1, 2)])
def test_promoting_supersedes_no_revocation_that_only_the_target_has(publisher, here, there):
    """Each revocation is named by its digest; one that the publisher never saw cannot be among them."""
    image, other = publisher.image(b"first"), f"oci:{publisher.folder / 'other'}"
    publisher.publish(image)
    known: Any = {"public_key": publisher.key.public_key(), "report": quiet, "now": NOW + 9 * HOUR}
    publish.promote(publisher.reference, target=other, **known)
    publisher.revoke(f"{other}:{STACK_ID}", now=NOW + there * HOUR)
    if here:
        publisher.revoke(publisher.reference, now=NOW + here * HOUR)
    publisher.publish(image, now=NOW + 4 * HOUR)
    with pytest.raises(PublishError, match="does not supersede the revocation"):
        publish.promote(publisher.reference, target=other, **known)


CLOCKS = [dt.timedelta(minutes=minutes) for minutes in (-10, -3, 0, 3, 10)]


@pytest.mark.parametrize("publisher_off", CLOCKS)
@pytest.mark.parametrize("revoker_off", CLOCKS)
def test_no_pair_of_clocks_lifts_a_revocation_with_a_run_from_before_it(
    publisher, revoker_off, publisher_off
):
    """Each host's clock is up to ten minutes off; `began` is when the run began after the revocation."""
    image, truth = publisher.image(b"first"), NOW + HOUR
    publisher.publish(image)
    publisher.revoke(publisher.reference, now=truth + revoker_off)
    close = publisher_off - revoker_off <= dt.timedelta(minutes=15)
    for began in (-9, 0, *([1] if close else [])):
        ended = truth + dt.timedelta(minutes=began + 1) + publisher_off
        assert "revoked after the run" in refused(publisher, image, now=ended).what, began
        with pytest.raises(CertificateError):
            publisher.verify(f"{publisher.target}@{image.manifest_digest}")
    publisher.publish(image, now=truth + dt.timedelta(minutes=42) + publisher_off)
    assert publisher.verify().digest == image.manifest_digest


@pytest.mark.parametrize("names", ["none", "another", "one of two"])
def test_only_a_certificate_that_names_each_revocation_by_its_digest_lifts_them(publisher, names):
    image = publisher.image(b"first")
    publisher.publish(image)
    for hours in (1, 2):
        revoke.revoke(
            f"{publisher.target}@{image.manifest_digest}",
            reason=f"reason {hours}",
            key=publisher.key,
            now=NOW + hours * HOUR,
            report=quiet,
        )
    store = OciLayout(publisher.folder / "dist")
    known = attachments.read_envelopes(store, image.manifest_digest, publisher.key.public_key())
    revoked = revocations(item.statement for item in known)
    assert revoked
    assert len(revoked.digests) == 2
    chosen = {
        "none": frozenset[str](),
        "another": frozenset({f"sha256:{'0' * 64}"}),
        "one of two": frozenset(sorted(revoked.digests)[:1]),
    }[names]
    *others, plain = certify(image, publisher.key, now=NOW + 3 * HOUR)
    claimed = Revocations(last=NOW + 9 * HOUR, digests=chosen)
    signed = sign(predicates.superseding(plain.statement, claimed), publisher.key)
    manifest = store.read_manifest(image.manifest_digest)
    attachments.attach(store, manifest, (*others, signed), publisher.key.public_key())
    with pytest.raises(CertificateError):
        publisher.verify(f"{publisher.target}@{image.manifest_digest}")


def test_nothing_of_a_revoked_image_that_cannot_be_read_or_is_gone_makes_it_valid(publisher, monkeypatch):
    """Each file of a layout in which both forms were replayed, so that the mark alone says revoked."""
    image = publisher.image(b"first")
    publisher.publish(image)
    store, digest = OciLayout(publisher.folder / "dist"), image.manifest_digest
    tags = (attachments.legacy_tag(digest), attachments.fallback_tag(digest))
    before = {tag: store.read_manifest(tag) for tag in tags}
    shutil.copytree(publisher.folder / "dist" / "blobs", publisher.folder / "kept")
    publisher.revoke(publisher.reference)
    shutil.copytree(publisher.folder / "kept", publisher.folder / "dist" / "blobs", dirs_exist_ok=True)
    for tag, manifest in before.items():
        store.write_manifest(manifest, tag)
    reference = f"{publisher.target}@{digest}"
    with pytest.raises(CertificateError, match="FAILED"):
        publisher.verify(reference)
    real = layout.open_regular
    for error in (FileNotFoundError(2, "gone"), OSError(errno.EIO, "failing disk"), PermissionError(13, "x")):
        for blob in sorted((publisher.folder / "dist" / "blobs" / "sha256").iterdir()):

            def fail(path: Path, hidden: Path = blob, error: OSError = error, **options: Any) -> Any:
                if path == hidden:
                    raise error
                return real(path, **options)

            monkeypatch.setattr(layout, "open_regular", fail)
            with pytest.raises(CertificateError):
                publisher.verify(reference)


def test_revoking_the_only_image_takes_its_tag_away(publisher):
    image = publisher.image(b"first")
    one = publisher.publish(image)
    assert publisher.revoke(publisher.reference).removed == (STACK_ID,)
    assert STACK_ID not in publisher.tags()
    with pytest.raises(CertificateError, match="FAILED"):
        publisher.verify(str(one.unique))


def test_a_revocation_names_every_certificate_that_it_ends(publisher):
    image = publisher.image(b"first")
    drivers = [result_files.host("nvidia", "H200", driver=driver) for driver in ("580.1", "570.9")]
    signed = [certify(image, publisher.key, host=host) for host in drivers]
    for envelopes in signed:
        publisher.publish(image, envelopes=envelopes)
    publisher.revoke(publisher.reference)
    store = OciLayout(publisher.folder / "dist")
    known = attachments.read_envelopes(store, image.manifest_digest, publisher.key.public_key())
    summaries = [item.statement for item in known if item.statement.predicate_type == VSA]
    (failed,) = (item for item in summaries if status(item) == "FAILED")
    assert evidence(failed) == {envelopes[-1].statement.digest for envelopes in signed}
