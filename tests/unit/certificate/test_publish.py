"""A tag only ever names a certified digest, whatever fails; a published image is renewed where it is."""

import contextlib
import dataclasses
import datetime as dt
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import result_files
from small_images import NOW, STACK_ID, SmallImage, certify, copy_to, make_image, new_key, promote, quiet
from small_target import HOUR, Publisher, refused
from stackcheck.certificate import attachments, publish, renew
from stackcheck.certificate.statement import TEST_RESULT, VSA, Statement
from stackcheck.errors import PublishError
from stackcheck.oci import tags
from stackcheck.oci.documents import Manifest, RegistryError
from stackcheck.oci.layout import OciLayout

pytestmark = pytest.mark.usefixtures("no_disk_flushes")


def test_what_was_tested_is_what_is_published_under_both_tags(publisher):
    image = publisher.image(b"first")
    done = publisher.publish(image)
    today = dt.datetime.now(dt.UTC).strftime("%Y%m%d")
    assert done.digest == image.manifest_digest
    unique = f"{STACK_ID}-{today}-1.{image.manifest_digest[7:15]}"
    assert publisher.tags() == {STACK_ID: image.manifest_digest, unique: image.manifest_digest}
    assert publisher.verify().config_digest == image.config_digest


def test_the_next_image_gets_the_next_number_and_the_floating_tag(publisher):
    first, second = publisher.image(b"first"), publisher.image(b"second")
    one, two = publisher.publish(first), publisher.publish(second)
    assert f"-2.{second.manifest_digest[7:15]}" in str(two.unique)
    assert publisher.tags()[STACK_ID] == second.manifest_digest
    assert publisher.verify(str(one.unique)).digest == first.manifest_digest


def test_a_renewed_certificate_keeps_the_unique_tag(publisher):
    image = publisher.image(b"first")
    assert publisher.publish(image).unique == publisher.publish(image, now=NOW + HOUR).unique
    assert publisher.verify().verified_at == NOW + HOUR


def test_a_failed_image_is_refused_and_leaves_no_tag(publisher):
    refused(publisher, publisher.image(b"first"), outcome="failed")
    assert publisher.tags() == {}


def test_another_images_certificate_is_refused(publisher):
    first, second = publisher.image(b"first"), publisher.image(b"second")
    refused(publisher, second, envelopes=certify(first, publisher.key))
    assert publisher.tags() == {}


def test_a_certificate_for_this_manifest_but_another_config_is_refused(publisher):
    image = publisher.image(b"first")
    other = SmallImage(image.layout, image.manifest_digest, "sha256:" + "e" * 64)
    refused(publisher, image, envelopes=certify(other, publisher.key))


@pytest.mark.parametrize("foreign", [slice(None), slice(1), slice(-1, None)], ids=["all", "first", "last"])
def test_a_certificate_of_another_key_is_refused(publisher, foreign):
    image = publisher.image(b"first")
    envelopes = list(certify(image, publisher.key))
    envelopes[foreign] = list(certify(image, new_key()))[foreign]
    found = refused(publisher, image, envelopes=envelopes)
    assert "not signed with the expected key" in found.what
    assert publisher.tags() == {}


CALLS = (
    *("has_blob", "read_blob", "write_blob", "mount_blob", "read_manifest", "write_manifest"),
    *("referrers", "tags", "delete_tag", "delete_manifest"),
)


