"""The verbs that make images: their exit codes, what they print, and what they leave alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from small_checkout import AMD_STACK, CPU_STACK, FakeEngine, call, verify

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


@pytest.mark.usefixtures("fake_engine")
def test_the_json_of_images_has_every_stack_and_progress_stays_on_stderr(capsys: Capsys) -> None:
    done = call(capsys, "images", "cpu-*", AMD_STACK, "--anyway", "--json")
    rows = {row["id"]: row for row in json.loads(done.out)}
    assert done.code == 6
    assert (rows[CPU_STACK]["state"], rows[CPU_STACK]["verdict"]) == ("certified", "PASSED")
    assert (rows[AMD_STACK]["state"], rows[AMD_STACK]["verdict"]) == ("failed", "FAILED")
    assert rows[AMD_STACK]["reference"] is None
    assert CPU_STACK in done.err


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


@pytest.mark.usefixtures("fake_engine")
def test_the_matrix_says_where_to_publish_unless_the_user_does(small_checkout: Path, capsys: Capsys) -> None:
    path = small_checkout / "matrix.yaml"
    path.write_text(path.read_text().replace("publish: oci:dist", "publish: oci:elsewhere"))
    assert call(capsys, "images").code == 0
    assert verify(capsys, f"oci:elsewhere:{CPU_STACK}").code == 0
    assert call(capsys, "publish", CPU_STACK, "--to", "oci:third").code == 0
    assert verify(capsys, f"oci:third:{CPU_STACK}").code == 0
    assert not (small_checkout / "dist").exists()
