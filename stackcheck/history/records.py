"""Record files: the truth of a history. In: the bytes of records. Out: the same bytes, by their digest.

A record is one JSON document whose last member is the result as the suites wrote it. Its file is compressed,
as a result repeats itself tenfold, in two gzip members: the head, and the result. The name of the file is
the sha256 of its bytes, so nothing is ever rewritten, and an index can be made of the heads: the digest shows
that a file is whole, and only its head is unpacked. The folder may be a local one or any store that fsspec
knows (`s3://…`, `gs://…`, `memory://…`).

The result in a record was checked when it was appended, so the head is read here without a schema.
"""

import datetime as dt
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from pydantic_core import from_json

from stackcheck.files.atomic import write_atomically
from stackcheck.files.border import first_problem
from stackcheck.history import metrics
from stackcheck.history.runs import HistoryError, Point, Run
from stackcheck.oci.documents import sha256
from stackcheck.suite.results import parse

SCHEMA = 1
SIZE_LIMIT_BYTES = 64 * 2**20  # twice the largest result.json
COMPRESSION = 6
_NAME = re.compile(r"([0-9a-f]{64})\.json\.gz")
RESULT = b',\n"result":'  # between the members of the head, which hold no line break, and the result


def record(
    result: bytes,
    verdict: Mapping[str, Any],
    fingerprint: Mapping[str, Any] | None,
    *,
    source: str,
    simulated: bool = False,
    judged: dt.datetime | None = None,
) -> bytes:
    """The record of a judged run.

    Args:
        result: result.json, as the suites wrote it.
        verdict: verdict.json.
        fingerprint: The machine as the host that started the run saw it; None if only the result tells.
        source: Where the run came from: `flow`, `import FILE`, ….
        simulated: Whether nobody ran it.
        judged: When the verdict was given; None: when the run ended. Of several records of a run the newest
            verdict counts.
    """
    run = parse(result)
    head = {
        "schema": SCHEMA,
        "source": source,
        "simulated": simulated,
        "judged": (judged or run.finished or run.started).astimezone(dt.UTC).isoformat(),
        "verdict": verdict,
        "fingerprint": fingerprint,
        "result_digest": sha256(result),
        "abstract": metrics.of(from_json(result)),
    }
    text = json.dumps(head, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return joined(text.encode(), result)


def joined(head: bytes, result: bytes) -> bytes:
    """A record of its head, a JSON object without line breaks, and the bytes of result.json."""
    return head[:-1] + RESULT + result + b"}"


def packed_record(data: bytes, compression: int = COMPRESSION) -> bytes:
    """The file of a record: the head without its last brace, and then the rest, each a gzip member."""
    cut = data.index(RESULT)
    return b"".join(gzip.compress(part, compression, mtime=0) for part in (data[:cut], data[cut:]))


def head_of(data: bytes) -> bytes:
    """A record without its result: one JSON object."""
    return data[: data.index(RESULT)] + b"}"


def result_of(data: bytes) -> bytes:
    """The bytes of result.json in a record."""
    return data[data.index(RESULT) + len(RESULT) : -1]


class Records:
    """The record files in a folder, or under a URL that fsspec knows.

    Raises:
        HistoryError: There is no such kind of store, or its library is not installed.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            self._files, self._root = fsspec.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise HistoryError(
                "cannot open the store of the history's records",
                where=url,
                got=str(error),
                expected="a folder, or a URL that fsspec knows (s3://BUCKET/FOLDER, …)",
                next_step="pip install 'stackcheck[s3]' or 'stackcheck[gcs]', or correct `history:`",
            ) from error
        self._local = isinstance(self._files, LocalFileSystem)

    def append(self, data: bytes) -> str:
        """Keep a record and return its digest; a record that is there already is left as it is.

        Raises:
            HistoryError: The store refused it.
        """
        packed = packed_record(data)
        digest = sha256(packed)
        path = self._path(digest)
        with self._reported("cannot be written"):
            if self._files.exists(path):
                return digest
            if not self._local:  # an object store makes an object whole or not at all
                self._files.pipe_file(path, packed)
        if self._local:
            write_atomically(Path(path), (packed,))
        return digest

    def read(self, digest: str) -> bytes:
        """A record, checked against its digest.

        Raises:
            HistoryError: It is missing, damaged, or not the record of this name.
        """
        return self._unpacked(digest, members=2)

    def head(self, digest: str) -> bytes:
        """The head of a record, one JSON object. The whole file is checked against its digest.

        Raises:
            HistoryError: It is missing, damaged, or not the record of this name.
        """
        return self._unpacked(digest, members=1) + b"}"

    def remove(self, digest: str) -> None:
        """Remove a record's file, if it is there.

        Raises:
            HistoryError: The store refused it.
        """
        with self._reported("cannot be pruned"):
            if self._files.exists(self._path(digest)):
                self._files.rm_file(self._path(digest))

    def _unpacked(self, digest: str, members: int) -> bytes:
        """The first members of a record's file, which has its digest."""
        path = self._path(digest)
        with self._reported(f"has no readable record {digest}"):
            # For a small file fsspec's own way takes longer than the disk does.
            packed: bytes = Path(path).read_bytes() if self._local else self._files.cat_file(path)
        data = _unpacked(packed, members) if sha256(packed) == digest else None
        if data is None:
            raise HistoryError(
                "a record of the history is damaged",
                where=f"{self.url}: {digest}",
                got=sha256(packed),
                expected=digest,
                next_step="restore the file from a copy, or remove it and import the run again",
            )
        return data

    def __iter__(self) -> Iterator[str]:
        """The digests of all records, in order of digest.

        Raises:
            HistoryError: The store does not answer.
        """
        with self._reported("cannot be listed"):
            found = self._files.find(self._root) if self._files.exists(self._root) else ()
        matches = (_NAME.fullmatch(path.rpartition("/")[2]) for path in found)
        return iter(sorted(f"sha256:{match[1]}" for match in matches if match))

    def _path(self, digest: str) -> str:
        value = digest.removeprefix("sha256:")
        return f"{self._root.rstrip('/')}/{value[:2]}/{value}.json.gz"

    @contextmanager
    def _reported(self, problem: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # each library behind fsspec has its own errors; all become one of ours
            raise HistoryError(
                f"the history's store of records {problem}",
                where=self.url,
                got=str(error) or type(error).__name__,
                next_step="check `history:` in matrix.yaml, the permissions and the credentials of the store",
            ) from error


def _unpacked(packed: bytes, members: int = 2) -> bytes | None:
    """The content of a file's first gzip members.
    `None` if it is not a gzip file, has more members, or is too large.
    """
    data = b""
    for _ in range(members):
        reader = zlib.decompressobj(wbits=31)
        try:
            data += reader.decompress(packed, SIZE_LIMIT_BYTES)
        except zlib.error:
            return None
        packed = reader.unused_data
        if not reader.eof:
            return None
        if not packed:
            return data
    return data if members == 1 else None


@dataclass(frozen=True, kw_only=True)
class Kept:
    """One record, read."""

    run: Run
    # Id of each check that neither passed nor was skipped -> how it ended, or `waived`
    notable: Mapping[str, str]
    judged: dt.datetime  # when the verdict was given
    result_digest: str  # digest of result.json: two records of one result are two verdicts on it
    head: Mapping[str, Any]  # the record without the result: verdict, fingerprint, source, …
    measured: Mapping[str, Any]  # the abstract of the result, which has its metrics

    @cached_property
    def points(self) -> tuple[Point, ...]:
        """The metrics of the run, made when first asked for: a rebuild of the index does not need them."""
        return tuple(points(self.measured, self.run.record))


def read_record(data: bytes, digest: str) -> Kept:
    """Read a record of this digest.

    Raises:
        HistoryError: It is not a record of this schema.
    """
    return _read(head_of(data), digest, lambda: data)


def read_kept(records: Records, digest: str) -> Kept:
    """Read the record of this digest; only its head is unpacked if that says all.

    Raises:
        HistoryError: It is missing or damaged, or not a record of this schema.
    """
    return _read(records.head(digest), digest, lambda: records.read(digest))


def _read(text: bytes, digest: str, whole: Callable[[], bytes]) -> Kept:
    try:
        head = from_json(text)
        if head["schema"] != SCHEMA:
            raise ValueError(f"schema {head['schema']}")
        found = head["abstract"]
        if found["version"] != metrics.VERSION:
            found = metrics.of(from_json(result_of(whole())))
        return _kept(head, found, digest)
    except (ValueError, KeyError, TypeError) as error:
        raise HistoryError(
            "a record of the history cannot be read",
            where=digest,
            got=first_problem(error),
            expected=f"a record of schema {SCHEMA}",
            next_step="use the version of stackcheck that wrote it, or import the run's result.json again",
        ) from error


def _kept(head: Mapping[str, Any], found: Mapping[str, Any], digest: str) -> Kept:
    verdict, facts, columns = head["verdict"], dict(found["run"]), len(metrics.POINT)
    if not found["chips"].keys() <= found["points"].keys():
        raise ValueError("chips")
    if any(len(row) != columns for rows in found["points"].values() for row in rows):
        raise ValueError("points")
    facts |= {name: dt.datetime.fromisoformat(facts[name]) for name in ("started", "finished")}
    waived = tuple(verdict["warned"])
    run = Run(
        record=digest,
        status=verdict["status"],
        reasons=tuple(verdict["reasons"]),
        failed=tuple(verdict["failed"]),
        waived=waived,
        simulated=head["simulated"],
        **facts,
    )
    return Kept(
        run=run,
        notable=dict.fromkeys(run.failed, "failed") | found["notable"] | dict.fromkeys(waived, "waived"),
        judged=dt.datetime.fromisoformat(head["judged"]),
        result_digest=head["result_digest"],
        head=head,
        measured=found,
    )


def points(found: Mapping[str, Any], digest: str) -> Iterator[Point]:
    """The points that an abstract holds, for the record of this digest."""
    for check, rows in found["points"].items():
        chips = found["chips"].get(check)
        for name, unit, value, repeats, direction, bound, ceiling in rows:
            told = tuple(repeats)
            yield Point(digest, check, name, unit, value, told, direction, bound, ceiling, chips)
