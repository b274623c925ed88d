"""What `stackcheck nightly` did on this host. In: build/nightly/night.json.
Out: `NightlyFile`: its line, its warnings, and each image that was not run with its reason.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field

from stackcheck.files.border import Open, load_json


class ImageNotRun(Open):
    """An image that was not run, and why."""

    tag: str
    why: str


class NightlyFile(Open):
    """The file, as far as the report shows it."""

    schema_: Annotated[Literal[1], Field(alias="schema")]
    started: AwareDatetime
    node: str
    line: str
    warnings: tuple[str, ...]
    reboot_pending: str | None
    skipped: tuple[ImageNotRun, ...]


def load_night(path: Path) -> NightlyFile:
    """Read the file; raises `ConfigurationError` if it is another document, or of a different version."""
    return load_json(
        NightlyFile,
        path,
        "the file of the last night cannot be read",
        expected="what stackcheck nightly writes",
        next_step="run the night again: stackcheck nightly",
    )
