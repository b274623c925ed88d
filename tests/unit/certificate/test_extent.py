"""How far a certificate reaches: tier, device model, count, class of bounds, architectures and waivers."""

import datetime as dt
import sys
from pathlib import Path
from typing import Any

import pytest

import result_files
from small_images import NOW, SmallImage, certify
from small_target import HOUR, Publisher
from stackcheck.certificate.for_host import CERTIFYING_TIER
from stackcheck.certificate.statement import VSA
from stackcheck.errors import CertificateError
from stackcheck.matrix import matrix
from stackcheck.policy import Waiver

pytestmark = pytest.mark.usefixtures("no_disk_flushes")

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
def publisher(tmp_path: Path) -> Publisher:
    return Publisher(tmp_path)


@pytest.fixture
def image(publisher: Publisher) -> SmallImage:
    return publisher.image(b"one")


def refusal(publisher: Publisher, **wanted: Any) -> CertificateError:
    with pytest.raises(CertificateError) as error:
        publisher.verify(**wanted)
    assert error.value.next_step
    return error.value


def test_the_summary_names_tier_model_count_architectures_and_class_of_bounds(
    publisher: Publisher, image: SmallImage
) -> None:
    said = certify(
        image, publisher.key, host=h200s(2), archs=("sm_80", "sm_90", "sm_100"), bound_class="published"
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


def test_the_default_tiers_of_verify_are_those_of_the_policy() -> None:
    assert dict(matrix.load_matrix(ROOT / "matrix.yaml").policy.certifies) == CERTIFYING_TIER


def test_the_default_tiers_of_bare_pytest_are_those_of_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "tests" / "acceptance"), *sys.path])
    from harness import session

    assert session.CERTIFYING_TIER == CERTIFYING_TIER


def test_a_lower_tier_is_refused_unless_the_reader_accepts_it(
    publisher: Publisher, image: SmallImage
) -> None:
    publisher.publish(image, host=h200s(1), tier="smoke")
    error = refusal(publisher, **GPU)
    assert "the image's state is `tested`" in str(error)
    assert (error.got, error.expected) == ("smoke", "standard, or a more thorough tier")
    assert publisher.verify(**GPU, tier="smoke")
    assert refusal(publisher, **GPU, tier="soak").got == "smoke"


def test_a_host_with_more_devices_than_were_tested_together_is_refused(
    publisher: Publisher, image: SmallImage
) -> None:
    publisher.publish(image, host=h200s(1))
    error = refusal(publisher, **GPU, devices=2)
    assert error.got == "2 devices on this host, 1 in the certificate"
    assert "--devices 1" in str(error)
    assert publisher.verify(**GPU, devices=1)


def test_a_newer_certificate_of_fewer_devices_does_not_hide_one_that_is_enough(
    publisher: Publisher, image: SmallImage
) -> None:
    publisher.publish(image, host=h200s(8))
    publisher.publish(image, host=h200s(1), now=NOW + HOUR)
    assert publisher.verify(**GPU, devices=8).verified_at == NOW
    assert publisher.verify(**GPU, devices=1).verified_at == NOW + HOUR


def test_a_reader_may_refuse_waivers(publisher: Publisher, image: SmallImage) -> None:
    publisher.publish(image, outcome="failed", waivers=(waiver("2999-12-31"),))
    assert publisher.verify().facts["warned"] == [WAIVED]
    error = refusal(publisher, waivers=False)
    assert (error.got, error.expected) == (WAIVED, "no waived check (--no-waivers)")


def test_a_waiver_that_was_not_needed_is_no_reason_to_refuse(publisher: Publisher, image: SmallImage) -> None:
    publisher.publish(image, waivers=(waiver("2999-12-31"),))
    assert publisher.verify(waivers=False)


def test_a_waived_check_is_refused_once_its_waiver_has_ended(publisher: Publisher, image: SmallImage) -> None:
    last = NOW.date() + dt.timedelta(days=2)
    publisher.publish(image, outcome="failed", waivers=(waiver(last.isoformat()),))
    assert publisher.verify(now=NOW + dt.timedelta(days=2))
    error = refusal(publisher, now=NOW + dt.timedelta(days=3))
    assert error.got == f"{WAIVED} was waived until {last}"
