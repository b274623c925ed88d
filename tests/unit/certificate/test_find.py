"""What a consumer finds, under which names, and pulls: only what was certified for its host, newest first."""

import dataclasses
import datetime as dt
import json
from pathlib import Path
from typing import Any

import pytest

import asked
import result_files
import small_images
from small_dist import DAY, KEY, release, verified
from small_images import NOW, STACK_ID, SmallImage, make_image, new_key, quiet
from stackcheck.certificate import find, job, pull, verify
from stackcheck.certificate.find import Candidate, ImageQuery
from stackcheck.errors import CertificateError, ConfigurationError, EngineError, PublishError
from stackcheck.oci.layout import OciLayout
from stackcheck.oci.tags import label

pytestmark = pytest.mark.usefixtures("no_disk_flushes")

H200 = result_files.host("nvidia", "H200", "H200", driver="580.95.05")
TORCH = result_files.result()["software"]["torch"]


def found(dist: Path, wanted: ImageQuery, **changes: Any) -> list[Candidate]:
    arguments: dict[str, Any] = {"public_key": KEY.public_key(), "now": NOW + DAY}
    return find.find(f"oci:{dist}", wanted, **(arguments | changes))


def only(dist: Path, wanted: ImageQuery, **changes: Any) -> Candidate:
    (candidate,) = found(dist, wanted, **changes)
    return candidate


@pytest.mark.parametrize(
    "wanted",
    [
        ImageQuery(),
        ImageQuery(device_model="h200"),
        ImageQuery(device_model="H200", driver="580.95.05", exact=True),
        ImageQuery(device_model="H200", driver="580"),
        ImageQuery(device_model="H200", driver=">=570", devices=2),
        ImageQuery(torch=TORCH),
    ],
)
def test_what_fits_is_named_by_its_digest(tmp_path, image, wanted):
    release(image, tmp_path / "dist", host=H200)
    candidate = only(tmp_path / "dist", wanted)
    assert candidate.refused is None
    assert candidate.reference == f"oci:{tmp_path}/dist@{image.manifest_digest}"
    assert (candidate.tag, candidate.machine) == (STACK_ID, "H200 x2, driver 580.95.05")
    assert candidate.torch == TORCH


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (ImageQuery(device_model="MI300X"), "certified for H200 x2, driver 580.95.05, not for MI300X"),
        (ImageQuery(driver="570"), "certified with driver 580.95.05, not with 570"),
        (ImageQuery(driver="580", exact=True), "certified with driver 580.95.05, not with 580"),
        (ImageQuery(exact=True), "certified with driver 580.95.05, not with none"),
        (ImageQuery(devices=4), "this host has more devices than were tested together"),
        (ImageQuery(torch=">=99"), f"torch {TORCH} is not >=99"),
        (ImageQuery(tier="soak"), "the certificate is of a lower tier"),
    ],
)
def test_what_does_not_fit_says_why(tmp_path, image, wanted, why):
    release(image, tmp_path / "dist", host=H200)
    candidate = only(tmp_path / "dist", wanted)
    assert candidate.refused is not None
    assert why in candidate.refused
    assert candidate.reference is None


def test_what_fits_comes_first_and_the_newest_of_it(tmp_path):
    hosts = {
        "b-older": (H200, 0),
        "a-newest": (H200, 3),
        "c-other": (result_files.host(), 5),
        "d-old": (H200, -3),
    }
    for name, (host, hours) in hosts.items():
        made = make_image(tmp_path / name, name.encode())
        image = dataclasses.replace(made, stack_id=name)
        release(image, tmp_path / "dist", tag=name, host=host, now=NOW + dt.timedelta(hours=hours))
    listed = found(tmp_path / "dist", ImageQuery(device_model="H200"))
    assert [each.tag for each in listed] == ["a-newest", "b-older", "d-old", "c-other"]
    assert [each.refused is None for each in listed] == [True, True, True, False]


@pytest.mark.parametrize("name", ["a b", "..", "-x", "ä", "x" * 129, "a/b", "", "@sha256:1", ":", "\x1b[2J"])
def test_a_tag_that_no_reference_can_have_is_listed_with_its_reason_and_hides_no_image(tmp_path, image, name):
    release(image, tmp_path / "dist", host=H200)
    index = tmp_path / "dist" / "index.json"
    listed = json.loads(index.read_text())
    entry = next(item for item in listed["manifests"] if item["digest"] == image.manifest_digest)
    odd = entry | {"annotations": {"org.opencontainers.image.ref.name": name}}
    index.write_text(json.dumps(listed | {"manifests": [odd, *listed["manifests"]]}))
    good, *bad = found(tmp_path / "dist", ImageQuery())
    assert (good.tag, good.refused) == (STACK_ID, None)
    assert [item.refused is None for item in bad] in ([False], [True])  # `:` and "" name the image itself


def test_a_store_that_is_slow_for_each_tag_is_left_after_a_time_for_all(tmp_path, image, monkeypatch):
    release(image, tmp_path / "dist", host=H200)
    monkeypatch.setattr(find, "TOTAL_S", 0.0)
    candidate = only(tmp_path / "dist", ImageQuery())
    assert candidate.refused is not None
    assert "not looked at" in candidate.refused


OWN_KEY = new_key()
GOOD, OTHER = (label(f"registry.example.org/team/{name}:1") for name in ("good", "other"))


def released(folder: Path, name: str, *, signed: str | None = None, tag: str | None = None) -> SmallImage:
    image = make_image(folder / name, name.encode(), stack_id=None)
    small_images.release(image, folder / "dist", OWN_KEY, tag=tag or name, name=signed or name)
    return image


