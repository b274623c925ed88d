"""What the main job does a second time: it repeats only what changed, keeps the rest, and says why."""

from __future__ import annotations

import datetime as dt
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from small_checkout import CPU_STACK, fake_engine, small_checkout  # noqa: F401  # fixtures among them
from small_flow import world_of_one_checkout  # noqa: F401  # a fixture
from small_images import no_disk_flushes  # noqa: F401  # a fixture
from stackcheck.certificate import keys, signing
from stackcheck.certificate.revoke import revoke
from stackcheck.errors import CertificateError
from stackcheck.oci.layout import OciLayout
from stackcheck.suite.verdict import Waiver

if TYPE_CHECKING:
    from small_flow import World

GEMM = "test_kernels.py::test_gemm"
DAY = dt.timedelta(days=1)


def days_ago(monkeypatch: pytest.MonkeyPatch, days: float) -> None:
    """Let the flow sign as if it were some days earlier."""
    then = dt.datetime.now(dt.UTC) - days * DAY
    fake = SimpleNamespace(UTC=dt.UTC, datetime=SimpleNamespace(now=lambda _zone: then))
    monkeypatch.setattr(signing, "dt", fake)


def test_unchanged_inputs_keep_the_certificate_and_say_why(world: World) -> None:
    world.outcome()
    before = world.verify().verified_at
    outcome = world.outcome()
    assert outcome.state == "unchanged"
    assert outcome.reason == "same image, suites, thresholds and host; certificate still valid"
    assert (len(world.engine.builds), len(world.engine.runs)) == (1, 1)
    assert world.verify().verified_at == before
    assert any("not built again: same Dockerfile" in line for line in world.lines)
    assert any("not run again: same image, suites, thresholds and host" in line for line in world.lines)


@pytest.mark.parametrize("name", ["tests/acceptance/test_some.py", "trainers/train.py", "matrix.yaml"])
def test_a_changed_input_repeats_the_run_and_only_the_run(world: World, name: str) -> None:
    world.outcome()
    path = world.root / name
    path.write_text(path.read_text() + "# changed\n")
    assert world.outcome().state == "certified"
    assert (len(world.engine.builds), len(world.engine.runs)) == (1, 2)


def test_force_runs_again_and_renews(world: World) -> None:
    world.outcome()
    assert world.outcome(force=True).state == "certified"
    assert (len(world.engine.builds), len(world.engine.runs)) == (1, 2)


@pytest.mark.parametrize(("days", "state"), [(6, "unchanged"), (8, "certified")])
def test_only_a_stale_certificate_is_renewed_and_without_a_new_run(
    world: World, monkeypatch: pytest.MonkeyPatch, days: float, state: str
) -> None:
    with monkeypatch.context() as earlier:
        days_ago(earlier, days)
        world.outcome()
    before = world.verify().verified_at
    assert world.outcome().state == state
    assert len(world.engine.runs) == 1
    assert (world.verify().verified_at > before) == (state == "certified")


def test_a_lost_dist_is_published_again_without_a_new_run(world: World) -> None:
    world.outcome()
    world.dist.rename(world.dist.with_name("away"))
    assert world.outcome().state == "certified"
    assert len(world.engine.runs) == 1
    assert world.verify()


def test_a_damaged_image_in_dist_is_published_again(world: World) -> None:
    image = world.outcome().image
    assert image is not None
    store = OciLayout(world.dist)
    manifest = store.read_manifest(image.manifest_digest)
    parts = [blob.digest for blob in (*manifest.descriptors("config"), *manifest.descriptors("layers"))]
    for digest in (*parts, manifest.digest):
        path = store.blob_path(digest)
        path.write_bytes(path.read_bytes()[:-1] + b"~")
        with pytest.raises(CertificateError):
            world.verify()
        assert world.outcome().state == "certified"
        assert world.verify().digest == image.manifest_digest
    assert len(world.engine.runs) == 1


def test_damage_to_what_was_signed_is_never_passed_over_and_says_how_to_go_on(world: World) -> None:
    image = world.outcome().image
    assert image is not None
    files = sorted((world.dist / "blobs" / "sha256").iterdir())
    for path in (*files, world.dist / "index.json"):
        body = path.read_bytes()
        path.write_bytes(body[:-2] + b"~~")
        outcome = world.outcome()
        if outcome.error is None:  # written again, or of an earlier certificate that no tag names
            assert world.verify().digest == image.manifest_digest
        else:
            assert (outcome.state, outcome.error.exit_code) == ("not published", 8), path
            assert f"move {world.dist} away" in str(outcome.error)
        path.write_bytes(body)


def test_another_key_signs_again_without_a_new_run(world: World) -> None:
    world.outcome()
    other = world.root.parent / "other.key"
    assert world.outcome(key=other).state == "certified"
    assert len(world.engine.runs) == 1
    assert world.verify(other)


def test_a_target_that_refuses_leaves_the_run_for_the_next_try(world: World) -> None:
    world.dist.write_text("a file where a folder should be")
    outcome = world.outcome()
    assert outcome.error is not None
    assert (outcome.state, outcome.error.exit_code) == ("not published", 8)
    world.dist.unlink()
    assert world.outcome().state == "certified"
    assert len(world.engine.runs) == 1


def test_a_run_that_was_not_published_is_published_by_the_next_try(world: World) -> None:
    """An older certificate of the same image is still fresh, but it is about another run."""
    world.outcome()
    away = world.dist.rename(world.dist.with_name("away"))
    world.dist.write_text("a file where a folder should be")
    assert world.outcome(force=True).state == "not published"
    world.dist.unlink()
    away.rename(world.dist)
    outcome = world.outcome()
    assert outcome.state == "certified"
    assert outcome.result is not None
    assert world.verify().facts["run"]["id"] == outcome.result.run_id


def test_another_set_of_waivers_is_another_certificate(world: World) -> None:
    world.outcome()
    assert world.outcome(waivers=(Waiver(check=GEMM, reason="why", by="who"),)).state == "certified"
    assert len(world.engine.runs) == 1
    assert len(world.verify().facts["waivers"]) == 1


def test_a_revoked_image_needs_a_new_run(world: World) -> None:
    world.outcome()
    now = dt.datetime.now(dt.UTC)
    revoke(
        f"oci:{world.dist}:{CPU_STACK}",
        reason="NaN",
        key=keys.load(world.settings.key),
        now=now,
        report=world.lines.append,
    )
    outcome = world.outcome()
    assert outcome.error is not None
    assert (outcome.state, outcome.error.exit_code) == ("not published", 8)
    assert "revoked" in outcome.reason
    assert world.outcome(force=True).state == "certified"
    assert world.verify().verified_at > now