class Failing:
    """A layout whose n-th call fails, as a crash, a full disk or a lost connection would."""

    def __init__(self, store: OciLayout, fails_at: int) -> None:
        self.store = store
        self.target = store.target
        self.left = fails_at

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.store, name)
        if name not in CALLS:
            return found

        def call(*arguments: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                raise RegistryError("planted")
            return found(*arguments)

        return call


def publish_to(store: Any, publisher: Publisher, image: SmallImage) -> None:
    copy_to(store, image, certify(image, publisher.key, now=NOW + HOUR), publisher.key)


def calls_of_a_publication(folder: Path) -> tuple[int, int]:
    """How many calls a publication makes, and how many of them after it moved the floating tag."""
    publisher = Publisher(folder)
    publisher.publish(publisher.image(b"first"))
    counting = Failing(OciLayout(folder / "dist"), 0)
    at_the_last_look: list[int] = []

    def look(*arguments: Any) -> None:
        at_the_last_look.append(-counting.left)
        original(*arguments)

    original = publish._look_again
    with mock.patch.object(publish, "_look_again", look):
        publish_to(counting, publisher, publisher.image(b"second"))
    return -counting.left, -counting.left - at_the_last_look[0]


@pytest.mark.slow
def test_a_failure_at_any_call_leaves_the_old_tag_on_the_old_digest_and_the_next_try_succeeds(tmp_path):
    calls, calls_of_a_last_look = calls_of_a_publication(tmp_path / "count")
    assert calls - calls_of_a_last_look > 30
    for n in range(1, calls + 1):
        publisher = Publisher(tmp_path / str(n))
        first, second = publisher.image(b"first"), publisher.image(b"second")
        publisher.publish(first)
        with pytest.raises(RegistryError, match="planted"):
            publish_to(Failing(OciLayout(publisher.folder / "dist"), n), publisher, second)
        named = publisher.tags()[STACK_ID]
        if named != first.manifest_digest:  # the last look failed, after the tag had moved
            assert n > calls - calls_of_a_last_look, f"call {n}"
        assert publisher.verify().digest == named
        publish_to(OciLayout(publisher.folder / "dist"), publisher, second)
        assert publisher.verify().digest == second.manifest_digest


def test_the_floating_tag_is_the_last_thing_that_is_written(publisher):
    publisher.publish(publisher.image(b"first"))
    written: list[tuple[str, str]] = []

    class Watching(Failing):
        def __getattr__(self, name: str) -> Any:
            found = getattr(self.store, name)
            if not name.startswith(("write_", "delete_", "mount_")):
                return found
            return lambda *arguments: (written.append((name, str(arguments[-1]))), found(*arguments))[1]

    publish_to(Watching(OciLayout(publisher.folder / "dist"), 0), publisher, publisher.image(b"second"))
    assert written[-1] == ("write_manifest", STACK_ID)


def test_two_hosts_that_publish_at_one_moment_take_no_unique_tag_from_each_other(publisher):
    first, second = publisher.image(b"first"), publisher.image(b"second")
    original, others = OciLayout.write_manifest, [second]
    with OciLayout(publisher.folder / "dist").writing(quiet):
        pass  # makes the layout

    def interrupted(store: OciLayout, manifest: Manifest, name: str) -> bool:
        if tags.is_unique(name) and others:  # a registry has no lock, so another host may publish now
            publisher.publish(others.pop())
        return original(store, manifest, name)

    with (
        mock.patch.object(OciLayout, "write_manifest", interrupted),
        mock.patch.object(OciLayout, "writing", return_value=contextlib.nullcontext()),
    ):
        one = publisher.publish(first)
    unique = {name: digest for name, digest in publisher.tags().items() if tags.is_unique(name)}
    assert sorted(unique.values()) == sorted([first.manifest_digest, second.manifest_digest])
    assert unique[str(one.unique.tag)] == first.manifest_digest


@pytest.mark.parametrize(
    ("stack_id", "tag"),
    [
        (STACK_ID, "rocm7.2-torch2.13.0-py3.12-debian12"),
        (STACK_ID, "registry.example.org-team-image-1-x0123abcd"),
        (None, STACK_ID),
    ],
)
def test_no_image_is_published_under_the_tag_of_another(publisher, stack_id, tag):
    image = make_image(publisher.folder / "image", stack_id=stack_id)
    with pytest.raises(PublishError, match="the tag does not belong to the image"):
        publisher.publish(image, tag=tag)


def test_a_certificate_from_the_future_is_not_published(publisher):
    ahead = dt.datetime.now(dt.UTC) + HOUR
    assert "from the future" in refused(publisher, publisher.image(b"first"), now=ahead).what


def test_a_certificate_that_nobody_would_accept_is_not_promoted(publisher):
    publisher.publish(publisher.image(b"first"))
    with pytest.raises(PublishError, match="too old to be promoted"):
        promote(
            publisher.reference, publisher.folder / "other", publisher.key, now=NOW + dt.timedelta(days=31)
        )


def test_every_statement_is_in_both_forms_and_each_bundle_has_a_tag(publisher):
    image = publisher.image(b"first")
    publisher.publish(image)
    store = OciLayout(publisher.folder / "dist")
    legacy = store.read_manifest(attachments.legacy_tag(image.manifest_digest))
    assert [
        layer.annotations["dev.cosignproject.cosign/signature"] for layer in legacy.descriptors("layers")
    ] == ([""] * 4)
    listed = store.read_manifest(image.manifest_digest.replace(":", "-")).descriptors("manifests")
    tagged = {store.read_manifest(name).digest for name in store.tags() if name.startswith("cert-")}
    assert {entry.digest for entry in listed} == tagged
    assert len(tagged) == 4
    for entry in listed:
        document = store.read_manifest(entry.digest).document
        assert (
            entry.artifact_type == document["artifactType"] == "application/vnd.dev.sigstore.bundle.v0.3+json"
        )
        assert entry.annotations == document["annotations"]
        assert document["subject"]["digest"] == image.manifest_digest


KEY = new_key()
DAY = dt.timedelta(days=1)


def statements(image: SmallImage, **changes: Any) -> list[Statement]:
    return [item.statement for item in certify(image, KEY, **({"now": NOW} | changes))]


def summary(image: SmallImage, **changes: Any) -> Statement:
    return next(item for item in statements(image, **changes) if item.predicate_type == VSA)


def kinds(known: list[Statement], digests: frozenset[str]) -> list[str]:
    return sorted(item.predicate_type for item in known if item.digest in digests)


def test_a_newer_summary_of_the_same_configuration_replaces_the_older_and_its_test_result(image):
    known = statements(image)
    found = renew.obsolete(known, summary(image, now=NOW + DAY))
    assert kinds(known, found) == sorted([TEST_RESULT, VSA])


@pytest.mark.parametrize(
    "changes",
    [
        {"host": result_files.host(driver="6.16")},
        {"host": result_files.host() | {"kernel": "6.99"}},
        {"host": result_files.host("cpu", "CPU", "CPU")},
        {"now": NOW - DAY},
        {"tier": "smoke"},  # the older is of a higher one
    ],
)
def test_what_another_machine_or_a_higher_tier_says_is_kept(image, changes):
    known = statements(image, tier="standard")
    later = {"now": NOW + DAY, "tier": "standard"} | changes
    assert renew.obsolete(known, summary(image, **later)) == frozenset()


def asking(
    image: SmallImage, *, required: list[str], suites: str = result_files.DIGEST, **changes: Any
) -> Statement:
    """A summary of the same image whose run asked for these checks, of these suites."""
    item = summary(image, **changes)
    document = json.loads(item.payload)
    (found,) = (
        value for value in document["predicate"].values() if isinstance(value, dict) and "required" in value
    )
    found["required"], found["inputs"]["suites"] = required, suites
    return dataclasses.replace(item, payload=json.dumps(document).encode())


NAMES = st.sets(st.sampled_from([f"test_a.py::test_one[{number}]" for number in range(6)]), min_size=1)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(old=NAMES, new=NAMES, same=st.booleans())
def test_a_renewal_never_asks_for_fewer_checks(image, old, new, *, same):
    """Compared as sets: as many other checks are no replacement."""
    suites = result_files.DIGEST if same else "sha256:" + "9" * 64
    earlier = asking(image, required=sorted(old))
    later = asking(image, required=sorted(new), suites=suites, now=NOW + DAY)
    assert (earlier.digest in renew.obsolete([earlier], later)) is (old <= new)
    if old <= new:
        renew._require_no_fewer([earlier], later, "oci:dist@x")
        return
    with pytest.raises(PublishError, match="fewer checks than the certificate") as caught:
        renew._require_no_fewer([earlier], later, "oci:dist@x")
    assert f"by {'the same' if same else 'other'} suites" in str(caught.value.got)
    other = asking(image, required=sorted(new), host=result_files.host("cpu", "CPU", "CPU"), now=NOW + DAY)
    renew._require_no_fewer([earlier], other, "oci:dist@x")  # another machine has other checks