def answered(reference: str) -> verify.Verified:
    return asked.verified(reference, public_key=OWN_KEY.public_key(), now=NOW)


def test_a_tag_that_was_moved_to_another_certified_image_without_a_stack_is_refused(tmp_path):
    released(tmp_path, GOOD)
    other = released(tmp_path, OTHER)
    store = OciLayout(tmp_path / "dist")
    store.write_manifest(store.read_manifest(other.manifest_digest), GOOD)
    with pytest.raises(CertificateError, match="different image than the tag names") as caught:
        answered(f"{store.target}:{GOOD}")
    assert (caught.value.got, caught.value.expected) == (
        f"a certificate for {OTHER}",
        f"a certificate for {GOOD}",
    )


def test_a_tag_counts_beside_a_digest(tmp_path):
    good, other = released(tmp_path, GOOD), released(tmp_path, OTHER)
    target = f"oci:{tmp_path / 'dist'}"
    assert answered(f"{target}:{GOOD}@{good.manifest_digest}").digest == good.manifest_digest
    with pytest.raises(CertificateError, match="different image than the tag names"):
        answered(f"{target}:{GOOD}@{other.manifest_digest}")
    assert answered(f"{target}@{other.manifest_digest}").digest == other.manifest_digest


def test_an_image_is_published_under_the_name_that_was_signed_and_no_other(tmp_path):
    with pytest.raises(PublishError, match="does not belong to the image"):
        released(tmp_path, GOOD, signed=OTHER)
    with pytest.raises(PublishError, match="does not belong to the image"):
        released(tmp_path, "cpu-torch2.13.0-py3.11-debian12", signed="cpu-torch2.13.0-py3.11-debian12")


def test_an_image_without_a_stack_is_promoted_by_its_digest_under_its_signed_name(tmp_path):
    good = released(tmp_path, GOOD)
    source = f"oci:{tmp_path / 'dist'}@{good.manifest_digest}"
    done = small_images.promote(source, tmp_path / "other", OWN_KEY, now=NOW)
    assert done.reference.tag == GOOD


def test_a_certificate_that_signed_no_name_is_found_by_digest_only(tmp_path):
    """Certificates of before names were signed: their image is certified, and which tag is theirs is not."""
    image = make_image(tmp_path / "old", b"old", stack_id=None)
    with pytest.raises(PublishError, match="does not belong to the image"):
        small_images.release(image, tmp_path / "dist", OWN_KEY, tag=GOOD, name="")


def test_promoting_by_a_tag_of_another_image_is_refused(tmp_path):
    released(tmp_path, GOOD)
    other = released(tmp_path, OTHER)
    source = f"oci:{tmp_path / 'dist'}:{GOOD}@{other.manifest_digest}"
    with pytest.raises((PublishError, ConfigurationError)):
        small_images.promote(source, tmp_path / "other", OWN_KEY, now=NOW)


class FakeEngine:
    """The three calls of the engine that a pull needs, over a set of names."""

    def __init__(self, image_id: str) -> None:
        self.image_id = image_id
        self.loaded: list[str] = []
        self.runs: list[Any] = []

    def has(self, reference: str) -> bool:
        return reference in self.loaded

    def inspect(self, reference: str) -> Any:
        assert reference in self.loaded
        return type("Info", (), {"id": self.image_id})

    def load(self, layout: Path, reference: str) -> None:
        assert OciLayout(layout).only_manifest()
        self.loaded.append(reference)

    def run_here(self, spec: Any, *, stop_timeout_s: float) -> int:
        assert stop_timeout_s == 60
        self.runs.append(spec)
        return 3


def test_a_pull_gives_the_engine_exactly_the_verified_image_and_only_once(dist, image):
    engine: Any = FakeEngine(image.manifest_digest)
    name = pull.pull(verified(dist), engine, report=quiet)
    assert name == f"stackcheck/{STACK_ID}:{image.config_digest[7:19]}"
    assert pull.pull(verified(dist), engine, report=quiet) == name
    assert engine.loaded == [name]


def test_an_engine_that_made_another_image_of_it_is_an_error(dist):
    engine: Any = FakeEngine("sha256:" + "9" * 64)
    with pytest.raises(EngineError, match="not the one that was verified"):
        pull.pull(verified(dist), engine, report=quiet)


def test_a_change_after_verification_does_not_reach_the_engine(dist, image):
    found = verified(dist)
    layer = OciLayout(dist).read_manifest(image.manifest_digest).descriptors("layers")[0]
    OciLayout(dist).blob_path(layer.digest).write_bytes(b"x" * layer.size)
    engine: Any = FakeEngine(image.manifest_digest)
    with pytest.raises(CertificateError):
        pull.pull(found, engine, report=quiet)
    assert engine.loaded == []


def test_a_run_sees_the_given_folder_and_nothing_else(tmp_path):
    from stackcheck.vendors import ContainerNeeds

    engine: Any = FakeEngine("x")
    needs = ContainerNeeds(remark="none", ulimits=(("memlock", -1),), groups=(44,), devices=("/dev/x",))
    code = job.run("x", engine, ("a", "b"), needs=needs, folder=tmp_path)
    spec = engine.runs[0]
    assert code == 3
    assert [(mount.source, mount.target) for mount in spec.mounts] == [(tmp_path, "/workspace")]
    assert (spec.command, spec.workdir, spec.network, spec.read_only) == (
        ("a", "b"),
        "/workspace",
        "none",
        True,
    )
    assert spec.cap_drop == ("ALL",)
    # As in certification: the suites' container is made of the same needs by the same function.
    assert (spec.ulimits, spec.group_add, spec.devices) == ({"memlock": -1}, (44,), ("/dev/x",))
