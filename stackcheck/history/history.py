"""A history: record files and an index of them. In: judged runs. Out: the same runs, kept and found again.

The index is SQLite in a file for one machine, PostgreSQL for several. It holds nothing that the records do
not hold, so it can be thrown away and rebuilt at any time.
"""

import dataclasses
import datetime as dt
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from stackcheck.files.atomic import file_error
from stackcheck.history import index_loader, schema
from stackcheck.history import records as records_of
from stackcheck.history.records import Records, read_record
from stackcheck.history.runs import HistoryError, Point, Query, Run
from stackcheck.history.schema import (
    NOTABLE,
    POINTS,
    RUN_COLUMNS,
    RUNS,
    SERIES,
    engine,
    micros,
    to_point,
    to_run,
)
from stackcheck.matrix import matrix
from stackcheck.oci.documents import sha256

FOLDER = Path("build") / "history"


_PATTERNS = ("stack", "device_model", "driver", "status", "node")
_VALUES = ("value", "repeats", "direction", "bound", "ceiling", "chips")  # as `schema.point_rows` orders them
_PREFIX_LIMIT = 50


class RecordIndex:
    """The index at one database URL.

    Args:
        url: `sqlite:///FILE` or `postgresql+psycopg://…`; a password comes from libpq's own settings.

    Raises:
        HistoryError: The URL is wrong, the driver is not installed, or the database does not answer.
    """

    def __init__(self, url: str) -> None:
        self.url = _hidden(url)
        try:
            self._engine = engine(url)
        except (ArgumentError, NoSuchModuleError, ImportError, NotImplementedError) as error:
            raise HistoryError(
                "cannot use the URL of the history's index",
                where=self.url,
                got=str(error),
                expected="sqlite:///FILE, or postgresql+psycopg://HOST/DATABASE with stackcheck[postgres]",
                next_step="correct `history:` in matrix.yaml",
            ) from error
        with self._transaction() as connection:
            schema.make(connection)

    def add(self, data: bytes, digest: str) -> None:
        """Add the record of this digest. Of several records of one result, the newest verdict counts.

        Raises:
            HistoryError: It is not a record, or the database cannot be written.
        """
        kept = read_record(data, digest)
        with self._transaction() as connection:
            index_loader.add(connection, kept)

    def remove(self, records: Sequence[str]) -> None:
        """Forget the runs of these records."""
        gone = sa.select(RUNS.c.id).where(RUNS.c.record.in_(records))
        with self._transaction() as connection:
            for table in (POINTS, NOTABLE):
                connection.execute(sa.delete(table).where(table.c.run.in_(gone)))
            connection.execute(sa.delete(RUNS).where(RUNS.c.record.in_(records)))

    def runs(self, query: Query) -> list[Run]:
        """The runs that a query asks for."""
        wanted = sa.select(*RUN_COLUMNS).where(*_run_filters(query), *_by_check(query))
        ordered = _ordered(wanted, query, (RUNS.c.started, RUNS.c.id))
        with self._transaction() as connection:
            return [to_run(row) for row in connection.execute(ordered)]

    def points(self, query: Query) -> list[tuple[Run, Point]]:
        """The points that a query asks for, each with its run."""
        with self._transaction() as connection:
            found = connection.execute(sa.select(SERIES).where(*_series(query)))
            series = {row[0]: (row[1], row[2], row[3]) for row in found}
            if not series:
                return []
            rows = connection.execute(_points(query, sorted(series)))
            return list(_with_runs(rows, series))

    def latest(self, query: Query) -> Run | None:
        """The newest run that a query asks for."""
        found = self.runs(dataclasses.replace(query, limit=1, newest_first=True))
        return found[0] if found else None

    def of_result(self, digest: str) -> Run | None:
        """The run of a result.json, by the digest of the file."""
        with self._transaction() as connection:
            row = connection.execute(sa.select(*RUN_COLUMNS).where(RUNS.c.result == digest)).first()
        return to_run(row) if row else None

    def find(self, prefix: str) -> list[Run]:
        """The runs whose run id, record or image digest begins with a text; at most 50."""
        # A range, as an index serves it in every database and collation: the texts are hexadecimal.
        short = prefix.removeprefix("sha256:")
        starts = [
            (RUNS.c.run_id, short),
            (RUNS.c.record, f"sha256:{short}"),
            (RUNS.c.image, f"sha256:{short}"),
        ]
        matches = (sa.and_(column >= text, column < text + "g") for column, text in starts)
        with self._transaction() as connection:
            rows = connection.execute(sa.select(*RUN_COLUMNS).where(sa.or_(*matches)).limit(_PREFIX_LIMIT))
            return [to_run(row) for row in rows]

    @contextmanager
    def _transaction(self, *, alone: bool = False) -> Iterator[sa.Connection]:
        try:
            with self._engine.begin() as connection:
                schema.enter(connection, alone=alone)
                yield connection
        except SQLAlchemyError as error:
            cause = getattr(error, "orig", None) or error
            raise HistoryError(
                "the index of the history does not answer",
                where=self.url,
                got=str(cause).strip().split("\n")[0],
                next_step="check the database; stackcheck history rebuild makes the index anew",
            ) from error


