"""The index of a history: answers questions in milliseconds. In: records. Out: runs and points, by `Query`.

SQLite in a file for one machine, PostgreSQL for several. It holds nothing that the records do not hold, so it
can be thrown away and rebuilt at any time.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import struct
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from stackcheck.history import reading
from stackcheck.history.runs import HistoryError, Point, Query, Run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from stackcheck.history.reading import Kept
    from stackcheck.history.records import Records

VERSION = 1  # of the tables; an index of another version is built anew
WAIT_S = 600  # for a writer of the same SQLite file; a rebuild is the longest

_TABLES = sa.MetaData()
_RUNS = sa.Table(
    "runs",
    _TABLES,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("result", sa.Text, nullable=False, unique=True),
    sa.Column("record", sa.Text, nullable=False, unique=True),
    sa.Column("judged", sa.BigInteger, nullable=False),
    sa.Column("run_id", sa.Text, nullable=False, index=True),
    sa.Column("started", sa.BigInteger, nullable=False, index=True),
    sa.Column("finished", sa.BigInteger, nullable=False),
    sa.Column("tier", sa.Text, nullable=False),
    sa.Column("stack", sa.Text, nullable=False),
    sa.Column("image", sa.Text),
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
_SERIES = sa.Table(
    "series",
    _TABLES,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("check", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("unit", sa.Text, nullable=False),
    sa.UniqueConstraint("check", "name", "unit"),
)
_POINTS = sa.Table(
    "points",
    _TABLES,
    sa.Column("series", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("run", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("value", sa.Double, nullable=False),
    sa.Column("repeats", sa.LargeBinary),
    sa.Column("direction", sa.Text),
    sa.Column("bound", sa.Double),
    sa.Column("ceiling", sa.Double),
    sa.Index("points_of_a_run", "run"),
    sqlite_with_rowid=False,
)
_NOTABLE = sa.Table(
    "notable",
    _TABLES,
    sa.Column("check", sa.Text, primary_key=True),
    sa.Column("run", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("outcome", sa.Text, nullable=False),
)
_META = sa.Table("meta", _TABLES, sa.Column("version", sa.Integer, primary_key=True, autoincrement=False))
_JSON_FIELDS = ("reasons", "failed", "waived")
_TIMES = ("started", "finished")
_PATTERNS = ("stack", "device_model", "driver", "status", "node")


class Index:
    """The index at one database URL.

    Args:
        url: `sqlite:///FILE` or `postgresql+psycopg://…`; a password comes from libpq's own settings.

    Raises:
        HistoryError: The URL is wrong, the driver is not installed, or the database does not answer.
    """

    def __init__(self, url: str) -> None:
        self.url = _hidden(url)
        try:
            self._engine = _engine(url)
        except (ArgumentError, NoSuchModuleError, ImportError, NotImplementedError) as error:
            raise HistoryError(
                "cannot use the URL of the history's index",
                where=self.url,
                got=str(error),
                expected="sqlite:///FILE, or postgresql+psycopg://HOST/DATABASE with stackcheck[postgres]",
                next_step="correct `history:` in matrix.yaml",
            ) from error
        with self._transaction() as connection:
            _make_tables(connection)

    def add(self, data: bytes) -> None:
        """Add a record; of several records of one result, the one with the newest verdict counts.

        Raises:
            HistoryError: It is not a record, or the database cannot be written.
        """
        kept = reading.read(data)
        with self._transaction() as connection:
            _Writer(connection).add(kept)

    def rebuild(self, records: Records, report: Callable[[str], None] | None = None) -> list[HistoryError]:
        """Forget all and read every record again, in one transaction: readers see the old index until then.

        Returns:
            An error for each damaged record; those are not in the index.

        Raises:
            HistoryError: The records or the database do not answer.
        """
        damaged: list[HistoryError] = []
        with self._transaction() as connection:
            _TABLES.drop_all(connection)
            _make_tables(connection)
            writer = _Writer(connection)
            for number, digest in enumerate(records, start=1):
                try:
                    writer.add(reading.read(records.read(digest), digest))
                except HistoryError as error:
                    damaged.append(error)
                if report and number % 5000 == 0:
                    report(f"{number} records read")
        return damaged

    def runs(self, query: Query) -> list[Run]:
        """The runs that a query asks for."""
        statement = _ordered(sa.select(_RUNS).where(*_run_filters(query), *_point_filters(query)), query)
        with self._transaction() as connection:
            return [_run(row) for row in connection.execute(statement).mappings()]

    def points(self, query: Query) -> list[tuple[Run, Point]]:
        """The points that a query asks for, each with its run."""
        fields = (_RUNS, _SERIES.c["check"], _SERIES.c["name"], _SERIES.c["unit"])
        measured = (_POINTS.c[name] for name in ("value", "repeats", "direction", "bound", "ceiling"))
        joined = _RUNS.join(_POINTS, _POINTS.c.run == _RUNS.c.id).join(
            _SERIES, _SERIES.c.id == _POINTS.c.series
        )
        wanted = (
            sa.select(*fields, *measured).select_from(joined).where(*_run_filters(query), *_series(query))
        )
        with self._transaction() as connection:
            rows = connection.execute(_ordered(wanted, query)).mappings()
            return list(_with_runs(rows))

    def latest(self, query: Query) -> Run | None:
        """The newest run that a query asks for."""
        found = self.runs(dataclasses.replace(query, limit=1, newest_first=True))
        return found[0] if found else None

    def find(self, prefix: str) -> list[Run]:
        """The runs whose run id, record or image digest begins with a text."""
        text = prefix.replace("%", "").replace("_", "")
        columns = (_RUNS.c.run_id, _RUNS.c.record, _RUNS.c.image)
        likes = [column.like(f"{text}%") for column in columns]
        likes += [column.like(f"sha256:{text}%") for column in columns[1:]]
        with self._transaction() as connection:
            rows = connection.execute(sa.select(_RUNS).where(sa.or_(*likes)).limit(100)).mappings()
            return [_run(row) for row in rows]

    @contextmanager
    def _transaction(self) -> Iterator[sa.Connection]:
        try:
            with self._engine.begin() as connection:
                yield connection
        except SQLAlchemyError as error:
            cause = getattr(error, "orig", None) or error
            raise HistoryError(
                "the index of the history does not answer",
                where=self.url,
                got=str(cause).strip().split("\n")[0],
                next_step="check the database; stackcheck history rebuild makes the index anew",
            ) from error


class _Writer:
    """Adds kept runs in one transaction, and remembers the ids of series."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection
        self._series: dict[tuple[str, str, str], int] = {}

    def add(self, kept: Kept) -> None:
        number = self._connection.execute(_upsert(self._connection, _row(kept))).scalar()
        if number is None:
            return  # a newer verdict on this result is there
        for table in (_POINTS, _NOTABLE):
            self._connection.execute(table.delete().where(table.c.run == number))
        rows = [self._point(point, number) for point in kept.points]
        if rows:
            self._connection.execute(_POINTS.insert(), rows)
        notable = [{"check": check, "run": number, "outcome": how} for check, how in kept.notable.items()]
        if notable:
            self._connection.execute(_NOTABLE.insert(), notable)

    def _point(self, point: Point, number: int) -> dict[str, Any]:
        return {
            "series": self._series_id((point.check, point.name, point.unit)),
            "run": number,
            "value": point.value,
            "repeats": struct.pack(f"<{len(point.repeats)}d", *point.repeats) or None,
            "direction": point.direction,
            "bound": point.bound,
            "ceiling": point.ceiling,
        }

    def _series_id(self, key: tuple[str, str, str]) -> int:
        if key not in self._series:
            values = dict(zip(("check", "name", "unit"), key, strict=True))
            insert = _insert(self._connection, _SERIES).values(values).on_conflict_do_nothing()
            self._connection.execute(insert)
            wanted = sa.select(_SERIES.c.id).where(
                *(_SERIES.c[name] == text for name, text in values.items())
            )
            self._series[key] = self._connection.execute(wanted).scalar_one()
        return self._series[key]


