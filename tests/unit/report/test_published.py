"""What a target publishes, read from real signed statements in a real layout."""

import datetime as dt
from pathlib import Path

import pytest

from small_images import NOW, new_key
from small_target import Publisher
from stackcheck.certificate.policy import MAX_AGE
from stackcheck.oci.documents import RegistryError
from stackcheck.report.published import PublishedImage, is_there, published

HOUR = dt.timedelta(hours=1)
DAY = dt.timedelta(days=1)


def read(publisher: Publisher, now: dt.datetime = NOW + HOUR) -> tuple[PublishedImage, ...]:
    return published(publisher.target, publisher.key.public_key(), now, MAX_AGE)


def test_a_published_image_is_certified_for_the_machine_of_its_run(publisher: Publisher) -> None:
    publisher.publish(publisher.image(b"one"))
    (found,) = read(publisher)
    assert (found.standing, found.current) == ("certified", True)
    (machine,) = found.machines
    assert (machine.device_model, machine.driver, machine.device_count) == ("CPU", None, 1)
    assert machine.expires == NOW + MAX_AGE


def test_it_expires(publisher: Publisher) -> None:
    publisher.publish(publisher.image(b"one"))
    assert read(publisher, NOW + 31 * DAY)[0].standing == "expired"


def test_a_revoked_image_says_why_and_what_it_was_certified_for(publisher: Publisher) -> None:
    publisher.publish(publisher.image(b"one"))
    publisher.revoke(publisher.reference)
    (found,) = read(publisher, NOW + 2 * HOUR)
    assert (found.standing, found.reason) == ("revoked", "NaN")
    assert found.machines[0].device_model == "CPU"


def test_what_another_key_signed_certifies_nothing(publisher: Publisher) -> None:
    publisher.publish(publisher.image(b"one"))
    (found,) = published(publisher.target, new_key().public_key(), NOW + HOUR, MAX_AGE)
    assert (found.standing, found.machines) == ("not certified", ())


def test_only_the_newest_image_of_a_stack_is_current(publisher: Publisher) -> None:
    publisher.publish(publisher.image(b"one"))
    publisher.publish(publisher.image(b"two"))
    assert [image.current for image in read(publisher)] == [True, False]


def test_a_certificate_from_the_future_certifies_nothing(publisher: Publisher) -> None:
    publisher.publish(publisher.image(b"one"))
    assert read(publisher, NOW - DAY)[0].standing == "not certified"


def test_a_layout_that_was_never_made_holds_nothing_and_a_damaged_one_is_an_error(
    publisher: Publisher,
) -> None:
    assert not is_there(publisher.target)
    publisher.publish(publisher.image(b"one"))
    assert is_there(publisher.target)
    Path(publisher.target.removeprefix("oci:"), "index.json").write_text("{")
    with pytest.raises(RegistryError):
        read(publisher)
