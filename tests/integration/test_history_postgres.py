"""The index of a history in a real PostgreSQL, with two processes that write at once."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

import waits
from kept_runs import GEMM, PASSED, body, failed
from stackcheck.history import schema
from stackcheck.history.history import History, RecordIndex
from stackcheck.history.runs import HistoryError, Query

pytestmark = pytest.mark.integration

WRITER = """
import sys
from kept_runs import PASSED, body
from stackcheck.history.history import History
records, index, first, last = sys.argv[1:]
for number in range(int(first), int(last)):
    History(records, index).append(body(number), PASSED, None, source=first)
"""


@pytest.fixture
def history(postgres: str, tmp_path) -> Iterator[History]:
    """An empty history, with its index on that server."""
    yield History(str(tmp_path / "records"), postgres)
    with psycopg.connect(postgres.replace("+psycopg", "")) as connection:
        connection.execute("DROP TABLE IF EXISTS runs, series, points, notable")


def test_it_answers_as_sqlite_does(history, tmp_path):
    for number in range(6):
        history.append(body(number), failed(GEMM) if number == 3 else PASSED, None, source="test")
    history.append(body(3), PASSED | {"warned": [GEMM]}, None, source="test", judged=None)
    sqlite = History(str(tmp_path / "records"), f"sqlite:///{tmp_path / 'index.sqlite'}")
    assert sqlite.rebuild() == []
    questions = (
        Query(),
        Query(stack="CUDA*", driver="580.95.0?", limit=3),
        Query(check=GEMM),
        Query(metric="gemm_tflops[m=8192]", check="*[bf16]", newest_first=False, limit=4),
        Query(stack="%"),
    )
    for _ in range(2):
        assert [history.runs(query) for query in questions] == [sqlite.runs(query) for query in questions]
        mine, theirs = (
            [sorted(each.points(query), key=str) for query in (questions[0], questions[2])]
            for each in (history, sqlite)
        )
        assert mine == theirs
        assert len(history.points(questions[3])) == 4
        run = history.runs(Query())[0]
        assert history.find(run.record[:20]) == [run]
        assert history.rebuild() == []
    history.append(body(9), PASSED, None, source="test")  # numbers go on after a rebuild
    assert len(history.runs(Query())) == 7


def test_two_writers_at_once_lose_nothing(history, postgres, tmp_path):
    """Both also append runs 10 to 19, and the index is rebuilt under them."""
    shared = Path(__file__).parents[1] / "unit" / "shared"
    environment = os.environ | {"PYTHONPATH": str(shared)}
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / "records"), postgres, str(first), str(last)],
            env=environment,
        )
        for first, last in ((0, 20), (10, 30))
    ]

    def both_ended() -> bool:
        assert history.rebuild() == []
        return all(writer.poll() is not None for writer in writers)

    waits.until(both_ended, "the end of both writers")
    assert [writer.wait(timeout=waits.LIMIT_S) for writer in writers] == [0, 0]
    assert sorted(int(run.run_id, 16) for run in history.runs(Query())) == list(range(30))
    assert len(history.points(Query())) == 60
    # A run that both wrote has two records, which differ in where it came from, and is one run.
    assert 30 <= len(list(history.records)) <= 40


def test_the_server_compiles_no_question(postgres):
    with schema.engine(postgres).connect() as connection:
        connection.rollback()
        assert connection.exec_driver_sql("SHOW jit").scalar_one() == "off"


def test_a_server_that_does_not_answer_is_named(tmp_path):
    with pytest.raises(HistoryError, match="the index of the history does not answer"):
        RecordIndex(f"postgresql+psycopg://postgres@/postgres?host={tmp_path}")
