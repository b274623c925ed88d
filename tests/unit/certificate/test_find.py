"""`find` lists what is certified for a host, newest first, and says why the others are not."""

import dataclasses
import datetime as dt
import json
from pathlib import Path
from typing import Any

import pytest

import result_files
from small_dist import DAY, KEY, release
from small_images import NOW, STACK_ID, SmallImage, make_image
from stackcheck.certificate import find
from stackcheck.certificate.find import Candidate, ImageQuery

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
def test_what_fits_is_named_by_its_digest(tmp_path: Path, image: SmallImage, wanted: ImageQuery) -> None:
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
def test_what_does_not_fit_says_why(tmp_path: Path, image: SmallImage, wanted: ImageQuery, why: str) -> None:
    release(image, tmp_path / "dist", host=H200)
    candidate = only(tmp_path / "dist", wanted)
    assert candidate.refused is not None
    assert why in candidate.refused
    assert candidate.reference is None


def test_what_fits_comes_first_and_the_newest_of_it(tmp_path: Path) -> None:
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
def test_a_tag_that_no_reference_can_have_is_listed_with_its_reason_and_hides_no_image(
    tmp_path: Path, image: SmallImage, name: str
) -> None:
    release(image, tmp_path / "dist", host=H200)
    index = tmp_path / "dist" / "index.json"
    listed = json.loads(index.read_text())
    entry = next(item for item in listed["manifests"] if item["digest"] == image.manifest_digest)
    odd = entry | {"annotations": {"org.opencontainers.image.ref.name": name}}
    index.write_text(json.dumps(listed | {"manifests": [odd, *listed["manifests"]]}))
    good, *bad = found(tmp_path / "dist", ImageQuery())
    assert (good.tag, good.refused) == (STACK_ID, None)
    assert [item.refused is None for item in bad] in ([False], [True])  # `:` and "" name the image itself


def test_a_store_that_is_slow_for_each_tag_is_left_after_a_time_for_all(
    tmp_path: Path, image: SmallImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    release(image, tmp_path / "dist", host=H200)
    monkeypatch.setattr(find, "TOTAL_S", 0.0)
    candidate = only(tmp_path / "dist", ImageQuery())
    assert candidate.refused is not None
    assert "not looked at" in candidate.refused
