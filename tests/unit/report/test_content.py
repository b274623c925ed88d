"""What a report gathers from a real history: damaged records are named, and the asked machine is shown."""

import datetime as dt
import json
from pathlib import Path
from typing import Any

import pytest

import result_files
from report_content import MACHINE
from stackcheck.history.history import History
from stackcheck.report import content, page
from stackcheck.report.standing import StandingMachine

NOW = dt.datetime(2026, 1, 2, 12, tzinfo=dt.UTC)
VERDICT = {"status": "FAILED", "reasons": ["it failed"], "failed": ["test_a.py::test_one"], "warned": []}


@pytest.fixture
def history(tmp_path: Path) -> History:
    """Two nights of one stack on a processor."""
    found = History(str(tmp_path / "records"), f"sqlite:///{tmp_path / 'index.sqlite'}")
    for day in (1, 2):
        check = result_files.check(
            "test_a.py::test_one", "failed", reason="dq is nan", metrics=[result_files.metric()]
        )
        times = {"started": f"2026-01-0{day}T03:00:00Z", "finished": f"2026-01-0{day}T03:05:00Z"}
        text = json.dumps(result_files.result(check, run_id=f"{day}" * 8, **times)).encode()
        found.append(text, VERDICT, None, source="test", simulated=day == 1)
    return found


def gathered(history: History, tmp_path: Path, **changes: Any) -> content.Content:
    options: dict[str, Any] = {"root": tmp_path, "now": NOW, "since": None, "report": lambda _line: None}
    return content.gather(history, content.Offered(target="oci:dist"), **(options | changes))


def test_a_report_has_the_runs_figures_and_failures_of_its_history(history: History, tmp_path: Path) -> None:
    found = gathered(history, tmp_path)
    assert [run.simulated for run in found.runs] == [True, False]
    assert found.groups[0].series[0].values == (10.0, 10.0)
    (trouble,) = found.night.troubles
    assert found.details[trouble.run.record].failures[0].reason == ("dq is nan",)
    assert "dq is nan" in page.render(found).decode()


def test_older_runs_are_left_out(history: History, tmp_path: Path) -> None:
    assert len(gathered(history, tmp_path, since=NOW - dt.timedelta(days=1)).runs) == 1


def test_a_damaged_record_is_named_and_hides_nothing_else(history: History, tmp_path: Path) -> None:
    newest = gathered(history, tmp_path).runs[-1].record
    (path,) = (tmp_path / "records").rglob(f"{newest.removeprefix('sha256:')}*")
    path.write_bytes(b"damaged")
    lines: list[str] = []
    found = gathered(history, tmp_path, report=lines.append)
    assert len(found.runs) == 2
    assert any(newest in problem for problem in found.problems)
    assert any(newest in line for line in lines)
    text = page.render(found).decode()
    assert "Not read: " in text
    assert "it failed" in text  # the index still says why


def test_an_unknown_host_is_not_shown_first_but_an_asked_machine_is(history: History, tmp_path: Path) -> None:
    processor = StandingMachine(device_model="CPU", driver="")
    assert gathered(history, tmp_path, here=MACHINE).here == processor
    asked = gathered(history, tmp_path, asked=MACHINE)
    assert asked.here == MACHINE
    assert "<strong>No image</strong> is certified for <b>MI300X</b>" in page.render(asked).decode()


def test_windows_of_points_lose_and_double_nothing(
    history: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "WINDOW", 1)
    assert gathered(history, tmp_path).groups[0].series[0].values == (10.0, 10.0)
