"""`wheelhouse.json`: where each wheel of a folder comes from.

In: a folder that `stackcheck wheelhouse` has filled. Out: for each file its hash and its origin.
`environment`: made from an installed distribution, every file as its RECORD says; no index has this hash.
`given`: it was in the folder before.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Literal

from stackcheck.errors import ConfigurationError
from stackcheck.files.atomic import write_atomically
from stackcheck.files.border import Closed, load_json

NAME = "wheelhouse.json"


class Wheel(Closed):
    """One file of the folder."""

    file: str
    name: str
    version: str
    sha256: str
    origin: Literal["environment", "given"]
    record: str | None = None  # SHA-256 of the RECORD that its files were held to; None if it was given


class WheelSource(Closed):
    """The environment that wheels were made from."""

    python: str
    platform: str


class Origins(Closed):
    """The whole file."""

    schema_version: Literal[1] = 1
    environment: WheelSource
    wheels: tuple[Wheel, ...]

    def of(self, digests: Collection[str]) -> Origins:
        """The same for the wheels with these hashes alone."""
        return self.model_copy(update={"wheels": tuple(w for w in self.wheels if w.sha256 in digests)})

    def words(self) -> str:
        """One sentence for people: a certificate has it."""
        counted = Counter(wheel.origin for wheel in self.wheels)
        made = (
            f"{counted['environment']} wheels made from the distributions installed in an environment "
            f"(Python {self.environment.python}), each file as its RECORD says"
        )
        given = f"; {counted['given']} wheels as they were given" if counted["given"] else ""
        return f"{made}{given}; their hashes are not those of an index"


def require_folder(folder: Path) -> None:
    """Refuse a folder of wheels that does not exist.

    Raises:
        ConfigurationError: It is not a folder.
    """
    if not folder.is_dir():
        raise ConfigurationError(
            "there is no such folder of wheels",
            where=str(folder),
            got="a file" if folder.exists() else "nothing",
            expected="a folder",
            next_step="name an existing folder, or leave --wheelhouse out",
        )


def load_origins(folder: Path) -> Origins | None:
    """What `stackcheck wheelhouse` wrote about a folder; None if it did not make the folder.

    Raises:
        ConfigurationError: The file is damaged.
    """
    path = folder / NAME
    if not path.is_file():
        return None
    return load_json(
        Origins,
        path,
        "the list of a wheelhouse is damaged",
        expected="the file that `stackcheck wheelhouse` writes",
        next_step="stackcheck wheelhouse DIR --from-environment PYTHON, again",
    )


def text(origins: Origins) -> bytes:
    """The file's bytes."""
    return (json.dumps(origins.model_dump(mode="json"), indent=1) + "\n").encode()


def save(folder: Path, origins: Origins) -> None:
    """Write the list of a folder."""
    write_atomically(folder / NAME, (text(origins),))
