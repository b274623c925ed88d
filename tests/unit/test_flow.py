"""The main job publishes exactly what passed, repeats only what changed, and says why it did not."""

from __future__ import annotations

import dataclasses
import datetime as dt
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from small_checkout import (  # noqa: F401  # fixtures among them
    AMD_STACK,
    CPU_STACK,
    FOREIGN,
    FakeEngine,
    answer,
    fake_engine,
    small_checkout,
)
from small_images import no_disk_flushes  # noqa: F401  # a fixture
from stackcheck import build, candidate, certificate, flow, keys, matrix, resolve, signing, verify
from stackcheck.errors import CertificateError
from stackcheck.examine import examine
from stackcheck.layout import OciLayout
from stackcheck.matrix import TestTarget
from stackcheck.predicates import RUN_FIELD
from stackcheck.revoke import revoke
from stackcheck.statement import PROVENANCE, TEST_RESULT, VSA, facts, status
from stackcheck.verdict import Waiver

if TYPE_CHECKING:
    from pathlib import Path

GEMM = "test_kernels.py::test_gemm"
DAY = dt.timedelta(days=1)


class World:
    """One checkout, its engine, and where it publishes."""

    def __init__(self, root: Path, engine: FakeEngine) -> None:
        self.root = root
        self.engine = engine
        self.dist = root / "dist"
        self.lines: list[str] = []
        self.settings = candidate.Settings(
            root=root, target=f"oci:{self.dist}", key=root.parent / "stackcheck.key"
        )

    def stack(self, name: str = CPU_STACK) -> resolve.Stack:
        return resolve.load_stacks(self.root, (name,))[0]

    def outcomes(self, *stacks: resolve.Stack, **changes: Any) -> list[flow.Outcome]:
        settings = dataclasses.replace(self.settings, **changes)
        engine: Any = self.engine
        return list(flow.images(stacks or (self.stack(),), engine, settings, self.lines.append))

    def outcome(self, *stacks: resolve.Stack, **changes: Any) -> flow.Outcome:
        (outcome,) = self.outcomes(*stacks, **changes)
        return outcome

    def verify(self, key: Path | None = None) -> verify.Verified:
        return verify.verify(
            f"oci:{self.dist}:{CPU_STACK}",
            public_key=keys.load_or_create(key or self.settings.key).public_key(),
            device_model="CPU",
            driver=None,
        )

    def tags(self) -> dict[str, str]:
        store = OciLayout(self.dist)
        names = store.tags() if (self.dist / "index.json").exists() else ()
        return {
            name: store.read_manifest(name).digest
            for name in names
            if not name.startswith(("cert-", "sha256-"))
        }

    def signed(self, name: str = CPU_STACK) -> dict[str, certificate.Statement]:
        statements = [envelope.statement for envelope in signing.signed(name, self.settings)]
        return {statement.predicate_type: statement for statement in statements}


@pytest.fixture
def world(checkout: Path, engine: FakeEngine) -> World:
    return World(checkout, engine)


def days_ago(monkeypatch: pytest.MonkeyPatch, days: float) -> None:
    """Let the flow sign as if it were some days earlier."""
    then = dt.datetime.now(dt.UTC) - days * DAY
    fake = SimpleNamespace(UTC=dt.UTC, datetime=SimpleNamespace(now=lambda _zone: then))
    monkeypatch.setattr(signing, "dt", fake)


def test_what_passed_is_certified_published_and_verifies(world: World) -> None:
    outcome = world.outcome()
    assert (outcome.state, outcome.error) == ("certified", None)
    assert outcome.image is not None
    assert outcome.reference == f"oci:{world.dist}:{CPU_STACK}"
    assert world.verify().digest == outcome.image.manifest_digest
    assert status(world.signed()[VSA]) == "PASSED"


def test_a_failed_verdict_publishes_and_signs_nothing(world: World) -> None:
    world.engine.answer = answer((GEMM, "failed"))
    outcome = world.outcome()
    assert outcome.error is not None
    assert (outcome.state, outcome.error.exit_code, outcome.reference) == ("failed", 6, None)
    assert f"{GEMM} failed: because" in str(outcome.error)
    assert world.tags() == {}
    assert not (world.settings.folder(CPU_STACK) / "statements").exists()


def test_a_required_check_that_skips_fails_the_image(world: World) -> None:
    world.engine.answer = answer((GEMM, "skipped"))
    assert world.outcome().state == "failed"
    assert world.tags() == {}


def test_an_image_that_fails_leaves_the_tag_on_the_one_that_passed(world: World) -> None:
    first = world.outcome().image
    assert first is not None
    dockerfile = world.root / "images" / CPU_STACK / "Dockerfile"
    dockerfile.write_text(dockerfile.read_text() + "# changed\n")
    world.engine.answer = answer((GEMM, "error"))
    outcome = world.outcome()
    assert outcome.state == "failed"
    assert outcome.image is not None
    assert outcome.image.manifest_digest != first.manifest_digest
    assert world.verify().digest == first.manifest_digest
    assert set(world.tags().values()) == {first.manifest_digest}