def _engine(url: str) -> sa.Engine:
    parsed = sa.make_url(url)
    if parsed.get_backend_name() not in {"sqlite", "postgresql"}:
        raise ArgumentError(f"{parsed.get_backend_name()} is neither sqlite nor postgresql")
    if parsed.get_backend_name() == "postgresql":
        return sa.create_engine(parsed)
    engine = sa.create_engine(parsed, connect_args={"timeout": WAIT_S, "isolation_level": None})
    sa.event.listen(engine, "connect", _prepare_sqlite)
    sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    return engine


def _prepare_sqlite(connection: Any, _record: object) -> None:
    for setting in ("journal_mode=WAL", "synchronous=NORMAL", "cache_size=-65536"):
        connection.execute(f"PRAGMA {setting}")


def _make_tables(connection: sa.Connection) -> None:
    _TABLES.create_all(connection)


def _hidden(url: str) -> str:
    """The URL without its password."""
    try:
        return sa.make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        return url


def _insert(connection: sa.Connection, table: sa.Table) -> sqlite.Insert | postgresql.Insert:
    if connection.dialect.name == "postgresql":
        return postgresql.insert(table)
    return sqlite.insert(table)


def _upsert(connection: sa.Connection, row: Mapping[str, Any]) -> sa.Executable:
    insert = _insert(connection, _RUNS).values(row)
    new, old = insert.excluded, _RUNS.c
    newer = sa.or_(new.judged > old.judged, sa.and_(new.judged == old.judged, new.record > old.record))
    changed = {name: new[name] for name in row if name != "result"}
    return insert.on_conflict_do_update(index_elements=["result"], set_=changed, where=newer).returning(
        old.id
    )


