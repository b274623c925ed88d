"""The tables of the index, and the databases that hold them. In: a database URL. Out: an engine; rows.

`runs` has a row for each result, `series` one for each metric of each check, `points` the values, `notable`
the checks that failed. `points` is ordered by series and time, which is how it is asked.
"""

from __future__ import annotations

import datetime as dt
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError
from sqlalchemy.schema import CreateIndex, CreateTable, DropTable

from stackcheck.history.runs import Point, Run

if TYPE_CHECKING:
    from stackcheck.history.records import Kept

WAIT_S = 600  # for another writer of the same SQLite file; a rebuild is the longest

TABLES = sa.MetaData()
RUNS = sa.Table(
    "runs",
    TABLES,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("result", sa.Text, nullable=False, unique=True),
    sa.Column("judged", sa.BigInteger, nullable=False),
    sa.Column("record", sa.Text, nullable=False, index=True),
    sa.Column("run_id", sa.Text, nullable=False, index=True),
    sa.Column("started", sa.BigInteger, nullable=False, index=True),
    sa.Column("finished", sa.BigInteger, nullable=False),
    sa.Column("tier", sa.Text, nullable=False),
    sa.Column("stack", sa.Text, nullable=False),
    sa.Column("image", sa.Text, index=True),
    sa.Column("vendor", sa.Text, nullable=False),
    sa.Column("device_model", sa.Text, nullable=False),
    sa.Column("device_count", sa.Integer, nullable=False),
    sa.Column("driver", sa.Text),
    sa.Column("kernel", sa.Text),
    sa.Column("node", sa.Text, nullable=False),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("reasons", sa.Text, nullable=False),
    sa.Column("failed", sa.Text, nullable=False),
    sa.Column("waived", sa.Text, nullable=False),
    sa.Column("simulated", sa.Boolean, nullable=False),
)
SERIES = sa.Table(
    "series",
    TABLES,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("check", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("unit", sa.Text, nullable=False),
    sa.UniqueConstraint("check", "name", "unit"),
)
POINTS = sa.Table(
    "points",
    TABLES,
    sa.Column("series", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("started", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("run", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("value", sa.Double, nullable=False),
    sa.Column("repeats", sa.LargeBinary),
    sa.Column("direction", sa.Text),
    sa.Column("bound", sa.Double),
    sa.Column("ceiling", sa.Double),
    sa.Column("chips", sa.Text),
    sqlite_with_rowid=False,
)
NOTABLE = sa.Table(
    "notable",
    TABLES,
    sa.Column("check", sa.Text, primary_key=True),
    sa.Column("run", sa.Integer, primary_key=True, autoincrement=False, index=True),
    sa.Column("outcome", sa.Text, nullable=False),
)
_USING, _MAKING = 7305124, 7305125  # numbers of locks that no other program uses in the same database
_JSON_FIELDS = ("reasons", "failed", "waived")
_TIMES = ("started", "finished")
_RUN_FIELDS = tuple(Run.__dataclass_fields__)
RUN_COLUMNS = tuple(RUNS.c[name] for name in _RUN_FIELDS)
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def engine(url: str) -> sa.Engine:
    """The engine of a database URL; it does not connect yet.

    Raises:
        ArgumentError: The URL is neither of SQLite nor of PostgreSQL.
    """
    parsed = sa.make_url(url)
    kind = parsed.get_backend_name()
    if kind not in {"sqlite", "postgresql"}:
        raise ArgumentError(f"{kind} is neither sqlite nor postgresql")
    if kind == "postgresql":
        made = sa.create_engine(parsed)
        sa.event.listen(made, "connect", _prepare_postgresql)
        return made
    made = sa.create_engine(parsed, connect_args={"timeout": WAIT_S, "isolation_level": None})
    sa.event.listen(made, "connect", _prepare_sqlite)
    # Python's driver would begin a transaction late, and not at all for CREATE and DROP.
    sa.event.listen(made, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    return made


def _prepare_sqlite(connection: Any, _record: object) -> None:
    for setting in ("journal_mode=WAL", "synchronous=NORMAL", "cache_size=-65536"):
        connection.execute(f"PRAGMA {setting}")


def _prepare_postgresql(connection: Any, _record: object) -> None:
    """Switch the just-in-time compiler off.

    Of new tables PostgreSQL has no statistics: it takes short queries for long ones, and compiles them. Two
    writers of 60 runs cost the server 33 s of processor time with the compiler, and 3.8 s without it.
    """
    before = connection.autocommit
    connection.autocommit = True  # else SET begins a transaction, and a rollback undoes it
    connection.execute("SET jit = off")
    connection.autocommit = before


def enter(connection: sa.Connection, *, alone: bool) -> None:
    """Begin to use the tables: a rebuild alone, everybody else beside the others.

    A rebuild drops the tables one by one, and PostgreSQL locks each; without this lock, somebody who holds
    one and waits for another would end in a deadlock. SQLite locks the whole file.
    """
    if connection.dialect.name == "postgresql":
        shared = "" if alone else "_shared"
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock{shared}({_USING})")


def make(connection: sa.Connection) -> None:
    """Make the tables and their indexes, unless they are there."""
    if sa.inspect(connection).has_table(RUNS.name):
        return
    if connection.dialect.name == "postgresql":  # two processes may open a new database at once
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_MAKING})")
    make_bare(connection)
    make_indexes(connection)


def make_bare(connection: sa.Connection) -> None:
    """Make the tables without those indexes that are faster to make when the rows are there."""
    for table in TABLES.sorted_tables:
        connection.execute(CreateTable(table, if_not_exists=True))


def make_indexes(connection: sa.Connection) -> None:
    """Make the indexes that `make_bare` left out."""
    for index in (index for table in TABLES.sorted_tables for index in table.indexes):
        connection.execute(CreateIndex(index, if_not_exists=True))


def drop(connection: sa.Connection) -> None:
    """Remove the tables. Nothing is read before, so that SQLite can wait for another writer."""
    for table in TABLES.sorted_tables:
        connection.execute(DropTable(table, if_exists=True))


def run_row(kept: Kept) -> dict[str, Any]:
    """A run as a row of `runs`, without its id."""
    run = kept.run
    row = {name: getattr(run, name) for name in Run.__dataclass_fields__}
    row |= {name: json.dumps(row[name]) for name in _JSON_FIELDS}
    row |= {name: micros(row[name]) for name in _TIMES}
    return row | {"result": kept.result_digest, "judged": micros(kept.judged)}


def point_rows(measured: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str, str], tuple[Any, ...]]]:
    """The points of an abstract: of each its series, and the last columns of `points`, from `value` on."""
    for check, rows in measured["points"].items():
        chips = measured["chips"].get(check)
        for name, unit, value, repeats, direction, bound, ceiling in rows:
            packed = struct.pack(f"<{len(repeats)}d", *repeats) or None
            yield (check, name, unit), (value, packed, direction, bound, ceiling, chips)


def to_run(row: Sequence[Any]) -> Run:
    """The run of a row of `runs` whose columns are in the order of `RUN_COLUMNS`."""
    values = dict(zip(_RUN_FIELDS, row, strict=True))
    for name in _JSON_FIELDS:
        values[name] = () if values[name] == "[]" else tuple(json.loads(values[name]))
    for name in _TIMES:
        values[name] = _EPOCH + dt.timedelta(microseconds=values[name])
    return Run(**values)


def to_point(record: str, key: Sequence[str], row: Sequence[Any]) -> Point:
    """The point of a series (check, name, unit) and the columns that `point_rows` made."""
    check, name, unit = key
    value, packed, *judged = row
    repeats = struct.unpack(f"<{len(packed) // 8}d", packed) if packed else ()
    return Point(record, check, name, unit, value, repeats, *judged)


def micros(time: dt.datetime) -> int:
    """Microseconds since 1970, as the tables hold times: they sort, and no database changes their zone."""
    return (time - _EPOCH) // dt.timedelta(microseconds=1)
