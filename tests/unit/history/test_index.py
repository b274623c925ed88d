"""The index answers as the records say, after appends and after a rebuild."""

import datetime as dt
import gc
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from kept_runs import GEMM, PASSED, START, body, failed, gemm
from result_files import check
from stackcheck.history import history as history_module
from stackcheck.history import index_loader
from stackcheck.history.history import History, RecordIndex
from stackcheck.history.runs import HistoryError, Query, Run
from stackcheck.history.schema import engine

LATER = dt.datetime(2026, 12, 1, tzinfo=dt.UTC)


@pytest.fixture
def history(tmp_path) -> History:
    return History(str(tmp_path / "records"), f"sqlite:///{tmp_path / 'index.sqlite'}")


def append(history: History, number: int, verdict: dict[str, Any] = PASSED, **changes: Any) -> str:
    return history.append(body(number, **changes), verdict, None, source="test")


def days(runs: list[Run]) -> list[int]:
    return [(run.started - START).days for run in runs]


def test_runs_come_newest_first_or_oldest_first(history):
    for number in (1, 0, 2):
        append(history, number)
    assert days(history.runs(Query())) == [2, 1, 0]
    assert days(history.runs(Query(newest_first=False, limit=2))) == [0, 1]
    newest = history.latest(Query())
    assert newest is not None
    assert (newest.driver, newest.device_model, newest.device_count) == ("580.95.05", "H200", 1)
    assert (newest.status, newest.tier, newest.vendor, newest.simulated) == (
        "PASSED",
        "smoke",
        "nvidia",
        False,
    )


def test_every_filter_leaves_out_what_it_does_not_name(history):
    append(history, 0)
    append(history, 1, failed(GEMM))
    append(history, 2, model="MI300X", stack_id="rocm7.2.1-torch2.13.0-fa2.8.3-py3.12-ubuntu24.04")
    expected = {
        Query(stack="cuda*"): [1, 0],
        Query(stack="CUDA13.0-torch2.11.0-py3.12-ubuntu24.0?"): [1, 0],
        Query(device_model="mi300x"): [2],
        Query(driver="580.*"): [2, 1, 0],
        Query(driver="570.*"): [],
        Query(status="FAILED"): [1],
        Query(check=GEMM): [1],
        Query(check="*gemm*"): [1],
        Query(check="*nothing*"): [],
        Query(metric="gemm_tflops*"): [2, 1, 0],
        Query(metric="gemm_tflops[m=8192]", check=GEMM): [2, 1, 0],
        Query(metric="copy*"): [],
        Query(since=START + dt.timedelta(days=1)): [2, 1],
        Query(until=START + dt.timedelta(days=1)): [0],
        Query(node=history.runs(Query())[0].node): [2],
    }
    assert {query: days(history.runs(query)) for query in expected} == expected


@pytest.mark.parametrize("text", ["%", "_", "\\", "'", '"; DROP TABLE runs; --'])
def test_a_pattern_is_never_read_as_sql(history, text):
    append(history, 0)
    assert history.runs(Query(stack=f"{text}*")) == []
    assert history.points(Query(metric=f"{text}*", check=text)) == []
    assert len(history.runs(Query())) == 1


def test_the_newest_verdict_on_a_result_counts(history):
    old = history.append(body(), failed(GEMM), None, source="test")
    new = history.append(body(), PASSED, None, source="test", judged=LATER)
    assert [run.record for run in history.runs(Query())] == [new]
    assert history.runs(Query(check=GEMM)) == []
    history.append(
        body(), failed("a", "b"), None, source="test", judged=START
    )  # an older one changes nothing
    assert [run.record for run in history.runs(Query())] == [new]
    assert old in list(history.records)
    assert len(history.points(Query())) == 2


def everything(history: History) -> list[Any]:
    return [
        *history.runs(Query()),
        *sorted(history.points(Query()), key=str),
        *history.runs(Query(check="*")),
    ]


