"""The main job publishes exactly what passed, and says why it did not."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from small_checkout import (  # noqa: F401  # fixtures among them
    AMD_STACK,
    CPU_STACK,
    FOREIGN,
    answer,
    fake_engine,
    small_checkout,
)
from small_flow import world_of_one_checkout  # noqa: F401  # a fixture
from small_images import no_disk_flushes  # noqa: F401  # a fixture
from stackcheck import flow
from stackcheck.build import build
from stackcheck.certificate.statement import PROVENANCE, RUN_FIELD, TEST_RESULT, VSA, facts, status
from stackcheck.matrix import matrix
from stackcheck.suite import subject as subjects
from stackcheck.suite.verdict import Waiver

if TYPE_CHECKING:
    from small_flow import World

GEMM = "test_kernels.py::test_gemm"


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
    world.set('env: {EXAMPLE: "1"}')
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
    world.set(f"experimental: {str(experimental).lower()}")
    world.set("tested_on: [{device: CPU, count: 2}]")
    outcome = world.outcome()
    assert outcome.error is not None
    assert (outcome.state, outcome.error.exit_code) == ("unfit", 9)
    assert "the machine has CPU x1, and the stack names CPU x2" in str(outcome.error)
    assert "name this one under tested_on in matrix.yaml" in str(outcome.error)
    assert f"{CPU_STACK}: this run cannot end PASSED: the machine has CPU x1" in "\n".join(world.lines)
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


def test_a_stack_that_cannot_be_built_does_not_keep_the_next_one_back(world: World) -> None:
    unlocked = dataclasses.replace(world.stack(), id="unlocked", missing=("torch's index",))
    (world.root / "images" / CPU_STACK).rename(world.root / "images" / "unlocked")
    (world.root / "images" / CPU_STACK).symlink_to(world.root / "images" / "unlocked")
    first, second = world.outcomes(unlocked, world.stack())
    assert first.error is not None
    assert (first.state, first.error.exit_code) == ("not built", 5)
    assert "torch's index" in str(first.error)
    assert second.state == "certified"


def test_waivers_are_in_the_statements(world: World) -> None:
    world.engine.answer = answer((GEMM, "failed"))
    waiver = Waiver(check=GEMM, reason="known and harmless", by="a name")
    outcome = world.outcome(waivers=(waiver,))
    assert outcome.state == "certified"
    given = {"check": GEMM, "reason": "known and harmless", "by": "a name"}
    assert facts(world.signed()[VSA])["waivers"] == [given]
    assert world.signed()[TEST_RESULT].document["predicate"]["warnedTests"] == [GEMM]
    assert world.verify().facts["waivers"] == [given]


def test_an_amd_stack_without_a_device_is_failed_and_not_published(world: World) -> None:
    outcome = world.outcome(world.stack(AMD_STACK))
    assert outcome.error is not None
    assert (outcome.state, outcome.error.exit_code) == ("failed", 6)
    assert "vendor amd was named and no AMD device is visible" in str(outcome.error)
    assert world.tags() == {}


def test_an_experimental_stack_says_so_in_its_certificate(world: World) -> None:
    world.set("experimental: true")
    world.outcome()
    assert world.verify().facts["experimental"] is True


def test_an_image_from_elsewhere_is_held_to_the_vendors_checks(world: World) -> None:
    engine: Any = world.engine
    loaded = matrix.load(world.root / "matrix.yaml")
    image = build.adopt(FOREIGN, engine, folder=world.settings.folder("foreign"), report=world.lines.append)
    subject = subjects.of_image(image, loaded, None, name="foreign", vendor=None)
    assert (subject.vendor, subject.required, subject.machines) == ("cpu", loaded.required_of("cpu"), None)
    judged = flow.test(subject, engine, world.settings, world.lines.append)
    assert judged.verdict.status == "PASSED"
    assert judged.verdict.required == loaded.required_of("cpu")
    flow.sign(subject, judged, world.settings)
    predicate = world.signed("foreign")[PROVENANCE].document["predicate"]
    assert predicate["buildDefinition"]["externalParameters"]["origin"] == "not built by this project"
    assert predicate["buildDefinition"]["resolvedDependencies"] == []
    assert world.signed("foreign")[TEST_RESULT].document["predicate"][RUN_FIELD]["id"] == judged.result.run_id
