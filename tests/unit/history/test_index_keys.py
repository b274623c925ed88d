"""The index is asked by its keys: docs/guides/history.md has what that takes."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa

from kept_runs import PASSED, body
from stackcheck.history import history
from stackcheck.history.history import History
from stackcheck.history.runs import Query
from stackcheck.history.schema import engine


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


def test_one_metric_is_walked_in_its_order(tmp_path: Path) -> None:
    found = plan(filled(tmp_path), history._points(Query(limit=5), [1]))
    assert "SEARCH points USING PRIMARY KEY (series=?)" in found
    assert "TEMP B-TREE" not in found


def test_several_metrics_are_looked_up_run_by_run(tmp_path: Path) -> None:
    found = plan(filled(tmp_path), history._points(Query(limit=5, driver="580*"), [1, 2]))
    assert "SCAN runs USING INDEX ix_runs_started" in found
    assert "SEARCH points USING PRIMARY KEY (series=? AND started=? AND run=?)" in found
    assert "TEMP B-TREE FOR ORDER BY" not in found
