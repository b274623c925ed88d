"""A publisher changes keys: readers trust both, or no longer what the old one signs."""

import datetime as dt
from pathlib import Path
from typing import Any

import pytest

import asked
from small_dist import DAY
from small_images import NOW, STACK_ID, make_image, new_key, quiet, release
from stackcheck.certificate import attachments, keyring, keys, revoke, signers, verify
from stackcheck.certificate.keyring import Keyring, TrustedKey
from stackcheck.certificate.signers import Signer
from stackcheck.certificate.statement import RetiredKeyError
from stackcheck.errors import CertificateError, ConfigurationError
from stackcheck.oci.layout import OciLayout

pytestmark = pytest.mark.usefixtures("no_disk_flushes")

OLD, NEW, OTHER = new_key(), new_key(), new_key()
HOUR = dt.timedelta(hours=1)


def ring(retired: dt.datetime | None = None) -> Keyring:
    keys = (TrustedKey(key=NEW.public_key()), TrustedKey(key=OLD.public_key(), retired=retired))
    return Keyring(keys)


def owner(retired: dt.datetime | None = None) -> Signer:
    return signers.RingSigner(key=NEW, ring=ring(retired))


def verified(dist: Path, public_key: Any, name: str = f":{STACK_ID}") -> verify.Verified:
    return asked.verified(f"oci:{dist}{name}", public_key=public_key, now=NOW + DAY)


@pytest.mark.parametrize("signer", [OLD, NEW], ids=["old", "new"])
def test_of_two_valid_keys_both_are_accepted_and_no_other(tmp_path, image, signer):
    release(image, tmp_path / "dist", signer)
    assert verified(tmp_path / "dist", ring())
    with pytest.raises(CertificateError, match="no certificate signed with the pinned key"):
        verified(tmp_path / "dist", Keyring((TrustedKey(key=OTHER.public_key()),)))


def test_a_retired_key_counts_only_for_verdicts_from_before(tmp_path, image):
    release(image, tmp_path / "dist", OLD)
    assert verified(tmp_path / "dist", ring(retired=NOW + HOUR))
    for moment in (NOW, NOW - HOUR):
        with pytest.raises(RetiredKeyError, match="after its key was retired") as caught:
            verified(tmp_path / "dist", ring(retired=moment))
        assert caught.value.exit_code == 7
    release(image, tmp_path / "dist", NEW, now=NOW + HOUR)
    assert verified(tmp_path / "dist", ring(retired=NOW))


def test_a_revocation_of_a_retired_key_still_counts(tmp_path, image):
    release(image, tmp_path / "dist", OLD)
    revoke.revoke(f"oci:{tmp_path / 'dist'}:{STACK_ID}", reason="NaN", key=OLD, now=NOW + HOUR, report=quiet)
    with pytest.raises(CertificateError, match="FAILED"):
        verified(tmp_path / "dist", ring(retired=NOW + HOUR / 2), f"@{image.manifest_digest}")


def test_the_owner_of_the_new_key_revokes_what_the_old_one_signed(tmp_path):
    first, second = make_image(tmp_path / "1", b"1"), make_image(tmp_path / "2", b"2")
    dist = tmp_path / "dist"
    release(first, dist, OLD)
    release(second, dist, owner(retired=NOW + HOUR), now=NOW + 2 * HOUR)
    reference = f"oci:{dist}@{second.manifest_digest}"
    done = revoke.revoke(reference, reason="NaN", key=owner(), now=NOW + 3 * HOUR, report=quiet)
    assert done.moved == {STACK_ID: first.manifest_digest}
    reference = f"oci:{dist}@{first.manifest_digest}"
    revoke.revoke(reference, reason="NaN", key=owner(), now=NOW + 4 * HOUR, report=quiet)
    for image in (first, second):
        with pytest.raises(CertificateError, match="FAILED"):
            verified(dist, ring(), f"@{image.manifest_digest}")


def test_each_bundle_names_the_key_that_signed_it(tmp_path, image):
    dist = tmp_path / "dist"
    release(image, dist, OLD)
    release(image, dist, owner(), now=NOW + HOUR)
    store = OciLayout(dist)
    bundles = attachments.bundles_of(store, image.manifest_digest)
    for name, key in (("old", OLD), ("new", NEW)):
        reader = attachments.Reader(store, image.manifest_digest, key.public_key())
        found = reader.envelopes(bundles)
        assert found, name
        assert reader.changed == 0  # a bundle that named this key and was signed with the other would count


def text(*parts: str | Any) -> str:
    return "".join(part if isinstance(part, str) else keys.public_pem(part).decode() for part in parts)


def test_a_file_of_several_keys_says_which_one_is_retired_and_when(tmp_path):
    path = tmp_path / "stackcheck.pub"
    path.write_text(text(NEW.public_key(), "# before the move\nretired: 2026-11-01\n", OLD.public_key()))
    new, old = keyring.trusted(keys.load_public(path))
    assert (keyring.hint(new.key), new.retired) == (keyring.hint(NEW.public_key()), None)
    assert (keyring.hint(old.key), old.retired) == (
        keyring.hint(OLD.public_key()),
        dt.datetime(2026, 11, 1, tzinfo=dt.UTC),
    )


@pytest.mark.parametrize(
    "remark", ["retired 2026-11-01", "Retired: soon", "retired: 2026-13-01", "retired: 2026-11-01 # why"]
)
def test_a_retirement_that_is_not_clear_is_refused_and_not_passed_over(tmp_path, remark):
    path = tmp_path / "stackcheck.pub"
    for content in (text(f"{remark}\n", OLD.public_key()), text(OLD.public_key(), f"{remark}\n")):
        path.write_text(content)
        with pytest.raises(ConfigurationError, match="no key that can be used"):
            keys.load_public(path)


def test_a_key_that_is_retired_in_its_own_file_signs_nothing(tmp_path):
    path = tmp_path / "mine" / "x.key"
    keys.load_or_create(path)
    public = keys.public_path(path)
    public.write_text(text(NEW.public_key(), "retired: 2026-11-01\n") + public.read_text())
    with pytest.raises(ConfigurationError, match="is retired"):
        signers.choose(path)
    public.write_text(public.read_text().replace("retired: 2026-11-01\n", ""))
    assert len(keyring.trusted(signers.choose(path).public_key())) == 2
