"""`stackcheck history`: what it lists, and the tables that it writes."""

import csv
import datetime as dt
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kept_runs import GEMM, PASSED, body, failed
from small_checkout import call
from stackcheck.cli import output, times
from stackcheck.cli.history import sparkline
from stackcheck.history import export
from stackcheck.history.history import open_history

pytestmark = pytest.mark.usefixtures("own_home", "no_disk_flushes")

Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def kept(small_checkout: Path) -> Path:
    """A history of ten nights; the fourth one failed."""
    history = open_history(small_checkout)
    for number in range(10):
        history.append(body(number), failed(GEMM) if number == 3 else PASSED, None, source="test")
    return small_checkout


def test_yesterday_begins_at_midnight_utc() -> None:
    now = dt.datetime.now(dt.UTC)
    found = times.since("yesterday", "--since")
    assert (found.hour, found.minute, found.second) == (0, 0, 0)
    assert dt.timedelta(days=1) <= now - found < dt.timedelta(days=2, seconds=5)
    assert times.since("today", "--since") - found == dt.timedelta(days=1)


@given(
    st.lists(st.tuples(*[st.text("abc é…", max_size=80)] * 4), max_size=5),
    st.integers(min_value=4 * output.LEAST + 3 * output.GAP, max_value=200),
)
def test_a_table_in_a_terminal_is_never_wider_than_it(rows: list[tuple[str, ...]], width: int) -> None:
    names = ("A", "B", "C", "KEPT")
    for row, cut in zip(rows, output.fitted(names, rows, width), strict=True):
        for cell, short in zip(row, cut, strict=True):
            assert short == cell or (short[-1] == "…" and cell.startswith(short[:-1]))
    made = output.fitted(names, rows, width)
    widths = [max(len(row[i]) for row in (names, *made)) for i in range(4)]
    assert sum(widths) + 3 * output.GAP <= width
    assert [row[3] for row in output.fitted(names, rows, width, keep="KEPT")] == [row[3] for row in rows]


def test_a_sparkline_has_one_character_a_value_up_to_its_width() -> None:
    assert sparkline([1, 2, 3, 4, 5, 6, 7, 8]) == "▁▂▃▄▅▆▇█"
    assert sparkline([5.0, 5.0]) == "▅▅"
    assert sparkline([]) == ""
    assert len(sparkline([float(i) for i in range(1000)], 40)) == 40


@pytest.mark.parametrize(("table", "rows"), [("metrics", 20), ("runs", 10)])
@pytest.mark.usefixtures("kept")
def test_the_same_rows_in_csv_and_parquet(capsys: Capsys, tmp_path: Path, table: str, rows: int) -> None:
    from pyarrow import parquet

    for name in ("t.csv", "t.parquet"):
        assert call(capsys, "history", "export", "--to", tmp_path / name, "--table", table).code == 0
    with (tmp_path / "t.csv").open() as file:
        lines = list(csv.DictReader(file))
    columns = parquet.read_table(tmp_path / "t.parquet").to_pylist()
    assert (len(lines), len(columns)) == (rows, rows)
    for line, row in zip(lines, columns, strict=True):
        assert line["record"] == row["record"]
        assert line["started"] == row["started"].isoformat()
        assert line["failed"] == "; ".join(row["failed"])
        if table == "metrics":
            assert float(line["value"]) == row["value"]
            assert [float(text) for text in line["repeats"].split("; ")] == row["repeats"]


@pytest.mark.parametrize("text", ['=HYPERLINK("x")', "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", ("=1", "b")])
def test_no_text_of_a_csv_file_is_a_formula_of_a_spreadsheet(text: object) -> None:
    """Numbers stay numbers, also those below zero."""
    assert str(export._text(text)).startswith("'")
    assert export._text(-1.5) == -1.5
    assert export._text("plain=1") == "plain=1"


@pytest.mark.usefixtures("kept")
def test_an_export_that_fails_leaves_no_half_file(capsys: Capsys, tmp_path: Path) -> None:
    (tmp_path / "t.csv").mkdir()
    assert call(capsys, "history", "export", "--to", tmp_path / "t.csv").code == 10
    assert [path.name for path in tmp_path.glob("*t.csv*")] == ["t.csv"]
