"""A certificate that takes checks over from the image below holds as long as the one below does."""

import dataclasses
import datetime as dt
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import result_files
from small_images import NOW, STACK_ID, SmallImage, certify, make_image, quiet, release
from small_target import HOUR, Publisher, refused
from stackcheck.certificate import derived, publish
from stackcheck.certificate.verify import Verified
from stackcheck.errors import CertificateError
from stackcheck.oci.store import parse_reference
from stackcheck.suite.added import Added

pytestmark = pytest.mark.usefixtures("no_disk_flushes")

OWN, BELOW_CHECK = "test_a.py::test_one[1]", "test_z.py::test_below"
MINE = "team-mine-1-x0123abcd"


def taken(image: SmallImage, at: dt.datetime = NOW, **changes: Any) -> dict[str, Any]:
    return {
        "digest": image.manifest_digest,
        "name": STACK_ID,
        "statement": result_files.DIGEST,
        "verifiedAt": at.isoformat(timespec="milliseconds"),
        "layers": 2,
        "paths": 1,
        "names": ["/app"],
        "why": "",
        "ran": [OWN],
        "carried": [BELOW_CHECK],
        "bounds": {"measured": 3},
    } | changes


class Team(Publisher):
    """A publisher with a certified image and one that was made from it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.below = self.image(b"below")
        self.mine = make_image(folder / "mine", b"mine", stack_id=None)
        self.published = self.publish(self.below)

    def publish_mine(self, **changes: Any) -> publish.Published:
        told = {"derived": taken(self.below), "now": NOW + HOUR, "name": MINE} | changes
        return release(self.mine, self.folder / "dist", self.key, tag=MINE, **told)

    def verify_mine(self, now: dt.datetime = NOW + 3 * HOUR, **host: Any) -> Verified:
        return self.verify(f"{self.target}:{MINE}", now, **host)


@pytest.fixture
def team(tmp_path) -> Team:
    return Team(tmp_path)


def test_it_is_accepted_and_says_what_was_taken_over(team):
    team.publish_mine()
    found = team.verify_mine()
    assert found.digest == team.mine.manifest_digest
    assert found.facts["derivedFrom"]["digest"] == team.below.manifest_digest
    assert BELOW_CHECK in found.facts["passed"]
    assert found.facts["bounds"] == {"measured": 3}


def test_a_later_certificate_of_the_image_below_does_not_bring_it_back(team):
    """What was taken over is from before the revocation."""
    team.publish_mine()
    team.revoke(str(team.published.unique))
    team.publish(team.below, now=NOW + 2 * HOUR)
    assert team.verify(now=NOW + 3 * HOUR)
    with pytest.raises(CertificateError, match="after its checks were taken over"):
        team.verify_mine()
    team.publish_mine(derived=taken(team.below, NOW + 2 * HOUR), now=NOW + 2.5 * HOUR)
    assert team.verify_mine()


def test_an_expired_certificate_of_the_image_below_ends_it_and_a_renewed_one_does_not(team):
    late = NOW + dt.timedelta(days=31)
    team.publish_mine(now=late - HOUR)
    with pytest.raises(CertificateError, match="too old"):
        team.verify_mine(late)
    team.publish(team.below, now=late - HOUR)
    assert team.verify_mine(late)


def test_it_is_not_published_where_the_image_below_is_not(team, tmp_path):
    other = Publisher(tmp_path / "elsewhere")
    other.key = team.key
    envelopes = certify(team.mine, team.key, derived=taken(team.below), name=MINE)
    error = refused(other, team.mine, envelopes=envelopes)
    assert "image below is not certified in this target" in str(error)
    team.revoke(str(team.published.unique))
    assert "image below" in str(refused(team, team.mine, envelopes=envelopes))


def test_promoting_it_needs_the_image_below_there_first(team, tmp_path):
    team.publish_mine()
    told: Any = {"public_key": team.key.public_key(), "report": quiet, "now": NOW + 3 * HOUR}
    target = f"oci:{tmp_path / 'there'}"
    with pytest.raises(Exception, match="image below is not certified in this target"):
        publish.promote(f"{team.target}:{MINE}", target=target, **told)
    publish.promote(team.reference, target=target, **told)
    publish.promote(f"{team.target}:{MINE}", target=target, **told)
    assert team.verify(f"{target}:{MINE}")


def test_if_every_check_ran_the_image_below_does_not_matter(team):
    team.publish_mine(derived=taken(team.below, carried=[], why="a library"))
    team.revoke(str(team.published.unique))
    assert team.verify_mine()


def test_a_check_that_ran_is_not_taken_over_too(team):
    with pytest.raises(Exception, match="malformed"):
        team.publish_mine(derived=taken(team.below, carried=[OWN]))


# --- which checks are taken over

CHECKS = (
    "test_image.py::test_a",
    "test_kernels.py::test_b[1]",
    "test_kernels.py::test_c",
    "test_witness.py::test_d",
)
INPUTS = dict.fromkeys(derived.SAME_INPUTS, result_files.DIGEST)


def below(**changes: Any) -> derived.Below:
    told = {
        "name": STACK_ID,
        "passed": list(CHECKS),
        "warned": [],
        "inputs": INPUTS,
        "run": {"tier": "smoke"},
        "host": result_files.host(),
        "bounds": {},
    } | changes
    verified = Verified(
        reference=parse_reference("oci:x@" + result_files.DIGEST),
        digest=result_files.DIGEST,
        config_digest=result_files.DIGEST,
        stack_id=STACK_ID,
        device_model="CPU",
        driver=None,
        verified_at=NOW,
        facts=told,
        statement=result_files.DIGEST,
    )
    return derived.Below(verified=verified, config={})


def plan(**changes: Any) -> Any:
    host = result_files.host() | changes.pop("host", {})
    inputs = INPUTS | {"matrix": "sha256:" + "9" * 64} | changes.pop("inputs", {})
    return SimpleNamespace(
        tier=changes.pop("tier", "smoke"),
        inputs=SimpleNamespace(model_dump=lambda: inputs),
        host=SimpleNamespace(as_json=lambda: host),
    )


APART = Added(layers=2, paths=1, names=("/app",))


def test_only_checks_that_passed_and_do_not_look_at_the_image_are_taken_over():
    found = derived.take_over(below(), APART, plan(), CHECKS)
    assert found.carried == {"test_kernels.py::test_b[1]", "test_kernels.py::test_c"}
    assert found.why == ""
    assert found.words(4) == "2 of 4 checks run, the others are taken over"
    skipped = below(passed=list(CHECKS[:2]))
    assert derived.take_over(skipped, APART, plan(), CHECKS).carried == {"test_kernels.py::test_b[1]"}
    waived = below(warned=["test_kernels.py::test_c"])
    assert derived.take_over(waived, APART, plan(), CHECKS).carried == {"test_kernels.py::test_b[1]"}
    assert derived.take_over(below(), APART, plan(), CHECKS[:2]).carried == {"test_kernels.py::test_b[1]"}


OTHER = "sha256:" + "8" * 64


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        *(({"inputs": {name: OTHER}}, name) for name in derived.SAME_INPUTS),
        ({"tier": "standard"}, "tier"),
        *(
            ({"host": {name: "other"}}, "machine")
            for name in ("driver", "kernel", "partition", "nvls", "vendor")
        ),
        ({"host": {"devices": []}}, "machine"),
    ],
    ids=str,
)
def test_a_run_of_other_suites_or_on_another_machine_takes_nothing_over(changed, word):
    found = derived.take_over(below(), APART, plan(**changed), CHECKS)
    assert not found.carried
    assert word in found.why


def test_what_a_check_can_see_lets_all_run():
    found = derived.take_over(
        below(), dataclasses.replace(APART, seen="/usr/lib/x was changed"), plan(), CHECKS
    )
    assert (found.carried, found.why) == (frozenset(), "/usr/lib/x was changed")
    assert "all 4 checks run" in found.words(4)


def test_what_ran_all_the_same_is_not_stated_as_taken_over():
    found = derived.take_over(below(), APART, plan(), CHECKS)
    stated = found.signed(["test_image.py::test_a", "test_kernels.py::test_c"])
    assert stated["carried"] == ["test_kernels.py::test_b[1]"]