def _row(kept: Kept) -> dict[str, Any]:
    run = kept.run
    row = {name: getattr(run, name) for name in run.__dataclass_fields__}
    row |= {name: json.dumps(row[name]) for name in _JSON_FIELDS}
    row |= {name: _micros(row[name]) for name in _TIMES}
    return row | {"result": kept.result_digest, "judged": _micros(kept.judged)}


def _run(row: sa.RowMapping) -> Run:
    values: dict[str, Any] = {name: row[name] for name in Run.__dataclass_fields__}
    values |= {name: tuple(json.loads(values[name])) for name in _JSON_FIELDS}
    values |= {name: _time(values[name]) for name in _TIMES}
    return Run(**values)


def _with_runs(rows: Iterable[sa.RowMapping]) -> Iterator[tuple[Run, Point]]:
    runs: dict[int, Run] = {}
    for row in rows:
        run = runs.get(row["id"]) or runs.setdefault(row["id"], _run(row))
        packed = row["repeats"] or b""
        yield (
            run,
            Point(
                record=run.record,
                check=row["check"],
                name=row["name"],
                unit=row["unit"],
                value=row["value"],
                repeats=struct.unpack(f"<{len(packed) // 8}d", packed),
                direction=row["direction"],
                bound=row["bound"],
                ceiling=row["ceiling"],
            ),
        )


def _run_filters(query: Query) -> list[sa.ColumnElement[bool]]:
    filters = [_like(_RUNS.c[name], getattr(query, name)) for name in _PATTERNS if getattr(query, name)]
    if query.since:
        filters.append(_RUNS.c.started >= _micros(query.since))
    if query.until:
        filters.append(_RUNS.c.started < _micros(query.until))
    return filters


def _point_filters(query: Query) -> list[sa.ColumnElement[bool]]:
    """What a query asks of runs by check and metric."""
    filters: list[sa.ColumnElement[bool]] = []
    if query.check and not query.metric:
        found = sa.select(_NOTABLE.c.run).where(_like(_NOTABLE.c["check"], query.check))
        filters.append(_RUNS.c.id.in_(found))
    if query.metric:
        series = sa.select(_SERIES.c.id).where(*_series(query))
        filters.append(_RUNS.c.id.in_(sa.select(_POINTS.c.run).where(_POINTS.c.series.in_(series))))
    return filters


def _series(query: Query) -> list[sa.ColumnElement[bool]]:
    asked = (("check", query.check), ("name", query.metric))
    return [_like(_SERIES.c[name], pattern) for name, pattern in asked if pattern]


def _like(column: sa.Column[Any], pattern: str) -> sa.ColumnElement[bool]:
    escaped = pattern.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return column.ilike(escaped.replace("*", "%").replace("?", "_"), escape="\\")


def _ordered(statement: sa.Select[Any], query: Query) -> sa.Select[Any]:
    columns: Sequence[sa.Column[Any]] = (_RUNS.c.started, _RUNS.c.id)
    ordered = statement.order_by(*(column.desc() if query.newest_first else column for column in columns))
    return ordered.limit(query.limit) if query.limit is not None else ordered


def _micros(time: dt.datetime) -> int:
    return (time - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(microseconds=1)


def _time(micros: int) -> dt.datetime:
    return dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + dt.timedelta(microseconds=micros)
