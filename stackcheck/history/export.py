"""Write a history as a table for other tools. In: a query. Out: Parquet or CSV, one row a metric or a run.

Rows are written a few days at a time, so that a year of a fleet does not have to fit into memory.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime as dt
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stackcheck.errors import ConfigurationError
from stackcheck.files.atomic import TEMPORARY, UNUSABLE, file_error
from stackcheck.history.runs import Point, Query, Run

if TYPE_CHECKING:
    from stackcheck.history.history import History

Table = Literal["metrics", "runs"]
WINDOW = dt.timedelta(days=7)
_POINT_FIELDS = tuple(name for name in Point.__dataclass_fields__ if name != "record")
_RUN_FIELDS = tuple(Run.__dataclass_fields__)
FIELDS: dict[Table, tuple[str, ...]] = {"metrics": (*_RUN_FIELDS, *_POINT_FIELDS), "runs": _RUN_FIELDS}
_LISTS = {"reasons": "string", "failed": "string", "waived": "string", "repeats": "double"}
_TYPES = {
    "started": "time",
    "finished": "time",
    "device_count": "integer",
    "simulated": "boolean",
    **dict.fromkeys(("value", "bound", "ceiling"), "double"),
}


Row = tuple[Any, ...]  # values in the order of the table's fields
Write = Callable[[list[Row]], object]


def export(history: History, query: Query, path: Path, table: Table = "metrics") -> int:
    """Write what a query asks for, the oldest first, and return the number of rows.

    Raises:
        ConfigurationError: The file's name ends neither in .parquet nor in .csv, or pyarrow is not installed.
        FileError: The file cannot be written.
    """
    written = 0
    with _whole(path) as temporary, _writer(path, temporary, FIELDS[table]) as write:
        for rows in _windows(history, query, table):
            write(rows)
            written += len(rows)
    return written


def _windows(history: History, query: Query, table: Table) -> Iterator[list[Row]]:
    """The rows of one window of time after the other."""
    ordered = dataclasses.replace(query, newest_first=False, limit=None)
    edge = dataclasses.replace(ordered, check=None, metric=None, limit=1)
    first = history.runs(edge)
    last = history.latest(edge)
    start = first[0].started if first else None
    while last and start and start <= last.started:
        end = start + WINDOW
        until = min(end, query.until) if query.until else end
        window = dataclasses.replace(ordered, since=start, until=until)
        if table == "runs":
            yield [_values(run, _RUN_FIELDS) for run in history.runs(window)]
        else:
            found = history.points(window)
            yield [(*_values(run, _RUN_FIELDS), *_values(point, _POINT_FIELDS)) for run, point in found]
        start = end


def _values(source: Run | Point, fields: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(getattr(source, name) for name in fields)


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place when all is written."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        if error.errno not in UNUSABLE:
            raise
        raise file_error(error, path) from error


FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


@contextmanager
def _writer(path: Path, temporary: Path, fields: tuple[str, ...]) -> Iterator[Write]:
    """A function that writes rows; in CSV, lists become texts with `; ` between their parts."""
    if path.suffix == ".csv":
        with temporary.open("w", newline="", encoding="utf-8") as file:
            lines = csv.writer(file)
            lines.writerow(fields)
            yield lambda rows: lines.writerows([_text(value) for value in row] for row in rows)
    elif path.suffix == ".parquet":
        with _parquet(temporary, fields) as write:
            yield write
    else:
        raise ConfigurationError(
            "cannot tell the format of the export",
            where="--to",
            got=path.name,
            expected="a name that ends in .parquet or .csv",
        )


def _text(value: object) -> object:
    if isinstance(value, tuple):
        value = "; ".join(map(str, value))
    # A spreadsheet would compute such a cell; after an apostrophe it is a text (OWASP, "CSV injection").
    if isinstance(value, str) and value[:1] in FORMULA:
        return f"'{value}"
    return value.isoformat() if isinstance(value, dt.datetime) else value


@contextmanager
def _parquet(temporary: Path, fields: tuple[str, ...]) -> Iterator[Write]:
    """A function that writes a row group for each call."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigurationError(
            "Parquet needs pyarrow",
            where="--to",
            got=str(error),
            expected="the extra `parquet` of stackcheck",
            next_step="pip install 'stackcheck[parquet]', or write a .csv",
        ) from error
    kinds = {
        "time": pa.timestamp("us", tz="UTC"),
        "integer": pa.int64(),
        "boolean": pa.bool_(),
        "double": pa.float64(),
        "string": pa.string(),
    }
    lists = {name: pa.list_(kinds[kind]) for name, kind in _LISTS.items()}
    schema = pa.schema([(name, lists.get(name) or kinds[_TYPES.get(name, "string")]) for name in fields])
    with parquet.ParquetWriter(temporary, schema, compression="zstd") as writer:

        def write(rows: list[Row]) -> None:
            columns = zip(*rows, strict=True) if rows else [[] for _ in schema]
            arrays = [pa.array(list(found), field.type) for found, field in zip(columns, schema, strict=True)]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))

        yield write