def test_an_unfit_machine_ends_with_9_and_signs_nothing(world: World) -> None:
    world.engine.answer = answer((GEMM, "invalid"))
    outcome = world.outcome()
    assert outcome.error is not None
    assert (outcome.state, outcome.error.exit_code) == ("unfit", 9)
    assert world.tags() == {}
    assert not (world.settings.folder(CPU_STACK) / "statements").exists()


@pytest.mark.parametrize("experimental", [False, True])
def test_a_machine_that_the_stack_does_not_name_certifies_nothing(world: World, experimental: bool) -> None:
    named = (TestTarget(device="CPU", count=2),)
    stack = dataclasses.replace(world.stack(), tested_on=named, experimental=experimental)
    outcome = world.outcome(stack)
    assert outcome.error is not None
    assert (outcome.state, outcome.error.exit_code) == ("unfit", 9)
    assert "the machine is CPU x1, and the stack names CPU x2" in str(outcome.error)
    assert "name this one under tested_on in matrix.yaml" in str(outcome.error)
    assert f"{CPU_STACK}: this run cannot end PASSED: the machine is CPU x1" in "\n".join(world.lines)
    assert world.tags() == {}
    assert not (world.settings.folder(CPU_STACK) / "statements").exists()


def test_suites_that_die_without_a_result_fail_the_image(world: World) -> None:
    world.engine.answer = lambda _told: None
    outcome = world.outcome()
    assert outcome.error is not None
    assert (outcome.state, outcome.error.exit_code) == ("failed", 6)
    assert world.tags() == {}
    world.engine.answer = answer()
    assert world.outcome().state == "certified"


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
        if outcome.error is None:  # mended, or of an earlier certificate that nothing names any more
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


def test_a_stack_that_cannot_be_built_does_not_keep_the_next_one_back(world: World) -> None:
    unlocked = dataclasses.replace(world.stack(), id="unlocked", missing=("torch's index",))
    (world.root / "images" / CPU_STACK).rename(world.root / "images" / "unlocked")
    (world.root / "images" / CPU_STACK).symlink_to(world.root / "images" / "unlocked")
    first, second = world.outcomes(unlocked, world.stack())
    assert first.error is not None
    assert (first.state, first.error.exit_code) == ("not built", 5)
    assert "torch's index" in str(first.error)
    assert second.state == "certified"


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


def test_waivers_are_in_the_statements(world: World) -> None:
    world.engine.answer = answer((GEMM, "failed"))
    waiver = Waiver(check=GEMM, reason="known and harmless", by="a name")
    outcome = world.outcome(waivers=(waiver,))
    assert outcome.state == "certified"
    given = {"check": GEMM, "reason": "known and harmless", "by": "a name"}
    assert facts(world.signed()[VSA])["waivers"] == [given]
    assert world.signed()[TEST_RESULT].document["predicate"]["warnedTests"] == [GEMM]
    assert world.verify().facts["waivers"] == [given]


def test_another_set_of_waivers_is_another_certificate(world: World) -> None:
    world.outcome()
    assert world.outcome(waivers=(Waiver(check=GEMM, reason="why", by="who"),)).state == "certified"
    assert len(world.engine.runs) == 1
    assert len(world.verify().facts["waivers"]) == 1


def test_an_amd_stack_without_a_device_is_failed_and_not_published(world: World) -> None:
    outcome = world.outcome(world.stack(AMD_STACK))
    assert outcome.error is not None
    assert (outcome.state, outcome.error.exit_code) == ("failed", 6)
    assert "vendor amd was named and no AMD device is visible" in str(outcome.error)
    assert world.tags() == {}


def test_an_experimental_stack_says_so_in_its_certificate(world: World) -> None:
    world.outcome(dataclasses.replace(world.stack(), experimental=True))
    assert world.verify().facts["experimental"] is True


def test_a_withdrawn_image_needs_a_new_run(world: World) -> None:
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
    assert "withdrawn" in outcome.reason
    assert world.outcome(force=True).state == "certified"
    assert world.verify().verified_at > now


def test_an_image_from_elsewhere_is_held_to_the_vendors_checks(world: World) -> None:
    engine: Any = world.engine
    loaded = matrix.load(world.root / "matrix.yaml")
    image = build.adopt(FOREIGN, engine, folder=world.settings.folder("foreign"), report=world.lines.append)
    subject = candidate.foreign(image, "foreign", loaded, world.settings)
    assert (subject.vendor, subject.required, subject.machines) == ("cpu", loaded.required["cpu"], None)
    result, judged, _reused = examine(subject, engine, world.settings, world.lines.append)
    assert judged.status == "PASSED"
    assert judged.required == loaded.required["cpu"]
    signing.sign(subject, result, judged, world.settings)
    predicate = world.signed("foreign")[PROVENANCE].document["predicate"]
    assert predicate["buildDefinition"]["externalParameters"]["origin"] == "not built by this project"
    assert predicate["buildDefinition"]["resolvedDependencies"] == []
    assert world.signed("foreign")[TEST_RESULT].document["predicate"][RUN_FIELD]["id"] == result.run_id
