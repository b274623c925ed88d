"""The files of an image, as the engine shows them, without an engine: a dictionary of paths."""

import contextlib
import hashlib
import posixpath
from collections.abc import Iterator, Mapping

from stackcheck.engine.image_files import FileEntry

PYTHON = b"\x7fELF a Python"
STATUS = "Package: python3-minimal\nStatus: install ok installed\nVersion: 3.11.2-1\nArchitecture: amd64\n"
PACKAGE = "deb:python3-minimal 3.11.2-1"


def dpkg(*owned: tuple[str, bytes], status: str = STATUS) -> dict[str, bytes]:
    """dpkg's database in which one package owns these files."""
    name = status.splitlines()[0].removeprefix("Package: ")
    sums = [f"{hashlib.md5(body, usedforsecurity=False).hexdigest()}  {path[1:]}" for path, body in owned]
    return {
        "/var/lib/dpkg/status": status.encode(),
        f"/var/lib/dpkg/info/{name}.md5sums": ("\n".join(sums) + "\n").encode(),
    }


HEALTHY = {"/usr/bin/python3": PYTHON, **dpkg(("/usr/bin/python3", PYTHON))}


class FakeFiles:
    """Files by path; a text is a symbolic link to that path."""

    def __init__(self, files: Mapping[str, bytes | str]) -> None:
        self.files = files

    def entry(self, path: str) -> FileEntry | None:
        path = posixpath.normpath(path)
        if any(name.startswith(path + "/") for name in self.files):
            return FileEntry(path=path, is_folder=True, executable=True)
        content = self.files.get(path)
        if content is None:
            return None
        target = content
        while isinstance(target, str) and isinstance(self.files.get(target), str):
            target = self.files[target]
        return FileEntry(
            path=path, target=target if isinstance(target, str) else "", executable="bin" in path
        )

    def read(self, path: str) -> bytes | None:
        content = self.files.get(posixpath.normpath(path))
        return self.read(content) if isinstance(content, str) else content

    def folder(self, path: str) -> Iterator[tuple[str, bytes]]:
        for name, body in self.files.items():
            if posixpath.dirname(name) == path and isinstance(body, bytes):
                yield posixpath.basename(name), body


class HasFiles:
    """The part of an engine that reads images."""

    image: Mapping[str, bytes | str] = HEALTHY

    @contextlib.contextmanager
    def files(self, _reference: str) -> Iterator[FakeFiles]:
        yield FakeFiles(self.image)
