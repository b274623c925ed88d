"""Images by their reference: what holds them, and under which name they are published."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from small_checkout import AMD_STACK, CHECKS, CPU_STACK, FOREIGN, FakeEngine, call, verify
from stackcheck.oci import tags
from stackcheck.oci.layout import OciLayout

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("own_home", "no_disk_flushes")

Capsys = pytest.CaptureFixture[str]


def test_an_image_from_elsewhere_is_tested_certified_and_published_under_its_own_name(
    fake_engine: FakeEngine,  # noqa: ARG001
    small_checkout: Path,
    capsys: Capsys,
) -> None:
    done = call(capsys, "test", FOREIGN, "--json")
    assert done.code == 0
    assert sorted(json.loads(done.out)["required"]) == sorted(CHECKS)
    assert call(capsys, "certify", FOREIGN).code == 0
    assert call(capsys, "publish", FOREIGN).code == 0
    label = tags.label(FOREIGN)
    assert label in OciLayout(small_checkout / "dist").tags()
    done = verify(capsys, f"oci:dist:{label}", "--json")
    assert json.loads(done.out)["stack"] is None


def test_an_image_that_names_a_stack_is_held_to_the_checks_of_that_stack(
    fake_engine: FakeEngine, capsys: Capsys
) -> None:
    fake_engine.labels = {"stackcheck.stack": CPU_STACK}
    done = call(capsys, "test", FOREIGN, "--json")
    assert sorted(json.loads(done.out)["required"]) == sorted(CHECKS)
    assert done.code == 0
    call(capsys, "certify", FOREIGN)
    assert call(capsys, "publish", FOREIGN).code == 0


def test_an_image_that_names_a_stack_is_held_to_the_machines_of_that_stack(
    fake_engine: FakeEngine, capsys: Capsys
) -> None:
    fake_engine.labels = {"stackcheck.stack": AMD_STACK}
    done = call(capsys, "certify", FOREIGN, "--gpu-vendor", "cpu")
    assert done.code in {6, 9}
    assert "tested_on" in done.err


def test_an_image_of_a_stack_that_the_matrix_lacks_is_refused(
    fake_engine: FakeEngine, capsys: Capsys
) -> None:
    fake_engine.labels = {"stackcheck.stack": "cpu-*"}
    done = call(capsys, "test", FOREIGN)
    assert done.code == 2
    assert "the image's stack is not in matrix.yaml" in done.err
    assert fake_engine.runs == []


def test_an_image_whose_history_names_no_layers_is_a_clear_error(
    fake_engine: FakeEngine, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_engine, "step_sizes", lambda _reference: ())
    done = call(capsys, "test", FOREIGN)
    assert done.code == 2
    assert "the image's history does not match" in done.err
