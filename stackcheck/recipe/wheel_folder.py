"""One folder of wheels instead of indexes: exact versions with the hash of every file.

In: requirements, the folder. Out: the text of a lock, hashes of files by name. uv chooses the versions; the
hashes are read from the files here, because not every uv states those of a folder.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from stackcheck.errors import BuildError
from stackcheck.files.digest import sha256_of
from stackcheck.files.requirements import read_packages
from stackcheck.recipe import indexes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class WheelFolder:
    """A folder of wheels; each file is read once.

    Raises:
        BuildError: The folder lacks a wheel of a requirement, or of a package that one needs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._hashes: dict[str, str] = {}

    def resolve(self, wanted: Sequence[str], *, python: str, held: indexes.Held = indexes.FREE) -> str:
        """A lock of the requirements and of all that they need, as pip reads it."""
        places = ["--no-index", f"--find-links={self.folder}"]
        try:
            text = indexes.resolve(wanted, python=python, places=places, held=held, with_hashes=False)
        except indexes.UnresolvedError as error:
            raise self._refusal(error.package, python) from error
        pins = re.findall(r"^[\w.-]+==\S+", text, re.MULTILINE)
        of = self.files(pins)
        entries = [
            " \\\n".join([pin, *(f"    --hash=sha256:{digest}" for digest in sorted(set(found.values())))])
            for pin, found in of.items()
        ]
        return "".join(f"{entry}\n" for entry in entries)

    def files(self, pins: Sequence[str]) -> Mapping[str, Mapping[str, str]]:
        """Pin -> file name -> SHA-256, of the folder's wheels of that name and version."""
        names = sorted(path.name for path in self.folder.glob("*.whl"))
        of = {pin: [name for name in names if read_packages(pin)[0].is_of(name)] for pin in pins}
        missing = [name for found in of.values() for name in found if name not in self._hashes]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            self._hashes |= dict(
                zip(missing, pool.map(sha256_of, map(self.folder.joinpath, missing)), strict=True)
            )
        return {pin: {name: self._hashes[name] for name in found} for pin, found in of.items()}

    def _refusal(self, package: str, python: str) -> BuildError:
        return BuildError(
            "the folder of wheels lacks packages of the stack",
            where=str(self.folder),
            got=f"no wheel of {package} for Python {python}, or none of a package that it needs",
            expected="every package of the stack and all that they need, as wheels",
            next_step="copy into the folder the wheels that this command lists as absent: "
            f"stackcheck wheelhouse {self.folder} --from-environment PYTHON STACK",
        )
