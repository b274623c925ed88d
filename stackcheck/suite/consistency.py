"""Check that a result belongs to the run that this host started; the image under test wrote the result.

In: a result, the content of run.json, the times of the container. Out: nothing, or a `ChecksFailedError`.
"""

import datetime as dt
import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stackcheck.errors import ChecksFailedError
from stackcheck.suite.results import RunResult

NOT_GOOD = ("failed", "error", "invalid")  # pytest counts each of them as a failure
SIGNALLED = 128  # a program that signal N ended has exit code 128 + N in a container
RUN_AGAIN = "run the suites again: stackcheck test"


def require_same_run(result: RunResult, run_file: Mapping[str, Any], path: Path) -> None:
    """Refuse a result whose image, inputs, tier, stack or host are not those of run.json.

    Raises:
        ChecksFailedError: With the first field that differs.
    """
    written = result.model_dump(mode="json", include={"image", "inputs", "tier", "stack_id", "host"})
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


def require_interpreter(result: RunResult, found: Mapping[str, Any], path: Path) -> None:
    """Refuse a result that another Python wrote than the one that this host found in the image and started.

    Raises:
        ChecksFailedError: The result names another one, or none; or it does not say which devices it saw.
    """
    if result.seen_devices is None:
        raise ChecksFailedError(
            "result.json does not say which devices the suites saw",
            where=str(path),
            expected="seen_devices, the ids of the devices in the container",
            next_step=RUN_AGAIN,
        )
    reported = result.interpreter.model_dump(exclude_defaults=True) if result.interpreter else None
    if reported != found:
        raise ChecksFailedError(
            "result.json was written by another Python than the one that this host started",
            where=str(path),
            got=json.dumps(reported),
            expected=json.dumps(found),
            next_step="look for a program in the image that starts another Python in its place",
        )


def require_exit_code(result: RunResult, code: int, path: Path) -> None:
    """Refuse a result if its container did not end as pytest ends after these outcomes.

    https://docs.pytest.org/en/stable/reference/exit-codes.html: 0, everything passed; 1, something failed.

    Raises:
        ChecksFailedError: The container ended in another way: by a signal, by an error of pytest.
    """
    bad = sum(check.outcome in NOT_GOOD for check in result.checks)
    fitting = 1 if bad else 0
    if code == fitting:
        return
    ended = code not in {0, 1}
    raise ChecksFailedError(
        "the container was killed or ended early, so its result does not count"
        if ended
        else "the container's exit code contradicts its result",
        where=str(path),
        got=f"exit code {code}{signal_of(code)}; {bad} of {len(result.checks)} checks did not pass",
        expected=f"exit code {fitting}: pytest's, {'some' if bad else 'no'} check failed",
        next_step=_after(code, path),
    )


def signal_of(code: int) -> str:
    """Which signal an exit code stands for, in words; empty for other codes."""
    try:
        name = signal.Signals(code - SIGNALLED).name if code > SIGNALLED else ""
    except ValueError:
        return ""
    hint = ", as the kernel does when memory runs out" if code == SIGNALLED + signal.SIGKILL else ""
    return f" ({name}{hint})" if name else ""


def _after(code: int, path: Path) -> str:
    log = path.parent.with_name("container.log")
    if code == SIGNALLED + signal.SIGKILL:
        return f"see who killed it: dmesg | grep -i 'out of memory'; read {log}; then {RUN_AGAIN}"
    return f"read {log}; then {RUN_AGAIN}"


def require_times_within(result: RunResult, before: dt.datetime, after: dt.datetime, path: Path) -> None:
    """Refuse a result whose times lie outside those of its container; the end of the run may be missing.

    The tool relies on these times for how long a result may be used again, and for whether a run is later
    than a revocation.

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
