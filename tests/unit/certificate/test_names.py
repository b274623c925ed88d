"""A tag leads to the image that was certified under its name, also among images without a stack."""

from pathlib import Path
from typing import Any

import pytest

import asked
from small_images import NOW, SmallImage, make_image, new_key, quiet, release
from stackcheck.certificate import publish, verify
from stackcheck.errors import CertificateError, ConfigurationError, PublishError
from stackcheck.oci.layout import OciLayout
from stackcheck.oci.tags import label

pytestmark = pytest.mark.usefixtures("no_disk_flushes")
KEY = new_key()
GOOD, OTHER = (label(f"registry.example.org/team/{name}:1") for name in ("good", "other"))


def released(folder: Path, name: str, *, signed: str | None = None, tag: str | None = None) -> SmallImage:
    image = make_image(folder / name, name.encode(), stack_id=None)
    release(image, folder / "dist", KEY, tag=tag or name, name=signed or name)
    return image


def verified(reference: str) -> verify.Verified:
    told: dict[str, Any] = {"public_key": KEY.public_key(), "device_model": "CPU", "driver": None}
    return asked.verified(reference, now=NOW, **told)


def test_a_tag_that_was_moved_to_another_certified_image_without_a_stack_is_refused(tmp_path: Path) -> None:
    released(tmp_path, GOOD)
    other = released(tmp_path, OTHER)
    store = OciLayout(tmp_path / "dist")
    store.write_manifest(store.read_manifest(other.manifest_digest), GOOD)
    with pytest.raises(CertificateError, match="different image than the tag names") as caught:
        verified(f"{store.target}:{GOOD}")
    assert (caught.value.got, caught.value.expected) == (
        f"a certificate for {OTHER}",
        f"a certificate for {GOOD}",
    )


def test_a_tag_counts_beside_a_digest(tmp_path: Path) -> None:
    good, other = released(tmp_path, GOOD), released(tmp_path, OTHER)
    target = f"oci:{tmp_path / 'dist'}"
    assert verified(f"{target}:{GOOD}@{good.manifest_digest}").digest == good.manifest_digest
    with pytest.raises(CertificateError, match="different image than the tag names"):
        verified(f"{target}:{GOOD}@{other.manifest_digest}")
    assert verified(f"{target}@{other.manifest_digest}").digest == other.manifest_digest


def test_an_image_is_published_under_the_name_that_was_signed_and_no_other(tmp_path: Path) -> None:
    with pytest.raises(PublishError, match="does not belong to the image"):
        released(tmp_path, GOOD, signed=OTHER)
    with pytest.raises(PublishError, match="does not belong to the image"):
        released(tmp_path, "cpu-torch2.13.0-py3.11-debian12", signed="cpu-torch2.13.0-py3.11-debian12")


def test_an_image_without_a_stack_is_promoted_by_its_digest_under_its_signed_name(tmp_path: Path) -> None:
    good = released(tmp_path, GOOD)
    done = publish.promote(
        f"oci:{tmp_path / 'dist'}@{good.manifest_digest}",
        target=f"oci:{tmp_path / 'other'}",
        public_key=KEY.public_key(),
        report=quiet,
        now=NOW,
    )
    assert done.reference.tag == GOOD


def test_a_certificate_that_signed_no_name_is_found_by_digest_only(tmp_path: Path) -> None:
    """Certificates of before names were signed: their image is certified, and which tag is theirs is not."""
    image = make_image(tmp_path / "old", b"old", stack_id=None)
    with pytest.raises(PublishError, match="does not belong to the image"):
        release(image, tmp_path / "dist", KEY, tag=GOOD, name="")


def test_promoting_by_a_tag_of_another_image_is_refused(tmp_path: Path) -> None:
    released(tmp_path, GOOD)
    other = released(tmp_path, OTHER)
    with pytest.raises((PublishError, ConfigurationError)):
        publish.promote(
            f"oci:{tmp_path / 'dist'}:{GOOD}@{other.manifest_digest}",
            target=f"oci:{tmp_path / 'other'}",
            public_key=KEY.public_key(),
            report=quiet,
            now=NOW,
        )
