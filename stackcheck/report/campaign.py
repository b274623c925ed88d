"""The planted faults. In: what `stackcheck prove --json` printed. Out: `Campaign`: planted and caught."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from stackcheck.errors import ConfigurationError
from stackcheck.files import strictjson

if TYPE_CHECKING:
    from pathlib import Path


class _Fault(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)
    name: str
    check: str
    vendor: str
    state: str


class _CampaignFile(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)
    planted: int
    caught: int
    healthy_runs: int
    false_alarms: int
    faults: tuple[_Fault, ...]


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The faults of one suite file: name and state of each, the missed ones first."""

    name: str
    faults: tuple[tuple[str, str], ...]

    @property
    def caught(self) -> int:
        """How many of them a check caught."""
        return Counter(state for _, state in self.faults)["caught"]


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """All planted faults, by suite."""

    planted: int
    caught: int
    healthy_runs: int
    false_alarms: int
    suites: tuple[Suite, ...]


def load(path: Path) -> Campaign:
    """Read what `prove --json` printed.

    Raises:
        ConfigurationError: The file cannot be read, or is not such a document.
    """
    try:
        text = path.read_bytes()
        strictjson.check(text)
        found = _CampaignFile.model_validate_json(text)
    except (OSError, ValueError, RecursionError) as error:  # pydantic's error is a ValueError
        first = error.errors(include_url=False)[0] if isinstance(error, ValidationError) else None
        raise ConfigurationError(
            "the file of planted faults cannot be read",
            where=str(path),
            got=f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first else str(error),
            expected="the output of stackcheck prove --json",
            next_step="stackcheck prove --json > build/faults.json",
        ) from error
    return Campaign(
        planted=found.planted,
        caught=found.caught,
        healthy_runs=found.healthy_runs,
        false_alarms=found.false_alarms,
        suites=_suites(found),
    )


def _suites(found: _CampaignFile) -> tuple[Suite, ...]:
    suites: dict[str, list[tuple[str, str]]] = {}
    for fault in found.faults:
        suites.setdefault(fault.check.partition("::")[0], []).append((fault.name, fault.state))
    return tuple(
        Suite(name=name, faults=tuple(sorted(faults, key=lambda item: (item[1] == "caught", item[0]))))
        for name, faults in sorted(suites.items())
    )
