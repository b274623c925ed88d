"""The planted faults. In: what `stackcheck prove --json` printed. Out: `Campaign`: planted and caught."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import ValidationError

from stackcheck.errors import ConfigurationError
from stackcheck.files import strictjson
from stackcheck.files.border import Open

if TYPE_CHECKING:
    from pathlib import Path


class PlantedFault(Open):
    """A planted fault, the check that is to catch it, and whether it did."""

    name: str
    check: str
    state: str


class Campaign(Open):
    """All planted faults."""

    planted: int
    caught: int
    healthy_runs: int
    false_alarms: int
    faults: tuple[PlantedFault, ...]

    @property
    def suites(self) -> dict[str, list[PlantedFault]]:
        """Suite file -> its faults, the missed ones first."""
        found: dict[str, list[PlantedFault]] = {}
        for fault in sorted(self.faults, key=lambda one: (one.state == "caught", one.name)):
            found.setdefault(fault.check.partition("::")[0], []).append(fault)
        return dict(sorted(found.items()))


def load_campaign(path: Path) -> Campaign:
    """Read what `prove --json` printed.

    Raises:
        ConfigurationError: The file cannot be read, or is not such a document.
    """
    try:
        text = path.read_bytes()
        strictjson.check(text)
        return Campaign.model_validate_json(text)
    except (OSError, ValueError, RecursionError) as error:  # pydantic's error is a ValueError
        first = error.errors(include_url=False)[0] if isinstance(error, ValidationError) else None
        raise ConfigurationError(
            "the file of planted faults cannot be read",
            where=str(path),
            got=f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first else str(error),
            expected="the output of stackcheck prove --json",
            next_step="stackcheck prove --json > build/faults.json",
        ) from error
