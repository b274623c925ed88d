"""Against a real registry, a real cosign, a real skopeo and a real engine: what we write, others read."""

import datetime as dt
import functools
import json
import threading
import uuid
from typing import Any

import pytest

import asked
import small_images
from small_images import STACK_ID, SmallImage, certify, make_image, new_key, quiet
from stackcheck.certificate import attachments, publish, pull, renew, revoke, verify
from stackcheck.certificate.statement import TEST_RESULT, VSA
from stackcheck.engine.client import Engine
from stackcheck.errors import CertificateError
from stackcheck.oci.stores import open_store
from waits import run_program

KEY = new_key()
NOW = dt.datetime.now(dt.UTC) - dt.timedelta(hours=1)  # what is lifted is lifted by a later run
release = functools.partial(small_images.release, key=KEY, now=NOW)
SECOND = dt.timedelta(seconds=1)


OTHER_IS_SLOW = pytest.mark.parametrize(
    "target", ["registry", pytest.param("referring_registry", marks=pytest.mark.slow)], indirect=True
)


@pytest.fixture(params=["registry", "referring_registry"])
def target(request) -> str:
    """A repository of its own, in a registry without and one with the referrers API."""
    return f"{request.getfixturevalue(request.param)}/stacks/{uuid.uuid4().hex}"


@pytest.fixture
def image(tmp_path) -> SmallImage:
    return make_image(tmp_path / "oci", uuid.uuid4().bytes)


def verified(reference: str, **changes: Any) -> verify.Verified:
    told = {"public_key": KEY.public_key(), "now": NOW + 60 * SECOND} | changes
    return asked.verified(reference, **told)


def revoked(reference: str) -> revoke.Revoked:
    return revoke.revoke(reference, reason="NaN", key=KEY, now=NOW + SECOND, report=quiet)


def test_what_is_published_verifies_by_tag_and_by_digest(target, image):
    done = release(image, target)
    assert verified(f"{target}:{STACK_ID}").digest == image.manifest_digest
    assert verified(f"{target}@{image.manifest_digest}").config_digest == image.config_digest
    assert {STACK_ID, done.unique.tag} <= set(open_store(target).tags())


def test_bundles_are_listed_by_the_registry_or_else_by_the_fallback_tag(target, image):
    release(image, target)
    store = open_store(target)
    listed = store.referrers(image.manifest_digest)
    names = store.tags()
    fallback = image.manifest_digest.replace(":", "-")
    assert (fallback in names) == (listed is None)
    entries = store.read_manifest(fallback).descriptors("manifests") if listed is None else listed
    tagged = {store.read_manifest(name).digest for name in names if name.startswith("cert-")}
    assert {entry.digest for entry in entries} == tagged
    assert {entry.artifact_type for entry in entries} == {"application/vnd.dev.sigstore.bundle.v0.3+json"}


# A renewal replaces statements in both registries: a revocation adds one in the same way.
@OTHER_IS_SLOW
def test_a_revoked_image_is_refused_and_the_tag_goes_back(target, image, tmp_path):
    second = make_image(tmp_path / "second", b"second")
    release(image, target)
    two = release(second, target)
    assert revoked(f"{target}:{STACK_ID}").moved == {STACK_ID: image.manifest_digest}
    assert verified(f"{target}:{STACK_ID}").digest == image.manifest_digest
    with pytest.raises(CertificateError, match="FAILED"):
        verified(str(two.unique))


@OTHER_IS_SLOW
def test_the_only_image_that_is_revoked_keeps_its_tag_and_is_refused(target, image):
    release(image, target)
    assert revoked(f"{target}:{STACK_ID}").left == (STACK_ID,)
    with pytest.raises(CertificateError, match="FAILED"):
        verified(f"{target}:{STACK_ID}")


