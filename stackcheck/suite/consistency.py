"""Check a result against what this host knows about the run; the image under test wrote the result.

In: a result, run.json, this host's own times. Out: nothing, or a `ChecksFailedError`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from stackcheck.errors import ChecksFailedError

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Mapping  # pydantic reads annotations at run time
    from pathlib import Path

    from stackcheck.suite.results import RunResult

AGAIN = "run the suites again: stackcheck test"


def refuse_other(result: RunResult, told: Mapping[str, Any], path: Path) -> None:
    """What the suites were told in run.json, they have to have written."""
    written = result.model_dump(mode="json")
    # A virtual machine's memory may grow.
    expected = {**told, "host": told["host"] | {"memory_bytes": written["host"]["memory_bytes"]}}
    for name in ("image", "inputs", "tier", "stack_id", "host"):
        if written[name] != expected[name]:
            raise ChecksFailedError(
                f"the result is about another {name.replace('_', ' ')} than the run",
                where=str(path),
                got=json.dumps(written[name])[:300],
                expected=json.dumps(expected[name])[:300],
                next_step=AGAIN,
            )


def refuse_times(result: RunResult, before: dt.datetime, after: dt.datetime, path: Path) -> None:
    """The run began and ended while its container was there; the end may be missing.

    How long a result is used again, and whether the run is later than a withdrawal, hangs on these times.
    """
    # Results are written in whole milliseconds, cut off.
    earliest = before.replace(microsecond=before.microsecond // 1000 * 1000)
    ended = result.finished or result.started
    if not earliest <= result.started <= ended <= after:
        raise ChecksFailedError(
            "the result is of another time than the run",
            where=str(path),
            got=f"{result.started.isoformat()} to {ended.isoformat()}",
            expected=f"within {earliest.isoformat()} to {after.isoformat()}, by this host's clock",
            next_step=f"see that nothing sets this host's clock back, then {AGAIN}",
        )