class History(RecordIndex):
    """The records in a folder, or at a URL that fsspec knows, and their index at the URL of a database.

    Raises:
        HistoryError: One of them cannot be opened.
    """

    def __init__(self, records_url: str, index_url: str) -> None:
        self.records = Records(records_url)
        super().__init__(index_url)

    def append(
        self,
        result: bytes,
        verdict: Mapping[str, Any],
        fingerprint: Mapping[str, Any] | None,
        *,
        source: str,
        simulated: bool = False,
        judged: dt.datetime | None = None,
    ) -> str:
        """Keep a judged run (`records.record` explains the arguments) and return its record's digest.

        A result with the verdict that is there already is not kept again.
        """
        data = records_of.record(
            result, verdict, fingerprint, source=source, simulated=simulated, judged=judged
        )
        known = self.of_result(sha256(result))
        if known and _says(known, verdict):
            return known.record
        digest = self.records.append(data)
        self.add(data, digest)
        return digest

    def keep_newest(self, count: int) -> None:
        """Remove all runs but the newest ones: for a history that a timer fills, and nobody looks after."""
        old = [run.record for run in self.runs(Query(newest_first=True))[count:]]
        self.remove(old)  # first: an index without a record is whole, and names nothing that is gone
        for digest in old:
            self.records.remove(digest)

    def rebuild(self, report: Callable[[str], None] | None = None) -> list[HistoryError]:
        """Make the index anew from every record, in one transaction: it is done whole or not at all.

        Returns:
            An error for each damaged record; those are not in the index.

        Raises:
            HistoryError: The records or the database do not answer.
        """
        with self._transaction(alone=True) as connection:
            return index_loader.rebuild(connection, self.records, report or (lambda _line: None))


def _says(run: Run, verdict: Mapping[str, Any]) -> bool:
    """Whether a kept run has this verdict."""
    kept = run.status, run.reasons, run.failed, run.waived
    return kept == (verdict["status"], *(tuple(verdict[name]) for name in ("reasons", "failed", "warned")))


def open_history(root: Path) -> History:
    """The history of a checkout: what `history:` in matrix.yaml names, else `build/history/`.

    Raises:
        HistoryError: It cannot be opened.
        FileError: Its folder cannot be made.
        ConfigurationError: matrix.yaml is wrong.
    """
    file = root / "matrix.yaml"
    chosen = matrix.load_matrix(file).history if file.exists() else None
    folder = root / FOLDER
    if chosen is None or chosen.index is None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise file_error(error, folder) from error
    return History(
        (chosen.records if chosen else None) or str(folder / "records"),
        (chosen.index if chosen else None) or f"sqlite:///{folder / 'index.sqlite'}",
    )


def _hidden(url: str) -> str:
    """The URL without its password."""
    try:
        return sa.make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        return url


def _points(query: Query, series: list[int]) -> sa.Select[Any]:
    """The statement for the points of some series.

    One series is walked in the order of time, in which the table holds it. Of several, each run's points are
    looked up, so that the walk over the runs can end at the limit.
    """
    fields = (POINTS.c.run, POINTS.c.series, *(POINTS.c[name] for name in _VALUES), *RUN_COLUMNS)
    if len(series) == 1 and not any(getattr(query, name) for name in _PATTERNS):
        joined = POINTS.join(RUNS, RUNS.c.id == POINTS.c.run)
        filters = (POINTS.c.series == series[0], *_run_filters(query, POINTS.c.started))
        order = POINTS.c.started, POINTS.c.run
    else:
        same = sa.and_(
            POINTS.c.series.in_(series), POINTS.c.started == RUNS.c.started, POINTS.c.run == RUNS.c.id
        )
        joined = RUNS.join(POINTS, same)
        filters = tuple(_run_filters(query))
        order = RUNS.c.started, RUNS.c.id
    return _ordered(sa.select(*fields).select_from(joined).where(*filters), query, order)


def _with_runs(
    rows: Iterable[sa.Row[Any]], series: Mapping[int, tuple[str, str, str]]
) -> Iterator[tuple[Run, Point]]:
    runs: dict[int, Run] = {}
    for number, key, *rest in (tuple(row) for row in rows):
        run = runs.get(number)
        if run is None:
            run = runs[number] = to_run(rest[len(_VALUES) :])
        yield run, to_point(run.record, series[key], rest[: len(_VALUES)])


def _run_filters(query: Query, started: sa.Column[Any] = RUNS.c.started) -> Iterator[sa.ColumnElement[bool]]:
    for name in _PATTERNS:
        if pattern := getattr(query, name):
            yield _like(RUNS.c[name], pattern)
    if query.since:
        yield started >= micros(query.since)
    if query.until:
        yield started < micros(query.until)


def _by_check(query: Query) -> Iterator[sa.ColumnElement[bool]]:
    """What a query asks of runs by check and metric."""
    if query.check and not query.metric:
        yield RUNS.c.id.in_(sa.select(NOTABLE.c.run).where(_like(NOTABLE.c["check"], query.check)))
    if query.metric:
        series = sa.select(SERIES.c.id).where(*_series(query))
        yield RUNS.c.id.in_(sa.select(POINTS.c.run).where(POINTS.c.series.in_(series)))


def _series(query: Query) -> list[sa.ColumnElement[bool]]:
    asked = (("check", query.check), ("name", query.metric))
    return [_like(SERIES.c[name], pattern) for name, pattern in asked if pattern]


def _like(column: sa.Column[Any], pattern: str) -> sa.ColumnElement[bool]:
    escaped = pattern.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return column.ilike(escaped.replace("*", "%").replace("?", "_"), escape="\\")


def _ordered(statement: sa.Select[Any], query: Query, columns: tuple[sa.Column[Any], ...]) -> sa.Select[Any]:
    ordered = statement.order_by(*(column.desc() if query.newest_first else column for column in columns))
    return ordered.limit(query.limit) if query.limit is not None else ordered
