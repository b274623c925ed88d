"""The flow keeps every judged run; results of other machines are imported, damaged ones refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from small_checkout import CPU_STACK, FakeEngine, answer, call
from stackcheck.history.history import open_history
from stackcheck.history.runs import Query

pytestmark = pytest.mark.usefixtures("own_home", "no_disk_flushes")

GEMM = "test_kernels.py::test_gemm"
RESULT = f"build/{CPU_STACK}/run/result.json"
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


@pytest.fixture
def ran(small_checkout: Path, fake_engine: FakeEngine, capsys: Capsys) -> Path:
    """A checkout with one run, and an empty history."""
    assert fake_engine is not None
    assert call(capsys, "test", CPU_STACK).code == 0
    for path in sorted((small_checkout / "build" / "history").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    return small_checkout


def imported(capsys: Capsys, *arguments: str) -> tuple[int, dict[str, Any], str]:
    done = call(capsys, "history", "import", *arguments, "--json")
    return done.code, {item["file"]: item for item in json.loads(done.out)}, done.err


def test_a_result_of_another_machine_is_judged_here(ran: Path, capsys: Capsys) -> None:
    code, found, _ = imported(capsys, RESULT)
    assert (code, found[RESULT]["fate"], found[RESULT]["judged"]) == (0, "kept", "here")
    assert [run.status for run in kept(ran)] == ["PASSED"]
    assert imported(capsys, RESULT)[1][RESULT]["fate"] == "there already"


def test_its_own_verdict_is_taken_when_asked(ran: Path, capsys: Capsys) -> None:
    verdict = ran / "build" / CPU_STACK / "verdict.json"
    text = json.loads(verdict.read_text()) | {"status": "UNFIT", "reasons": ["hot"]}
    verdict.write_text(json.dumps(text))
    code, found, _ = imported(capsys, RESULT, "--own-verdicts")
    assert (code, found[RESULT]["judged"], found[RESULT]["status"]) == (0, "its own", "UNFIT")
    assert kept(ran)[0].reasons == ("hot",)


@pytest.mark.parametrize("change", ["about another result", "cut off", "no verdict"])
def test_a_verdict_that_is_not_about_the_result_is_refused(ran: Path, capsys: Capsys, change: str) -> None:
    verdict = ran / "build" / CPU_STACK / "verdict.json"
    text = verdict.read_text()
    verdict.write_text(
        {
            "about another result": json.dumps(json.loads(text) | {"passed": []}),
            "cut off": text[:-20],
            "no verdict": "{}",
        }[change]
    )
    code, found, error = imported(capsys, RESULT, "--own-verdicts")
    assert (code, found[RESULT]["fate"]) == (10, "refused")
    assert "the verdict beside the result is not about it" in error
    assert kept(ran) == []


def test_damaged_results_are_refused_and_the_others_kept(ran: Path, capsys: Capsys, tmp_path: Path) -> None:
    folder = tmp_path / "machines"
    good = (ran / RESULT).read_text()
    for name, text in {
        "a/result.json": good,
        "b/result.json": good[:-50],
        "c/other.json": '{"some": "thing"}',
        "d/result.json": json.dumps(json.loads(good) | {"schema": 2}),
        "e/named.json": good.replace(json.loads(good)["run_id"], "f" * 32),
    }.items():
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(text)
    code, found, error = imported(capsys, str(folder))
    assert code == 10
    assert {path[len(str(folder)) + 1] + " " + item["fate"] for path, item in found.items()} == {
        "a kept",
        "b refused",
        "c no result",
        "d refused",
        "e kept",
    }
    assert "2 of 5 files refused" in error
    assert f"{folder}/b/result.json" in error
    assert len(kept(ran)) == 2


def test_two_results_of_one_run_are_refused(ran: Path, capsys: Capsys) -> None:
    assert imported(capsys, RESULT)[0] == 0
    path = ran / RESULT
    path.write_text(path.read_text().replace('"seconds": 0.5', '"seconds": 0.6', 1))
    code, found, error = imported(capsys, RESULT)
    assert (code, found[RESULT]["fate"]) == (10, "refused")
    assert "the history has another result of this run" in error


def test_a_folder_without_results_and_a_missing_path_are_errors(
    ran: Path, capsys: Capsys, tmp_path: Path
) -> None:
    assert ran
    (tmp_path / "empty").mkdir()
    assert call(capsys, "history", "import", str(tmp_path / "empty")).code == 3
    assert call(capsys, "history", "import", str(tmp_path / "nothing")).code == 2