def test_a_renewal_takes_the_place_of_what_it_covers_in_both_forms(target, image):
    release(image, target)
    store = open_store(target)
    manifest = store.read_manifest(STACK_ID)
    public = KEY.public_key()
    for number in (1, 2, 3):
        made = certify(image, KEY, now=NOW + number * SECOND)
        summary = next(item.statement for item in made if item.statement.predicate_type == VSA)
        covered = functools.partial(renew.obsolete, summary=summary)
        attachments.attach(store, manifest, made, public, obsolete=covered)
        left = attachments.read_envelopes(store, manifest.digest, public)
        kinds = [item.statement.predicate_type for item in left]
        assert (kinds.count(VSA), kinds.count(TEST_RESULT)) == (1, 1)
    assert verified(f"{target}:{STACK_ID}").verified_at > NOW + 2 * SECOND
    bundles = attachments.bundles_of(store, manifest.digest)
    assert len(bundles) == len(kinds)  # the manifests of the removed ones are gone, not only their layers


def forms(target: str, digest: str) -> dict[str, set[str]]:
    """Digests of the statements in each form of the certificate."""
    store = open_store(target)
    reader = attachments.Reader(store, digest, KEY.public_key())
    tagged = {
        name: [store.read_manifest(name)] for name in ("att", "revoked") for name in [named(digest, name)]
    }
    held = {"bundles": attachments.bundles_of(store, digest), **tagged}
    return {name.rpartition(".")[2]: set(reader.envelopes(items)) for name, items in held.items()}


def named(digest: str, form: str) -> str:
    return f"{digest.replace(':', '-')}.{form}"


# The other one is in each of its promotions.
@OTHER_IS_SLOW
def test_promotion_between_two_registries_and_a_layout_both_ways_brings_every_form(
    target, referring_registry, image, tmp_path
):
    """Of an image that was revoked, and certified again: so all three forms say something."""
    local, second = f"oci:{tmp_path / 'dist'}", f"oci:{tmp_path / 'dist2'}"
    other = f"{referring_registry}/mirrors/{uuid.uuid4().hex}"
    release(image, local)
    revoked(f"{local}@{image.manifest_digest}")
    release(image, local, now=NOW + dt.timedelta(minutes=25))
    wanted = forms(local, image.manifest_digest)
    assert len(wanted["bundles"]) >= 4
    assert wanted["att"] == wanted["bundles"]
    assert len(wanted["revoked"]) == 1
    for source, destination in ((local, target), (target, other), (other, f"{target}-back"), (other, second)):
        done = publish.promote(
            f"{source}:{STACK_ID}",
            target=destination,
            public_key=KEY.public_key(),
            report=quiet,
            now=NOW + dt.timedelta(minutes=26),
        )
        assert done.digest == image.manifest_digest
        found = verified(f"{destination}:{STACK_ID}", now=NOW + dt.timedelta(minutes=27))
        assert found.digest == image.manifest_digest
        assert forms(destination, image.manifest_digest) == wanted


def test_writers_at_the_same_time_lose_nothing(registry, tmp_path):
    target = f"{registry}/stacks/{uuid.uuid4().hex}"
    image = make_image(tmp_path / "one", b"one")
    release(image, target)
    times = [NOW + n * SECOND for n in range(1, 4)]
    threads = [threading.Thread(target=release, args=(image, target), kwargs={"now": at}) for at in times]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    known = attachments.read_envelopes(open_store(target), image.manifest_digest, KEY.public_key())
    assert sum(item.statement.predicate_type == VSA for item in known) == 4


def test_the_engine_gets_the_verified_image_from_a_registry_and_from_a_layout(registry, image, tmp_path):
    engine = Engine.connect()
    for target in (f"{registry}/stacks/{uuid.uuid4().hex}", f"oci:{tmp_path / 'dist'}"):
        release(image, target)
        name = pull.pull(verified(f"{target}:{STACK_ID}"), engine, report=quiet)
        try:
            assert engine.inspect(name).env["PYTORCH_VERSION"] == "2.13.0"
        finally:
            engine.remove(name)


def test_skopeo_opens_the_layout_and_the_registry(skopeo, registry, image, tmp_path):
    target = f"{registry}/stacks/{uuid.uuid4().hex}"
    release(image, f"oci:{tmp_path / 'dist'}")
    release(image, target)
    for arguments in (
        (f"oci:{tmp_path / 'dist'}:{STACK_ID}",),
        ("--tls-verify=false", f"docker://{target}:{STACK_ID}"),
    ):
        done = run_program([skopeo, "inspect", *arguments], timeout=300)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["Digest"] == image.manifest_digest
