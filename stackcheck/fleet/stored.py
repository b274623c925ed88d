"""Where the large files of a node are. In: a job and a path below its folder. Out: bytes there.

It is the job's folder, or the URL that the job names: then nodes and judge use a store that fsspec knows
(s3://…, gs://…), and only small files are left to the shared file system: what nodes say of themselves.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import fsspec
from fsspec.implementations.local import LocalFileSystem

from stackcheck.errors import ConfigurationError, EngineError, StackcheckError
from stackcheck.files.atomic import write_atomically
from stackcheck.files.regular import read_regular

if TYPE_CHECKING:
    from stackcheck.fleet.job import Job


def require_store(url: str) -> None:
    """Refuse a URL that this Python cannot open, or that tells everybody a password.

    Raises:
        ConfigurationError: With the reason.
    """
    problem = "" if "://" in url else url
    try:
        if urlsplit(url).password:
            problem = "a URL with a password, which job.json would show"
        elif not problem:
            fsspec.url_to_fs(url)
    except (ImportError, ValueError) as error:
        problem = str(error)
    if problem:
        raise ConfigurationError(
            "the nodes cannot store their results there",
            where="--results",
            got=problem,
            expected="a URL that fsspec knows, such as s3://BUCKET/FOLDER, without credentials",
            next_step="pip install 'stackcheck[s3]' or 'stackcheck[gcs]', here and on the nodes",
        )


def url_of(job: Job, file: Path) -> str:
    """The URL of a file of the job: by job, attempt and rank, as below the folder."""
    below = file.relative_to(job.folder.parent).as_posix()
    return f"{(job.results or '').rstrip('/')}/{below}"


def put(job: Job, file: Path, data: bytes) -> None:
    """Store a file, whole or not at all.

    Raises:
        EngineError: The store refused it.
        FileError: The disk did.
    """
    if job.results is None:
        write_atomically(file, (data,))
        return
    url = url_of(job, file)
    try:
        files, path = fsspec.url_to_fs(url)
        if isinstance(files, LocalFileSystem):
            write_atomically(Path(path), (data,))
        else:  # an object store makes an object whole or not at all
            files.pipe_file(path, data)
    except StackcheckError:
        raise
    except Exception as error:  # each library behind fsspec has its own errors
        raise EngineError(
            "the node cannot store a file",
            where=url,
            got=f"{type(error).__name__}: {error}",
            next_step="check the URL of --results, and the credentials of the store on this node",
        ) from error


def read(job: Job, file: Path, limit: int) -> bytes:
    """At most `limit` bytes of a stored file.

    Raises:
        OSError: It is not there, is no regular file, or the store does not answer.
    """
    if job.results is None:
        return read_regular(file, limit, follow=False)
    url = url_of(job, file)
    try:
        files, path = fsspec.url_to_fs(url)
        if isinstance(files, LocalFileSystem):
            return read_regular(Path(path), limit, follow=False)
        found: bytes = files.cat_file(path, start=0, end=limit)
    except Exception as error:  # as above
        raise OSError(errno.EIO, f"{url}: {type(error).__name__}: {error}") from error
    return found
