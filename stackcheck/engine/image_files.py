"""Read files of an image through the engine. In: an image, absolute paths. Out: their kind and bytes.

The engine makes a container that is never started, so no program of the image runs, and what it says about
itself does not count: https://docs.docker.com/reference/api/engine/ (`/containers/{id}/archive`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import posixpath
import stat
import tarfile
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

from stackcheck.engine import interrupts, leftovers
from stackcheck.engine.container import engine_errors, removed_at_the_end
from stackcheck.errors import EngineError

if TYPE_CHECKING:
    from docker import DockerClient

MEMORY_BYTES = 32 << 20  # a larger archive is kept on disk while it is read
LONGEST_BYTES = 256 << 20  # of one file or folder; an interpreter has 7 MB, a conda one 30, dpkg's lists 4
NO_FOLDER = "not a directory"
_GO_SYMLINK, _GO_FOLDER = 1 << 27, 1 << 31  # Go's os.FileMode, which the engine's API hands out


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileEntry:
    """A path in an image."""

    path: str
    target: str = ""  # where a symbolic link ends, all links followed; "" for other kinds
    is_folder: bool = False
    executable: bool = False


class ImageFiles(Protocol):
    """The files of one image."""

    def entry(self, path: str) -> FileEntry | None:
        """What is at a path; None if there is nothing."""

    def read(self, path: str) -> bytes | None:
        """The content of a regular file, links followed; `None` if the file does not exist."""

    def folder(self, path: str) -> Iterator[tuple[str, bytes]]:
        """Name and content of each regular file directly in a folder."""


class _Made:
    """The files of a container that was made and not started."""

    def __init__(self, api: Any, name: str) -> None:
        self._api, self._name = api, name

    def entry(self, path: str) -> FileEntry | None:
        found = self._archive(path)
        if found is None:
            return None
        chunks, facts = found
        cast("Any", chunks).close()
        mode = int(facts["mode"])
        link = bool(mode & _GO_SYMLINK)
        return FileEntry(
            path=path,
            target=posixpath.join("/", facts["linkTarget"]) if link else "",
            is_folder=bool(mode & _GO_FOLDER),
            executable=bool(stat.S_IMODE(mode) & 0o111),
        )

    def read(self, path: str) -> bytes | None:
        found = self.entry(path)
        if found is None or found.is_folder:
            return None
        for _name, body in self._regular(found.target or path):
            return body
        return None

    def folder(self, path: str) -> Iterator[tuple[str, bytes]]:
        for name, body in self._regular(path):
            _top, slash, rest = name.partition("/")
            if slash and "/" not in rest:
                yield rest, body

    def _regular(self, path: str) -> Iterator[tuple[str, bytes]]:
        found = self._archive(path)
        if found is None:
            return
        with tempfile.SpooledTemporaryFile(max_size=MEMORY_BYTES) as kept:
            _keep(found[0], cast("IO[bytes]", kept))
            with tarfile.open(fileobj=cast("IO[bytes]", kept), mode="r:") as tar:
                for member in tar:
                    body = tar.extractfile(member) if member.isreg() else None
                    if body is not None:
                        yield member.name, body.read()

    def _archive(self, path: str) -> tuple[Iterable[bytes], dict[str, Any]] | None:
        import docker

        with engine_errors(f"reading {path} of an image"):
            try:
                chunks, facts = self._api.get_archive(self._name, path)
            except docker.errors.NotFound:
                return None
            except docker.errors.APIError as error:
                if NO_FOLDER in str(error.explanation):  # the way to the path leads through a file
                    return None
                raise
        return chunks, facts


def _keep(chunks: Iterable[bytes], kept: IO[bytes]) -> None:
    with engine_errors("reading files of an image"):
        for chunk in chunks:
            if kept.tell() + len(chunk) > LONGEST_BYTES:
                raise EngineError(
                    "a file or folder of the image is too large to be read",
                    expected=f"at most {LONGEST_BYTES >> 20} MiB",
                )
            kept.write(chunk)
    kept.seek(0)


@contextlib.contextmanager
def of_image(client: DockerClient, reference: str) -> Iterator[ImageFiles]:
    """The files of an image, as the engine shows them."""
    name = f"stackcheck-{uuid.uuid4().hex[:12]}"
    with interrupts.held() as signals, removed_at_the_end(client, name):
        with engine_errors(f"opening {reference}"):
            # Never started; an image without a command needs one to be made into a container.
            client.containers.create(
                reference, ["/nonexistent"], name=name, network_mode="none", labels=leftovers.labels()
            )
        with signals.let_in():
            yield _Made(client.api, name)
