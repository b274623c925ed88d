"""Check that a result belongs to the run that this host started; the image under test wrote the result.

In: a result, the content of run.json, the times of the container. Out: nothing, or a `ChecksFailedError`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from stackcheck.errors import ChecksFailedError

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Mapping
    from pathlib import Path

    from stackcheck.suite.results import RunResult

RUN_AGAIN = "run the suites again: stackcheck test"


def require_same_run(result: RunResult, run_file: Mapping[str, Any], path: Path) -> None:
    """Refuse a result whose image, inputs, tier, stack or host are not those of run.json.

    Args:
        result: What the suites wrote.
        run_file: The content of run.json, which the suites were given.
        path: Where the result is, for messages.

    Raises:
        ChecksFailedError: With the first field that differs.
    """
    written = result.model_dump(mode="json")
    # A virtual machine's memory may grow.
    expected = {**run_file, "host": run_file["host"] | {"memory_bytes": written["host"]["memory_bytes"]}}
    for name in ("image", "inputs", "tier", "stack_id", "host"):
        if written[name] != expected[name]:
            raise ChecksFailedError(
                f"{name} in result.json differs from run.json",
                where=str(path),
                got=json.dumps(written[name])[:300],
                expected=json.dumps(expected[name])[:300],
                next_step=RUN_AGAIN,
            )


def require_times_within(result: RunResult, before: dt.datetime, after: dt.datetime, path: Path) -> None:
    """Refuse a result whose times lie outside those of its container; the end of the run may be missing.

    The tool relies on these times for how long a result may be used again, and for whether a run is later
    than a revocation.

    Args:
        result: What the suites wrote.
        before: This host's time before the container started.
        after: This host's time after the container ended.
        path: Where the result is, for messages.

    Raises:
        ChecksFailedError: The result began before the container or ended after it.
    """
    # Results have whole milliseconds, rounded down.
    earliest = before.replace(microsecond=before.microsecond // 1000 * 1000)
    ended = result.finished or result.started
    if not earliest <= result.started <= ended <= after:
        raise ChecksFailedError(
            "the times in result.json lie outside the run",
            where=str(path),
            got=f"{result.started.isoformat()} to {ended.isoformat()}",
            expected=f"within {earliest.isoformat()} to {after.isoformat()}, by this host's clock",
            next_step=f"make sure that nothing sets this host's clock back, then {RUN_AGAIN}",
        )
