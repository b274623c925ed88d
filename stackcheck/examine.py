"""Run the suites on a candidate and judge what they found.

In: a `Candidate`. Out: its result and verdict, and for a verdict other than PASSED the error to end with. The
suites run again only when something changed that they depend on.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

from stackcheck import sbom, suite, verdict
from stackcheck.durable import write_atomically
from stackcheck.errors import ChecksFailedError, ConfigurationError, MachineUnfitError, StackcheckError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stackcheck.candidate import Candidate, Settings
    from stackcheck.engine import Engine
    from stackcheck.results import RunResult
    from stackcheck.verdict import Verdict


def examine(
    subject: Candidate,
    engine: Engine,
    settings: Settings,
    report: Callable[[str], None],
    *,
    selection: tuple[str, ...] = (),
) -> tuple[RunResult, Verdict, bool]:
    """Run the suites, or take the earlier result when nothing changed; then judge.

    Returns:
        The result, the verdict, and whether the result is an earlier one.
    """
    out = settings.folder(subject.name)
    plan = suite.plan(
        _subject(subject),
        vendor=subject.vendor,
        tier=settings.tier,
        root=settings.root,
        out=out,
        selection=selection,
    )
    for reason in verdict.other_machine((device.model for device in plan.host.devices), subject.machines):
        report(f"{subject.name}: this run cannot end PASSED: {reason}")
    earlier = None if settings.force else suite.earlier_result(plan, out)
    if earlier is not None:
        report(f"{subject.name}: not run again: same image, suites, thresholds and host")
    result = earlier or suite.run(plan, engine, out=out, report=report)
    sbom.keep(subject.image, engine, out, report)
    judged = verdict.judge(
        result,
        subject.required,
        image_config_digest=subject.image.config_digest,
        machines=subject.machines,
        vendor=subject.vendor,
        waivers=settings.waivers,
    )
    text = json.dumps(dataclasses.asdict(judged), indent=2).encode()
    write_atomically(out / "verdict.json", (text,), failure=ConfigurationError)
    report(f"{subject.name}: {judged.status}, {len(judged.passed)} of {len(result.checks)} checks passed")
    return result, judged, earlier is not None


def refusal(judged: Verdict, folder: Path) -> StackcheckError:
    """The error that a verdict other than PASSED ends with: the first reasons, and where all of them are."""
    shown = "\n    ".join(judged.reasons[:8])
    more = f"\n    … and {len(judged.reasons) - 8} more" if len(judged.reasons) > 8 else ""
    kind = MachineUnfitError if judged.status == "UNFIT" else ChecksFailedError
    expected, next_step = "every required check passed", f"read {folder / 'container.log'}"
    if judged.status == "UNFIT" and not judged.invalid:  # no check said so: it is another machine
        expected += ", on a machine that the stack names"
        next_step = "run the same command on such a machine, or name this one under tested_on in matrix.yaml"
    return kind(
        f"the verdict is {judged.status}; nothing is published",
        got=shown + more,
        expected=expected,
        next_step=next_step,
    )


def _subject(subject: Candidate) -> suite.Subject:
    return suite.Subject(
        name=subject.name,
        reference=subject.image.reference,
        config_digest=subject.image.config_digest,
        manifest_digest=subject.image.manifest_digest,
        stack_id=subject.image.stack_id,
    )
