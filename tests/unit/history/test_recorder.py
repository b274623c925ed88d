"""The flow keeps every judged run; results of other machines are imported, damaged ones refused."""

from pathlib import Path
from typing import Any

import pytest

from small_checkout import CPU_STACK, FakeEngine, answer, call
from stackcheck.history.history import open_history
from stackcheck.history.runs import Query

pytestmark = pytest.mark.usefixtures("own_home", "no_disk_flushes")

GEMM = "test_kernels.py::test_gemm"
Capsys = pytest.CaptureFixture[str]


def kept(root: Path) -> list[Any]:
    return open_history(root).runs(Query())


def test_every_judged_run_is_kept(small_checkout: Path, fake_engine: FakeEngine, capsys: Capsys) -> None:
    assert call(capsys, "test", CPU_STACK).code == 0
    fake_engine.answer = answer((GEMM, "failed"))
    assert call(capsys, "certify", CPU_STACK, "--force").code == 6
    runs = kept(small_checkout)
    assert [(run.stack, run.status, run.failed) for run in runs] == [
        (CPU_STACK, "FAILED", (GEMM,)),
        (CPU_STACK, "PASSED", ()),
    ]
    assert all(run.image and run.image.startswith("sha256:") for run in runs)


@pytest.mark.parametrize("outcome", ["passed", "failed"])
def test_a_history_that_cannot_be_written_changes_no_verdict(
    small_checkout: Path, fake_engine: FakeEngine, capsys: Capsys, outcome: str
) -> None:
    fake_engine.answer = answer((GEMM, outcome))
    (small_checkout / "build").mkdir()
    (small_checkout / "build" / "history").write_text("in the way")
    done = call(capsys, "test", CPU_STACK)
    assert done.code == {"passed": 0, "failed": 6}[outcome]
    assert "WARNING: this run is not in the history" in done.err
    assert "stackcheck history import" in done.err


def test_a_history_elsewhere_is_named_in_the_matrix(
    small_checkout: Path, fake_engine: FakeEngine, capsys: Capsys, tmp_path: Path
) -> None:
    assert fake_engine is not None
    matrix = small_checkout / "matrix.yaml"
    place = f"history: {{records: {tmp_path}/far, index: 'sqlite:///{tmp_path}/far.sqlite'}}\n"
    matrix.write_text(matrix.read_text() + place)
    assert call(capsys, "test", CPU_STACK).code == 0
    assert len(list((tmp_path / "far").rglob("*.json.gz"))) == 1
    assert not (small_checkout / "build" / "history").exists()
