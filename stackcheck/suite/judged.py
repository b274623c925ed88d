"""A run of the suites with its verdict: what the flow, a night and a comparison hand on."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from stackcheck.suite import verdict

if TYPE_CHECKING:
    from pathlib import Path

    from stackcheck.suite.results import RunResult
    from stackcheck.suite.verdict import Status, Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class JudgedRun:
    """A run of the suites and its verdict.

    Attributes:
        result: What the suites measured.
        verdict: PASSED, FAILED or UNFIT, with reasons.
        folder: `build/<name>/`, with the log of the run.
        reused: Whether the result is of an earlier run, because nothing has changed since.
        record: Digest of the run's record in the history; None if it is not kept.
    """

    result: RunResult
    verdict: Verdict
    folder: Path
    reused: bool
    record: str | None = None

    def require(self, *accepted: Status) -> None:
        """Raise the error of the verdict, unless its status is one of `accepted`.

        Raises:
            MachineUnfitError: The verdict is UNFIT.
            ChecksFailedError: The verdict is FAILED.
        """
        if self.verdict.status not in accepted:
            raise verdict.refusal(self.verdict, self.folder)
