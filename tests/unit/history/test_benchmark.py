"""The index is asked by its keys, and benchmarks/history.py measures what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kept_runs import PASSED, body
from stackcheck.history import index
from stackcheck.history.history import History
from stackcheck.history.runs import Query
from stackcheck.history.schema import engine

if TYPE_CHECKING:
    import sqlalchemy as sa

ROOT = Path(__file__).parents[3]


def plan(history: History, statement: sa.Select[tuple[object, ...]]) -> str:
    """How SQLite would answer."""
    made = engine(history.index.url)
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
    found = plan(filled(tmp_path), index._points(Query(limit=5), [1]))
    assert "SEARCH points USING PRIMARY KEY (series=?)" in found
    assert "TEMP B-TREE" not in found


def test_several_metrics_are_looked_up_run_by_run(tmp_path: Path) -> None:
    found = plan(filled(tmp_path), index._points(Query(limit=5, driver="580*"), [1, 2]))
    assert "SCAN runs USING INDEX ix_runs_started" in found
    assert "SEARCH points USING PRIMARY KEY (series=? AND started=? AND run=?)" in found
    assert "TEMP B-TREE FOR ORDER BY" not in found


def test_the_benchmark_prints_its_table(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "history.py", "--runs", "30", "--folder", tmp_path / "made"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"rebuild of 30 runs, 48 metrics each +\d+\.\d s", done.stdout)
    assert re.search(r"append one more run .* 30 old records untouched", done.stdout)
    assert re.search(
        r"a metric of all runs, newest +\d+ ms +\d+ ms of processor time, [1-9]\d* rows", done.stdout
    )
    assert len(list((tmp_path / "made" / "records").rglob("*.gz"))) == 31


def test_an_index_of_an_earlier_version_is_brought_up_to_date(tmp_path: Path) -> None:
    history = filled(tmp_path)
    made = engine(history.index.url)
    with made.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE points DROP COLUMN chips")
    again = History(str(tmp_path / "records"), history.index.url)
    assert len(again.points(Query())) == 40
    again.append(body(77), PASSED, None, source="test")
    assert len(again.points(Query())) == 42
