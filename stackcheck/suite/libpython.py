"""The shared libraries that hold a Python. In: a program, the image's files. Out: each library's digest.

A Python that was built with --enable-shared is a program of some kilobytes: its loader takes the interpreter
from libpython3.X.so.1.0. So the digest of the program alone says nothing. Every place is looked at from which
the loader may take that library: ld.so(8).
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from stackcheck.engine.image_files import ImageFiles

ELF = b"\x7fELF"
CACHE = "/etc/ld.so.cache"
PRELOAD = "/etc/ld.so.preload"
_NAME = re.compile(rb"libpython3\.\d+[a-z]*\.so\.1\.0")
_ARCHITECTURES = ("x86_64-linux-gnu", "aarch64-linux-gnu")
_FOLDERS = tuple(
    f"{root}{name}"
    for root in ("", "/usr", "/usr/local")
    for name in ("/lib", "/lib64", *(f"/lib/{arch}" for arch in _ARCHITECTURES))
)
# The loader prefers libraries for newer processors, which lie in these folders below each of its folders.
_BELOW = ("", *(f"glibc-hwcaps/x86-64-v{level}" for level in (4, 3, 2)))


def libraries(file: str, body: bytes, env: Mapping[str, str], files: ImageFiles) -> dict[str, str]:
    """The file -> digest of each library that the loader may choose for a program; none if it has all in it.

    Args:
        file: The program's path, links followed.
        body: Its content.
        env: The image's variables, of which LD_LIBRARY_PATH reaches the run.
        files: The image's files.
    """
    found = {}
    for name in sorted({match.decode() for match in _NAME.findall(body)}):
        for place in _places(name, file, env, files):
            entry = files.entry(place)
            content = files.read(place) if entry else None
            if entry and content is not None:
                found[entry.target or place] = "sha256:" + hashlib.sha256(content).hexdigest()
    return found


def _places(name: str, file: str, env: Mapping[str, str], files: ImageFiles) -> Iterator[str]:
    prefix = posixpath.dirname(posixpath.dirname(file))
    named = filter(posixpath.isabs, re.split("[:;]", env.get("LD_LIBRARY_PATH", "")))
    for folder in dict.fromkeys((f"{prefix}/lib", f"{prefix}/lib64", *named, *_FOLDERS)):
        yield from (posixpath.normpath(posixpath.join(folder, below, name)) for below in _BELOW)
    cache = files.read(CACHE) or b""
    for path in re.findall(rb"/[^\0]*" + re.escape(name.encode()), cache):
        yield path.decode(errors="replace")
