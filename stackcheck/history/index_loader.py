"""Fill the index. In: records. Out: rows, one run at a time or all of them at once.

Reading a record costs more than writing its rows, so a large rebuild reads in several processes.
"""

import gc
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from stackcheck.files.many_documents import without_collector
from stackcheck.history import schema
from stackcheck.history.records import Kept, Records, read_kept
from stackcheck.history.runs import HistoryError
from stackcheck.history.schema import NOTABLE, POINTS, RUNS, SERIES, micros, point_rows, run_row

CHUNK = 250  # records that a process reads at a time
AHEAD = 4  # chunks that a process may read before they are written
ALONE = 2 * CHUNK  # up to so many records, starting processes costs more than it saves

SeriesKey = tuple[str, str, str]

_STAGED = POINTS.to_metadata(sa.MetaData(), name="staged_points")  # only its name and its columns are used


@dataclass
class _Chunk:
    """What one process read: rows whose series and runs are still numbered within the chunk."""

    runs: list[dict[str, Any]] = field(default_factory=list)
    series: dict[SeriesKey, int] = field(default_factory=dict)
    points: list[list[tuple[Any, ...]]] = field(default_factory=list)
    notable: list[Mapping[str, str]] = field(default_factory=list)
    damaged: list[HistoryError] = field(default_factory=list)

    def add(self, kept: Kept) -> None:
        number = self.series.setdefault
        self.runs.append(run_row(kept))
        rows = point_rows(kept.measured)
        self.points.append([(number(key, len(self.series)), *values) for key, values in rows])
        self.notable.append(kept.notable)


def add(connection: sa.Connection, kept: Kept) -> None:
    """Add one run; of several records of one result, the one with the newest verdict counts."""
    known = connection.execute(_upsert(connection, run_row(kept))).scalar()
    if known is None:
        return  # a newer verdict on this result is there
    connection.execute(NOTABLE.delete().where(NOTABLE.c.run == known))
    _insert_rows(connection, NOTABLE, [(check, known, how) for check, how in kept.notable.items()])
    # Two records of one result have equal points, so those that are there stay.
    started = micros(kept.run.started)
    points = list(point_rows(kept.measured))
    # In one order: two writers that add the same new series never wait for each other.
    series = {key: _series_id(connection, key) for key in sorted({key for key, _ in points})}
    rows = [(series[key], started, known, *values) for key, values in points]
    if rows:
        names = [column.name for column in POINTS.columns]
        insert = _insert(connection, POINTS).on_conflict_do_nothing()
        connection.execute(insert, [dict(zip(names, row, strict=True)) for row in rows])


def rebuild(connection: sa.Connection, records: Records, report: Callable[[str], None]) -> list[HistoryError]:
    """Replace all rows by those of the records; return an error for each damaged record."""
    schema.drop(connection)
    schema.make_bare(connection)
    loader = _Loader(connection)
    damaged: list[HistoryError] = []
    with without_collector():
        for chunk in _chunks(records):
            loader.add(chunk)
            damaged += chunk.damaged
            report(f"{loader.read} runs read")
    schema.make_indexes(connection)
    loader.finish()
    return damaged


