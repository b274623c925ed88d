"""Verification accepts exactly what was certified for this host, as far as a certificate reaches."""

import contextlib
import datetime as dt
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import asked
import result_files
from small_dist import DAY, KEY, release, verified
from small_images import NOW, STACK_ID, SmallImage, certify, make_image, new_key, promote, quiet
from small_registry import Answer, serving
from small_target import HOUR, Publisher
from stackcheck.certificate import attachments, policy, storage_forms
from stackcheck.certificate.for_host import CERTIFYING_TIER
from stackcheck.certificate.statement import PROVENANCE, SBOM, TEST_RESULT, VSA
from stackcheck.errors import CertificateError, PublishError
from stackcheck.matrix import matrix
from stackcheck.oci.documents import OCI_MANIFEST, Manifest, MissingError, RegistryError, compact_json
from stackcheck.oci.layout import OciLayout
from stackcheck.oci.store import write_small_blob
from stackcheck.policy import Waiver

pytestmark = pytest.mark.usefixtures("no_disk_flushes")


def test_one_changed_byte_in_any_blob_manifest_or_attestation_is_refused(dist):
    files = sorted((dist / "blobs" / "sha256").iterdir())
    assert len(files) >= 18
    for path in files:
        body = path.read_bytes()
        for position in {0, len(body) // 2, len(body) - 1}:
            changed = bytearray(body)
            changed[position] ^= 1
            path.write_bytes(changed)
            with pytest.raises(CertificateError):
                verified(dist)
        path.write_bytes(body)
    assert verified(dist)


@pytest.mark.parametrize("kind", [TEST_RESULT, PROVENANCE, SBOM])
def test_a_certificate_whose_evidence_was_taken_away_is_refused(tmp_path, image, kind):
    """The owner of a store can drop a whole attestation: every digest is right, one statement is missing."""
    kept = [item for item in certify(image, KEY) if item.statement.predicate_type != kind]
    target = OciLayout(tmp_path / "dist")
    source = OciLayout(image.layout)
    manifest = source.only_manifest()
    with target.writing(quiet):
        for blob in (*manifest.descriptors("config"), *manifest.descriptors("layers")):
            target.write_blob(blob, lambda digest=blob.digest: source.read_blob(digest))
        attachments.attach(target, manifest, kept, KEY.public_key())
        target.write_manifest(manifest, STACK_ID)
    with pytest.raises(CertificateError, match="statements that the certificate names"):
        verified(tmp_path / "dist")
    with pytest.raises(PublishError, match="statements that the certificate names"):
        policy.admit(manifest, kept)


@pytest.mark.parametrize("name", ["oci-layout", "index.json"])
def test_a_layout_without_its_own_files_is_refused(dist, name):
    (dist / name).write_text('{"imageLayoutVersion": "9.9.9", "manifests": []}')
    with pytest.raises(CertificateError):
        verified(dist)


@pytest.mark.parametrize(("age", "accepted"), [(30 * DAY, True), (30 * DAY + dt.timedelta(seconds=1), False)])
def test_a_certificate_stands_for_exactly_its_age(dist, age, accepted):
    if accepted:
        assert verified(dist, now=NOW + age)
        return
    with pytest.raises(CertificateError, match="too old"):
        verified(dist, now=NOW + age)


def test_a_certificate_from_the_future_is_refused(dist):
    with pytest.raises(CertificateError, match="future"):
        verified(dist, now=NOW - DAY)


@pytest.mark.parametrize(("model", "driver"), [("H200", None), ("CPU", "580.1"), ("cpu", None), ("", None)])
def test_another_device_model_or_driver_is_refused(dist, model, driver):
    with pytest.raises(CertificateError, match="not certified for this host") as error:
        verified(dist, device_model=model, driver=driver)
    assert error.value.expected == "CPU x1 with no driver"


def test_each_host_finds_the_verdict_that_was_given_on_its_like(tmp_path, image):
    dist = tmp_path / "dist"
    release(image, dist, host=result_files.host("nvidia", "H200", driver="580.1"))
    release(image, dist, host=result_files.host("amd", "MI300X", driver="6.12"), now=NOW + DAY)
    at = NOW + DAY
    assert verified(dist, device_model="H200", driver="580.1", now=at).verified_at == NOW
    assert verified(dist, device_model="MI300X", driver="6.12", now=at).verified_at == NOW + DAY
    with pytest.raises(CertificateError) as error:
        verified(dist, device_model="H200", driver="6.12", now=at)
    assert error.value.expected == "H200 x1 with driver 580.1 or MI300X x1 with driver 6.12"


def test_attestations_of_another_image_do_not_count(dist, image, tmp_path):
    other = make_image(tmp_path / "evil", b"evil")
    source, store = OciLayout(other.layout), OciLayout(dist)
    manifest = source.only_manifest()
    for blob in (*manifest.descriptors("config"), *manifest.descriptors("layers")):
        store.write_blob(blob, lambda digest=blob.digest: source.read_blob(digest))  # type: ignore[misc]
    store.write_manifest(manifest, STACK_ID)
    for name in (attachments.legacy_tag, lambda digest: digest.replace(":", "-")):
        store.write_manifest(store.read_manifest(name(image.manifest_digest)), name(manifest.digest))
    with pytest.raises(CertificateError, match="no certificate"):
        verified(dist)


@pytest.mark.parametrize("what", ["index.json", "oci-layout", "manifest", "layer", "attestations"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_a_layout_with_something_else_in_a_file_s_place_is_refused_at_once(dist, what, kind):
    store = OciLayout(dist)
    manifest = store.read_manifest(STACK_ID)
    attached = store.read_manifest(attachments.legacy_tag(manifest.digest)).descriptors("layers")[0]
    blobs = {"manifest": manifest, "layer": manifest.descriptors("layers")[0], "attestations": attached}
    path = store.blob_path(blobs[what].digest) if what in blobs else dist / what
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(CertificateError):
        verified(dist)


def test_a_blob_that_grew_without_end_is_given_up_at_its_size(dist):
    store = OciLayout(dist)
    layer = store.read_manifest(STACK_ID).descriptors("layers")[0]
    with store.blob_path(layer.digest).open("r+b") as file:
        file.truncate(2**40)  # a hole: it takes no room, and hours to read
    with pytest.raises(CertificateError, match="larger than declared"):
        verified(dist)


@pytest.mark.parametrize("days", [36_500, 800_000])
def test_any_age_may_be_allowed(dist, days):
    assert verified(dist, max_age=dt.timedelta(days=days))


@pytest.mark.parametrize("body", [b"[" * 200_000, b'{"dsseEnvelope":' + b"[" * 50_000 + b"]" * 50_000 + b"}"])
def test_a_foreign_attestation_that_is_nested_without_end_is_passed_over(dist, body):
    store = OciLayout(dist)
    subject = store.read_manifest(STACK_ID)
    blob = write_small_blob(store, storage_forms.BUNDLE, body)
    document = {"config": blob.as_json(), "layers": [blob.as_json()], "annotations": {}}
    foreign = Manifest(media_type=OCI_MANIFEST, body=compact_json(document))
    store.write_manifest(foreign, foreign.digest)
    attachments.write_fallback(store, subject.digest, [foreign], set())
    assert verified(dist)


def test_a_manifest_whose_media_type_is_none_is_refused(dist):
    body = b'{"mediaType": {"a": 1}}'
    blob = write_small_blob(OciLayout(dist), OCI_MANIFEST, body)
    with pytest.raises(RegistryError, match="mediaType of a manifest must be a string"):
        promote(f"oci:{dist}@{blob.digest}", f"oci:{dist}2", new_key())


@pytest.mark.parametrize("media_type", ["text/plain", ""])
def test_a_wrong_content_type_of_a_registry_is_named_and_not_called_another_image(dist, image, media_type):
    layout, wrong = OciLayout(dist), ""

    def answer(request: Any) -> Answer:
        kind, _, name = request.path.removeprefix("/v2/a/b/").partition("/")
        with contextlib.suppress(MissingError):
            if kind == "manifests":
                found = layout.read_manifest(name)
                told = media_type if found.digest == wrong else found.media_type
                return 200, {"Content-Type": told}, found.body
            if kind == "blobs":
                return 200, {}, b"".join(layout.read_blob(name))
        return 404, {}, b""

    with serving(answer) as (host, _seen):
        told: dict[str, Any] = {"public_key": KEY.public_key(), "now": NOW}
        assert asked.verified(f"{host}/a/b:{STACK_ID}", **told).digest == image.manifest_digest
        wrong = image.manifest_digest
        with pytest.raises(CertificateError, match="a media type that no image has") as caught:
            asked.verified(f"{host}/a/b:{STACK_ID}", **told)
    assert caught.value.got == (media_type or "none")
    assert OCI_MANIFEST in (caught.value.expected or "")


def test_a_revocation_that_is_left_in_one_form_only_still_counts(dist, image):
    from stackcheck.certificate.revoke import revoke

    before = dist.with_name("before")
    shutil.copytree(dist, before)
    one = next(name for name in OciLayout(dist).tags() if name.startswith(f"{STACK_ID}-"))
    revoke(f"oci:{dist}:{one}", reason="NaN", key=KEY, now=NOW + DAY / 2, report=quiet)
    store, old = OciLayout(dist), OciLayout(before)
    legacy = attachments.legacy_tag(image.manifest_digest)
    restored = old.read_manifest(legacy)
    for blob in (*restored.descriptors("config"), *restored.descriptors("layers")):
        store.write_blob(blob, lambda digest=blob.digest: old.read_blob(digest))
    store.write_manifest(restored, legacy)
    with pytest.raises(CertificateError, match="FAILED"):
        asked.verified(f"oci:{dist}:{one}", public_key=KEY.public_key())


ROOT = Path(__file__).resolve().parents[3]
GPU: dict[str, Any] = {"device_model": "H200", "driver": "580.95.05"}
WAIVED = "test_a.py::test_one[2]"


def h200s(count: int) -> dict[str, Any]:
    host = result_files.host("nvidia", *["H200"] * count, driver="580.95.05")
    for device in host["devices"]:
        device["arch"] = "sm_90"
    return host


def waiver(until: str) -> Waiver:
    return Waiver.model_validate(result_files.waiver(WAIVED, until=until))


@pytest.fixture
def own_image(publisher: Publisher) -> SmallImage:
    return publisher.image(b"one")


def refusal(publisher: Publisher, **wanted: Any) -> CertificateError:
    with pytest.raises(CertificateError) as error:
        publisher.verify(**wanted)
    assert error.value.next_step
    return error.value


def test_the_summary_names_tier_model_count_architectures_and_class_of_bounds(publisher, own_image):
    said = certify(
        own_image, publisher.key, host=h200s(2), archs=("sm_80", "sm_90", "sm_100"), bound_class="published"
    )[-1].statement
    assert said.predicate_type == VSA
    assert said.predicate["verifiedLevels"] == [
        "STACKCHECK_CERTIFIED",
        "STACKCHECK_BOUNDS_PUBLISHED",
        "STACKCHECK_H200",
        "STACKCHECK_H200_X2",
        "STACKCHECK_PYTHON_PACKAGED",
        "STACKCHECK_SM_90",
        "STACKCHECK_TIER_STANDARD",
    ]
    facts = said.predicate["urn:stackcheck:certificate:v1"]
    assert (facts["run"]["tier"], facts["host"]["deviceCount"]) == ("standard", 2)
    assert facts["archs"] == {"ran": ["sm_90"], "staticOnly": ["sm_80", "sm_100"]}
    assert facts["bounds"] == {"published": 1}


def test_the_default_tiers_of_verify_are_those_of_the_policy():
    assert dict(matrix.load_matrix(ROOT / "matrix.yaml").policy.certifies) == CERTIFYING_TIER


def test_the_default_tiers_of_bare_pytest_are_those_of_the_policy(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "tests" / "acceptance"), *sys.path])
    from harness import session

    assert session.CERTIFYING_TIER == CERTIFYING_TIER


def test_a_lower_tier_is_refused_unless_the_reader_accepts_it(publisher, own_image):
    publisher.publish(own_image, host=h200s(1), tier="smoke")
    error = refusal(publisher, **GPU)
    assert "the image's state is `tested`" in str(error)
    assert (error.got, error.expected) == ("smoke", "standard, or a more thorough tier")
    assert publisher.verify(**GPU, tier="smoke")
    assert refusal(publisher, **GPU, tier="soak").got == "smoke"


def test_a_host_with_more_devices_than_were_tested_together_is_refused(publisher, own_image):
    publisher.publish(own_image, host=h200s(1))
    error = refusal(publisher, **GPU, devices=2)
    assert error.got == "2 devices on this host, 1 in the certificate"
    assert "--devices 1" in str(error)
    assert publisher.verify(**GPU, devices=1)


def test_a_newer_certificate_of_fewer_devices_does_not_hide_one_that_is_enough(publisher, own_image):
    publisher.publish(own_image, host=h200s(8))
    publisher.publish(own_image, host=h200s(1), now=NOW + HOUR)
    assert publisher.verify(**GPU, devices=8).verified_at == NOW
    assert publisher.verify(**GPU, devices=1).verified_at == NOW + HOUR


def test_a_reader_may_refuse_waivers(publisher, own_image):
    publisher.publish(own_image, outcome="failed", waivers=(waiver("2999-12-31"),))
    assert publisher.verify().facts["warned"] == [WAIVED]
    error = refusal(publisher, waivers=False)
    assert (error.got, error.expected) == (WAIVED, "no waived check (--no-waivers)")


def test_a_waiver_that_was_not_needed_is_no_reason_to_refuse(publisher, own_image):
    publisher.publish(own_image, waivers=(waiver("2999-12-31"),))
    assert publisher.verify(waivers=False)


def test_a_waived_check_is_refused_once_its_waiver_has_ended(publisher, own_image):
    last = NOW.date() + dt.timedelta(days=2)
    publisher.publish(own_image, outcome="failed", waivers=(waiver(last.isoformat()),))
    assert publisher.verify(now=NOW + dt.timedelta(days=2))
    error = refusal(publisher, now=NOW + dt.timedelta(days=3))
    assert error.got == f"{WAIVED} was waived until {last}"
