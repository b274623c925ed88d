"""The newest run of a stack, as its files tell. In: `build/<name>/`. Out: tier and verdict, or None.

Cheap: `stackcheck list` asks it for every stack. A damaged file counts as no run.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

from stackcheck.policy import Tier, is_enough
from stackcheck.suite.verdict import Status

TESTED = "tested"  # the state of a stack whose newest run is of a lower tier than the policy's
CANNOT_CERTIFY = "its state is `tested`, and it can never be published as certified"


@dataclass(frozen=True, kw_only=True)
class LastRun:
    """A run that ended with a verdict."""

    tier: Tier
    verdict: Status

    def certifies(self, needed: Tier) -> bool:
        """Whether a run of this tier can certify."""
        return is_enough(self.tier, needed)


def last_run(folder: Path) -> LastRun | None:
    """The newest run in a folder of a stack; None if it was never judged."""
    tier, verdict = _value(folder / "key.json", "tier"), _value(folder / "verdict.json", "status")
    if tier not in get_args(Tier) or verdict not in get_args(Status):
        return None
    return LastRun(tier=cast("Tier", tier), verdict=cast("Status", verdict))


def _value(path: Path, name: str) -> object:
    try:
        read: Any = json.loads(path.read_bytes())
        return read[name]
    except (OSError, ValueError, KeyError, TypeError):
        return None
