"""One more run of an image that is published. In: a subject. Out: a judged run, in a folder of the night.

`build/<name>/` is about the image that was built here, which may be a newer one: a night does not touch it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stackcheck import flow
from stackcheck.suite import needed, run, sbom
from stackcheck.suite.judged import JudgedRun

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stackcheck.nightly.act import Workplace
    from stackcheck.suite.results import RunResult
    from stackcheck.suite.subject import Subject


def judged_run(
    subject: Subject, place: Workplace, folder: Path, finished: Callable[[RunResult], bool]
) -> JudgedRun:
    """Run the suites and judge the result; an image from elsewhere must have what the suites need.

    Args:
        subject: The image under test.
        place: The engine and the settings.
        folder: For the files of the run.
        finished: Whether the result in `folder` is the run that is asked for (after an interruption).

    Raises:
        ChecksFailedError: The image lacks what the suites need, or the run has no valid result.
    """
    settings, report = place.settings.flow, place.report
    plan = flow.plan_run(subject, settings, folder)
    earlier = run.earlier_result(plan, folder)
    kept = earlier if earlier and finished(earlier) else None
    if subject.stack is None and kept is None:
        accepted = subject.accepted_python
        packages = sbom.load_or_create(subject.image, place.engine, folder, report, accepted=accepted)
        needed.require(packages, subject, place.engine)
    result = kept or run.run(plan, place.engine, out=folder, report=report)
    judged = flow.judge_run(plan, result, settings.root, folder)
    report(f"{subject.name}: {judged.words(len(result.checks))}")
    return JudgedRun(result=result, verdict=judged, folder=folder, reused=kept is not None)
