"""A published image is renewed and widened where it is; what a newer certificate covers does not pile up."""

import dataclasses
import datetime as dt
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import result_files
from small_images import NOW, SmallImage, certify, new_key
from stackcheck.certificate import renew
from stackcheck.certificate.statement import TEST_RESULT, VSA, Statement
from stackcheck.errors import PublishError

KEY = new_key()
DAY = dt.timedelta(days=1)

pytestmark = pytest.mark.usefixtures("no_disk_flushes")


def statements(image: SmallImage, **changes: Any) -> list[Statement]:
    return [item.statement for item in certify(image, KEY, **({"now": NOW} | changes))]


def summary(image: SmallImage, **changes: Any) -> Statement:
    return next(item for item in statements(image, **changes) if item.predicate_type == VSA)


def kinds(known: list[Statement], digests: frozenset[str]) -> list[str]:
    return sorted(item.predicate_type for item in known if item.digest in digests)


def test_a_newer_summary_of_the_same_configuration_replaces_the_older_and_its_test_result(
    image: SmallImage,
) -> None:
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
def test_what_another_machine_or_a_higher_tier_says_is_kept(
    image: SmallImage, changes: dict[str, Any]
) -> None:
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
def test_a_renewal_never_asks_for_fewer_checks(
    image: SmallImage, old: set[str], new: set[str], *, same: bool
) -> None:
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
