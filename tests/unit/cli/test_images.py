"""The verbs that make images: their exit codes, what they print, and what they leave alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from small_checkout import AMD_STACK, CPU_STACK, FakeEngine, answer, call, verify

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("own_home", "no_disk_flushes")


GEMM = "test_kernels.py::test_gemm"
Capsys = pytest.CaptureFixture[str]


def tree(root: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in root.rglob("*")}


def checks_of(fake_engine: FakeEngine) -> int:
    """How many checks the last run reported."""
    folder = vars(fake_engine.runs[-1].beside)["folder"]
    return len(json.loads((folder / "result.json").read_text())["checks"])


def test_one_command_ends_with_a_table_and_the_next_command_to_type(
    fake_engine: FakeEngine,
    capsys: Capsys,
) -> None:
    done = call(capsys, "images")
    assert done.code == 0
    table = done.out.splitlines()
    assert table[0].split() == ["stack", "state", "passed/failed/skipped", "digest", "size", "time"]
    assert table[1].split()[:3] == [CPU_STACK, "certified", f"{checks_of(fake_engine)}/0/0"]
    assert f"next: stackcheck verify oci:dist:{CPU_STACK}" in done.out
    assert f"stackcheck run oci:dist:{CPU_STACK} --" in done.out
    assert verify(capsys).code == 0


def test_the_json_of_images_has_every_stack_and_progress_stays_on_stderr(
    fake_engine: FakeEngine,  # noqa: ARG001
    capsys: Capsys,
) -> None:
    done = call(capsys, "images", "cpu-*", AMD_STACK, "--anyway", "--json")
    rows = {row["id"]: row for row in json.loads(done.out)}
    assert done.code == 6
    assert (rows[CPU_STACK]["state"], rows[CPU_STACK]["verdict"]) == ("certified", "PASSED")
    assert (rows[AMD_STACK]["state"], rows[AMD_STACK]["verdict"]) == ("failed", "FAILED")
    assert rows[AMD_STACK]["reference"] is None
    assert CPU_STACK in done.err


def test_a_selector_that_matches_nothing_is_exit_3(fake_engine: FakeEngine, capsys: Capsys) -> None:
    done = call(capsys, "images", "nothing*")
    assert done.code == 3
    assert "nothing*" in done.err
    assert fake_engine.builds == []


def test_a_host_that_no_stack_is_for_is_exit_3(
    fake_engine: FakeEngine,
    small_checkout: Path,
    capsys: Capsys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stackcheck.matrix.resolve.load_stacks", lambda *_a: ())
    done = call(capsys, "images", "--root", small_checkout)
    assert done.code == 3
    assert "no stack of the matrix runs on this host (cpu)" in done.err
    assert fake_engine.builds == []


@pytest.mark.parametrize("verb", ["images", "build", "certify", "test"])
def test_a_dry_run_changes_nothing(
    verb: str,
    fake_engine: FakeEngine,
    tmp_path: Path,
    capsys: Capsys,
) -> None:
    before = tree(tmp_path)
    done = call(capsys, verb, CPU_STACK, "--dry-run")
    assert done.code == 0
    assert done.out.startswith(f"{CPU_STACK}: ")
    assert tree(tmp_path) == before
    assert (fake_engine.builds, fake_engine.runs) == ([], [])


def test_a_failed_check_is_exit_6_with_its_reason_and_no_tag(
    fake_engine: FakeEngine,
    small_checkout: Path,
    capsys: Capsys,
) -> None:
    fake_engine.answer = answer((GEMM, "failed"))
    done = call(capsys, "images")
    assert done.code == 6
    assert f"{GEMM} failed: because" in done.out
    assert "nothing is published" in done.out
    assert not (small_checkout / "dist").exists()
    assert verify(capsys).code == 7


def test_an_unfit_machine_is_exit_9(fake_engine: FakeEngine, small_checkout: Path, capsys: Capsys) -> None:
    fake_engine.answer = answer((GEMM, "invalid"))
    assert call(capsys, "images").code == 9
    assert call(capsys, "certify", CPU_STACK, "--force").code == 9
    assert not (small_checkout / "dist").exists()
    assert not (small_checkout / "build" / CPU_STACK / "statements").exists()


@pytest.mark.parametrize("verb", ["images", "test", "certify"])
def test_a_machine_that_the_stack_does_not_name_is_exit_9_with_both_and_the_way_on(
    fake_engine: FakeEngine,
    small_checkout: Path,
    capsys: Capsys,
    verb: str,
) -> None:
    path = small_checkout / "matrix.yaml"
    path.write_text(path.read_text().replace("{device: CPU, count: 1}", "{device: CPU, count: 2}"))
    done = call(capsys, verb, CPU_STACK, *(["--anyway"] if verb == "images" else []))
    said = done.out + done.err
    assert done.code == 9
    assert "the machine has CPU x1, and the stack names CPU x2" in said
    assert "next: run the same command on such a machine, or name this one under tested_on" in said
    assert "stackcheck publish" not in said
    assert not (small_checkout / "build" / CPU_STACK / "statements").exists()
    assert len(fake_engine.runs) == 1


def test_an_amd_stack_on_a_host_without_one_is_exit_6_and_says_so(
    fake_engine: FakeEngine,  # noqa: ARG001
    small_checkout: Path,
    capsys: Capsys,
) -> None:
    done = call(capsys, "images", AMD_STACK, "--anyway")
    assert done.code == 6
    assert "vendor amd was named and no AMD device is visible" in done.out
    assert not (small_checkout / "dist").exists()


def test_what_is_not_locked_is_exit_5_and_the_other_stack_is_published(
    fake_engine: FakeEngine,  # noqa: ARG001
    capsys: Capsys,
) -> None:
    done = call(capsys, "images", "rocm7.14.1-*", "cpu-*")
    assert done.code == 5
    assert "got: not locked: " in done.out
    assert verify(capsys).code == 0


def test_the_steps_one_by_one_lead_to_the_same_certificate(fake_engine: FakeEngine, capsys: Capsys) -> None:
    assert call(capsys, "publish", CPU_STACK).code == 2  # nothing is built
    assert call(capsys, "build", CPU_STACK).code == 0
    done = call(capsys, "publish", CPU_STACK)
    assert done.code == 2
    assert f"stackcheck certify {CPU_STACK}" in done.err
    assert call(capsys, "test", CPU_STACK).code == 0
    done = call(capsys, "certify", CPU_STACK)
    assert done.code == 0
    assert f"stackcheck publish {CPU_STACK}" in done.out
    done = call(capsys, "publish", CPU_STACK, "--dry-run")
    assert "with 4 statements" in done.out
    assert verify(capsys).code == 7
    assert call(capsys, "publish", CPU_STACK).code == 0
    assert verify(capsys).code == 0
    assert (len(fake_engine.builds), len(fake_engine.runs)) == (1, 1)


def test_a_test_signs_nothing_and_always_runs(
    fake_engine: FakeEngine, small_checkout: Path, capsys: Capsys
) -> None:
    for _ in range(2):
        done = call(capsys, "test", CPU_STACK)
        assert done.code == 0
        assert f"stackcheck certify {CPU_STACK}" in done.out
    assert len(fake_engine.runs) == 2
    assert not (small_checkout / "build" / CPU_STACK / "statements").exists()


def test_a_failed_test_does_not_ask_for_a_certificate(fake_engine: FakeEngine, capsys: Capsys) -> None:
    fake_engine.answer = answer((GEMM, "failed"))
    done = call(capsys, "test", CPU_STACK)
    assert done.code == 6
    assert "stackcheck certify" not in done.out
    assert f"{GEMM} failed: because" in done.err


def test_a_failed_verdict_is_signed_by_certify_and_refused_by_publish(
    fake_engine: FakeEngine,
    small_checkout: Path,
    capsys: Capsys,
) -> None:
    fake_engine.answer = answer((GEMM, "failed"))
    done = call(capsys, "certify", CPU_STACK)
    assert done.code == 6
    assert "stackcheck publish" not in done.out
    done = call(capsys, "publish", CPU_STACK)
    assert done.code == 8
    assert "FAILED" in done.err
    assert not (small_checkout / "dist").exists()


@pytest.mark.parametrize(("name", "code"), [("rocm*", 3), ("nothing", 3)])
def test_a_verb_for_one_stack_takes_one(
    fake_engine: FakeEngine, capsys: Capsys, name: str, code: int
) -> None:
    assert call(capsys, "test", name).code == code
    assert fake_engine.builds == []


def test_an_exported_image_is_one_tar(fake_engine: FakeEngine, small_checkout: Path, capsys: Capsys) -> None:  # noqa: ARG001
    call(capsys, "build", CPU_STACK)
    done = call(capsys, "export", "cpu-*", "--output", small_checkout / "out" / "image.tar")
    assert done.code == 0
    assert (small_checkout / "out" / "image.tar").stat().st_size > 0
    assert "docker load --input" in done.out


def test_an_engine_that_is_missing_is_exit_4_and_nothing_is_built(
    small_checkout: Path,
    capsys: Capsys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{small_checkout}/none.sock")
    done = call(capsys, "images")
    assert done.code == 4
    assert "DOCKER_HOST" in done.err
    assert not (small_checkout / "build" / CPU_STACK).exists()


def test_the_matrix_says_where_to_publish_unless_the_user_does(
    fake_engine: FakeEngine,  # noqa: ARG001
    small_checkout: Path,
    capsys: Capsys,
) -> None:
    path = small_checkout / "matrix.yaml"
    path.write_text(path.read_text().replace("publish: oci:dist", "publish: oci:elsewhere"))
    assert call(capsys, "images").code == 0
    assert verify(capsys, f"oci:elsewhere:{CPU_STACK}").code == 0
    assert call(capsys, "publish", CPU_STACK, "--to", "oci:third").code == 0
    assert verify(capsys, f"oci:third:{CPU_STACK}").code == 0
    assert not (small_checkout / "dist").exists()
