"""What `stackcheck nightly` did on this host. In: build/nightly/night.json.
Out: `NightlyFile`: its line, its warnings, and each image that was not run with its reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AwareDatetime, Field, ValidationError

from stackcheck.errors import ConfigurationError
from stackcheck.files.border import Open

if TYPE_CHECKING:
    from pathlib import Path


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
    """Read the file.

    Raises:
        ConfigurationError: It cannot be read, or is of a different version.
    """
    try:
        return NightlyFile.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        first = error.errors(include_url=False)[0] if isinstance(error, ValidationError) else None
        raise ConfigurationError(
            "the file of the last night cannot be read",
            where=str(path),
            got=f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first else str(error),
            expected="what stackcheck nightly writes",
            next_step="run the night again: stackcheck nightly",
        ) from error