@pytest.mark.parametrize("processes", [False, True])
def test_a_rebuilt_index_equals_the_one_that_grew(history, tmp_path, monkeypatch, processes):
    for number in range(12):
        append(history, number, failed(GEMM) if number % 4 == 0 else PASSED)
    history.append(body(4), PASSED, None, source="test", judged=LATER)
    grown = everything(history)
    if processes:
        monkeypatch.setattr(index_loader, "ALONE", 0)
        monkeypatch.setattr(index_loader, "CHUNK", 5)
    assert history.rebuild() == []
    assert everything(history) == grown
    append(history, 99)
    fresh = History(str(tmp_path / "records"), f"sqlite:///{tmp_path / 'fresh.sqlite'}")
    assert fresh.rebuild() == []
    assert everything(fresh) == everything(history)


def test_a_rebuild_names_damaged_records_and_keeps_the_others(history, tmp_path):
    bad, good = append(history, 0), append(history, 1)
    path = next(path for path in (tmp_path / "records").rglob("*.gz") if path.name.startswith(bad[7:]))
    path.write_bytes(b"rust")
    (damaged,) = history.rebuild()
    assert bad in str(damaged)
    assert gc.isenabled()  # which a rebuild does without
    assert [run.record for run in history.runs(Query())] == [good]


def test_a_rebuild_that_stops_leaves_the_old_index(history, monkeypatch):
    append(history, 0)

    def stop(*_arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(index_loader._Loader, "add", stop)
    with pytest.raises(KeyboardInterrupt):
        history.rebuild()
    assert len(history.runs(Query())) == 1


def test_a_run_is_found_by_the_first_digits_of_what_names_it(history):
    image = {
        "reference": "a/b:1",
        "config_digest": "sha256:" + "c" * 64,
        "manifest_digest": "sha256:" + "d" * 64,
    }
    record = append(history, 0xABC, image=image)
    for text in (record, record[7:15], f"{0xABC:032x}", "dddd", "sha256:dddd"):
        assert [run.record for run in history.find(text)] == [record]
    assert history.find("ffff") == []


def test_a_metric_that_is_no_number_has_no_point(history):
    metric = gemm(1.0) | {"value": None, "repeats": [None]}
    history.append(body(0, check(GEMM, metrics=[metric])), PASSED, None, source="test")
    assert history.points(Query()) == []


def test_a_database_that_is_none_is_named(tmp_path):
    (tmp_path / "index.sqlite").write_bytes(b"no database at all" * 100)
    with pytest.raises(HistoryError, match="does not answer") as caught:
        RecordIndex(f"sqlite:///{tmp_path / 'index.sqlite'}")
    assert "history rebuild" in str(caught.value)


@pytest.mark.parametrize("url", ["mysql://host/db", "nothing", "sqlite+nosuch:///x"])
def test_a_wrong_database_url_is_refused(url):
    with pytest.raises(HistoryError, match="cannot use the URL"):
        RecordIndex(url)


def test_a_password_is_never_shown():
    with pytest.raises(HistoryError) as caught:
        RecordIndex("mysql://user:secret@host/db")
    assert "secret" not in str(caught.value)


# The index is asked by its keys: docs/guides/history.md has what that takes.


def plan(history: History, statement: sa.Select[tuple[object, ...]]) -> str:
    """How SQLite would answer."""
    made = engine(history.url)
    with made.connect() as connection:
        text = statement.compile(made, compile_kwargs={"literal_binds": True})
        return "\n".join(row[3] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}"))


def filled(tmp_path: Path) -> History:
    history = History(str(tmp_path / "records"), f"sqlite:///{tmp_path / 'index.sqlite'}")
    for number in range(20):
        history.append(body(number), PASSED, None, source="test")
    assert history.rebuild() == []  # and the statistics that the database plans with
    return history


def test_one_metric_is_walked_in_its_order(tmp_path):
    found = plan(filled(tmp_path), history_module._points(Query(limit=5), [1]))
    assert "SEARCH points USING PRIMARY KEY (series=?)" in found
    assert "TEMP B-TREE" not in found


def test_several_metrics_are_looked_up_run_by_run(tmp_path):
    found = plan(filled(tmp_path), history_module._points(Query(limit=5, driver="580*"), [1, 2]))
    assert "SCAN runs USING INDEX ix_runs_started" in found
    assert "SEARCH points USING PRIMARY KEY (series=? AND started=? AND run=?)" in found
    assert "TEMP B-TREE FOR ORDER BY" not in found
