"""Some checks alone, while somebody works on them: no verdict, nothing kept.

In: a subject; pytest's -k, or none for what failed last time. Out: `SomeChecks`.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from stackcheck.engine.client import Engine
from stackcheck.errors import NothingSelectedError, StackcheckError
from stackcheck.policy import Tier
from stackcheck.suite import results, run
from stackcheck.suite.expected import expression
from stackcheck.suite.judged import measure
from stackcheck.suite.results import RunResult
from stackcheck.suite.subject import Subject

FOLDER = "some"  # beside the whole run, whose result stays
GOOD = ("passed", "skipped")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SomeChecks:
    """What ran: the expression, the result, and where it is."""

    only: str
    result: RunResult
    file: Path


def run_some(
    subject: Subject,
    engine: Engine,
    *,
    only: str | None,
    tier: Tier,
    root: Path,
    out: Path,
    report: Callable[[str], None],
) -> SomeChecks:
    """Run the checks that `only` (pytest's -k) names; None: those that failed in the newest run in `out`.

    Raises:
        NothingSelectedError: There is no run whose failures could be run again, or nothing failed in it.
        ChecksFailedError: The run has no valid result.
    """
    chosen = only or expression(last_failed(out))
    folder = out / FOLDER
    plan = run.plan(subject, tier=tier, root=root, out=folder)
    result = measure(plan, engine, out=folder, report=report, only=chosen)
    return SomeChecks(only=chosen, result=result, file=folder / "run" / "result.json")


def last_failed(out: Path) -> list[str]:
    """Ids of the checks that did not pass in the newest run in a folder, whole or of some checks.

    Raises:
        NothingSelectedError: There is no readable run, or nothing failed in it.
    """
    files = [path for path in (out / "run/result.json", out / FOLDER / "run/result.json") if path.is_file()]
    bad: list[str] = []
    if files:
        newest = max(files, key=lambda path: path.stat().st_mtime)
        try:
            checks = results.parse(results.read_result_file(newest), where=str(newest)).checks
        except StackcheckError as error:
            raise NothingSelectedError(
                "the last run cannot be read", where=str(newest), got=error.what
            ) from error
        bad = [check.id for check in checks if check.outcome not in GOOD]
    if not bad:
        raise NothingSelectedError(
            "no check failed last time" if files else "nothing ran yet",
            where=str(out),
            next_step="leave --last-failed out, or choose checks with -k",
        )
    return bad