class _Loader:
    """Numbers runs and series itself, as the tables are empty when it begins.

    Points come in the order of their records, which is random; they are staged, and put in order at the end:
    rows that come in order fill one page of the table after the other.
    """

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection
        self._series: dict[SeriesKey, int] = {}
        self._known: dict[str, tuple[int, tuple[int, str]]] = {}  # result -> its id, its newest verdict
        self.read = 0
        connection.exec_driver_sql("CREATE TEMP TABLE staged_points AS SELECT * FROM points WHERE 1 = 0")

    def add(self, chunk: _Chunk) -> None:
        new = [key for key in chunk.series if key not in self._series]
        first = len(self._series) + 1
        self._series |= {key: first + offset for offset, key in enumerate(new)}
        _insert_rows(self._connection, SERIES, [(self._series[key], *key) for key in new])
        series = [self._series[key] for key in chunk.series]
        runs, points, notable, again = [], [], [], []
        for row, values, ended in zip(chunk.runs, chunk.points, chunk.notable, strict=True):
            verdict = row["judged"], row["record"]
            if row["result"] in self._known:
                again.append((row, verdict, ended))
                continue
            number = len(self._known) + 1
            self._known[row["result"]] = number, verdict
            runs.append((number, *(row[column.name] for column in list(RUNS.columns)[1:])))
            points += [(series[value[0]], row["started"], number, *value[1:]) for value in values]
            notable += [(check, number, how) for check, how in ended.items()]
        for table, rows in ((RUNS, runs), (_STAGED, points), (NOTABLE, notable)):
            _insert_rows(self._connection, table, rows)
        for row, verdict, ended in again:
            self._judge_again(row, verdict, ended)
        self.read += len(chunk.runs)

    def _judge_again(self, row: dict[str, Any], verdict: tuple[int, str], ended: Mapping[str, str]) -> None:
        number, newest = self._known[row["result"]]
        if verdict > newest:
            self._known[row["result"]] = number, verdict
            self._connection.execute(RUNS.update().where(RUNS.c.id == number).values(row))
            self._connection.execute(NOTABLE.delete().where(NOTABLE.c.run == number))
            _insert_rows(self._connection, NOTABLE, [(check, number, how) for check, how in ended.items()])

    def finish(self) -> None:
        """Order the points, and let PostgreSQL number what is added later; SQLite numbers by itself."""
        self._connection.exec_driver_sql(
            "INSERT INTO points SELECT * FROM staged_points ORDER BY series, started, run"
        )
        self._connection.exec_driver_sql("DROP TABLE staged_points")
        if self._connection.dialect.name == "postgresql":
            for table in (RUNS, SERIES):
                text = "SELECT setval(pg_get_serial_sequence('{0}', 'id'), (SELECT max(id) FROM {0}))"
                self._connection.execute(sa.text(text.format(table.name)))
        self._connection.exec_driver_sql("ANALYZE")


def _chunks(records: Records) -> Iterator[_Chunk]:
    digests = list(records)
    batches = [(records.url, digests[i : i + CHUNK]) for i in range(0, len(digests), CHUNK)]
    if len(digests) <= ALONE:
        yield from (_read(records, names) for _, names in batches)
        return
    # Not forked: a child must not inherit the connection to the database.
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), spawned, initializer=gc.disable) as pool:
        waiting = iter(batches)
        begun = [
            pool.submit(_read_url, *batch)
            for batch in itertools.islice(waiting, AHEAD * (os.cpu_count() or 1))
        ]
        while begun:
            yield begun.pop(0).result()
            begun += [pool.submit(_read_url, *batch) for batch in itertools.islice(waiting, 1)]


def _read_url(url: str, digests: Iterable[str]) -> _Chunk:
    return _read(Records(url), digests)


def _read(records: Records, digests: Iterable[str]) -> _Chunk:
    chunk = _Chunk()
    for digest in digests:
        try:
            chunk.add(read_kept(records, digest))
        except HistoryError as error:
            chunk.damaged.append(error)
    return chunk


def _series_id(connection: sa.Connection, key: SeriesKey) -> int:
    values = dict(zip(("check", "name", "unit"), key, strict=True))
    wanted = sa.select(SERIES.c.id).where(*(SERIES.c[name] == text for name, text in values.items()))
    found: int | None = connection.execute(wanted).scalar()
    if found is None:
        connection.execute(_insert(connection, SERIES).values(values).on_conflict_do_nothing())
        found = connection.execute(wanted).scalar_one()
    return found


def _insert(connection: sa.Connection, table: sa.Table) -> sqlite.Insert | postgresql.Insert:
    if connection.dialect.name == "postgresql":
        return postgresql.insert(table)
    return sqlite.insert(table)


def _upsert(connection: sa.Connection, row: Mapping[str, Any]) -> sa.Executable:
    insert = _insert(connection, RUNS).values(row)
    new, old = insert.excluded, RUNS.c
    newer = sa.or_(new.judged > old.judged, sa.and_(new.judged == old.judged, new.record > old.record))
    changed = {name: new[name] for name in row if name != "result"}
    upsert = insert.on_conflict_do_update(index_elements=["result"], set_=changed, where=newer)
    return upsert.returning(old.id)


def _insert_rows(connection: sa.Connection, table: sa.Table, rows: Sequence[tuple[Any, ...]]) -> None:
    """Insert whole rows as fast as the database's own driver can."""
    if not rows:
        return
    if connection.dialect.name == "sqlite":
        marks = ", ".join("?" * len(table.columns))
        connection.exec_driver_sql(f"INSERT INTO {table.name} VALUES ({marks})", list(rows))  # noqa: S608  # no user's text
        return
    driver: Any = connection.connection.driver_connection
    with driver.cursor() as cursor, cursor.copy(f"COPY {table.name} FROM STDIN") as copy:
        for row in rows:
            copy.write_row(row)
