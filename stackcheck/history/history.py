"""A history: record files and an index of them. In: judged runs. Out: the same runs, kept and found again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from stackcheck.files.atomic import file_error
from stackcheck.history import records as records_of
from stackcheck.history.index import RecordIndex
from stackcheck.history.records import Records
from stackcheck.history.runs import Query
from stackcheck.matrix import matrix
from stackcheck.oci.documents import sha256

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable, Mapping

    from stackcheck.history.runs import HistoryError, Point, Run

FOLDER = Path("build") / "history"


class History:
    """The records at one URL, and their index at another.

    Args:
        records_url: A folder, or a URL that fsspec knows.
        index_url: A database URL.

    Raises:
        HistoryError: One of them cannot be opened.
    """

    def __init__(self, records_url: str, index_url: str) -> None:
        self.records = Records(records_url)
        self.index = RecordIndex(index_url)

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

        Raises:
            ResultError: The result is damaged.
            FileError: The disk is full, or a permission is missing.
            HistoryError: The store or the database does not answer.
        """
        data = records_of.record(
            result, verdict, fingerprint, source=source, simulated=simulated, judged=judged
        )
        known = self.index.of_result(sha256(result))
        if known and _says(known, verdict):
            return known.record
        digest = self.records.append(data)
        self.index.add(data, digest)
        return digest

    def keep_newest(self, count: int) -> None:
        """Remove all runs but the newest ones: for a history that a timer fills, and nobody looks after.

        Raises:
            HistoryError: The store or the database does not answer.
        """
        old = [run.record for run in self.index.runs(Query(newest_first=True))[count:]]
        self.index.remove(old)  # first: an index without a record is whole, and names nothing that is gone
        for digest in old:
            self.records.remove(digest)

    def runs(self, query: Query) -> list[Run]:
        """The runs that a query asks for."""
        return self.index.runs(query)

    def points(self, query: Query) -> list[tuple[Run, Point]]:
        """The points that a query asks for."""
        return self.index.points(query)

    def latest(self, query: Query) -> Run | None:
        """The newest run that a query asks for."""
        return self.index.latest(query)

    def rebuild(self, report: Callable[[str], None] | None = None) -> list[HistoryError]:
        """Make the index anew from the records; an error for each damaged record."""
        return self.index.rebuild(self.records, report)


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
    chosen = matrix.load(file).history if file.exists() else None
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
