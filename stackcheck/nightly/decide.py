"""What follows from the runs of one image in a night. In: what is certified; the runs. Out: a `Decision`.

Pure.

The rule behind the table: a certificate is taken back only for what it states. So an image is revoked if a
check that its certificate names as passed fails twice on the configuration that the certificate names; what
fails on anything new is reported, and nobody is told to use it there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from stackcheck.nightly.fingerprint import configuration_changes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from stackcheck.suite.verdict import Verdict

# How this host relates to the image's certificates.
Standing = Literal["same", "changed", "new driver", "new image"]
Action = Literal["repeat", "renew", "widen", "certify", "revoke", "warn", "hold", "nothing"]
RunStatus = Literal["PASSED", "FAILED", "UNFIT"]
# What ends the night well; `stackcheck nightly` ends with an error for all others.
GOOD: frozenset[Action] = frozenset({"renew", "widen", "certify"})


@dataclass(frozen=True, kw_only=True)
class Certified:
    """What an image's certificates say about this host.

    Attributes:
        standing: `same`: a certificate names this configuration. `changed`: one names this driver, and
            something else has changed. `new driver`: none names it. `new image`: it has no certificate.
        changes: How this host differs from the nearest certificate, in words.
        passed: The checks that this certificate names as passed.
    """

    standing: Standing
    changes: tuple[str, ...] = ()
    passed: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """One judged run of the image this night.

    Attributes:
        failed: The checks that failed, or were skipped without an accepted reason.
        reasons: The verdict's reasons.
        lacks_only_bounds: Whether missing bounds are all that keeps the run from PASSED.
        slow: The checks with a figure far below the certified one (`floor.py`).
    """

    status: RunStatus
    failed: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    lacks_only_bounds: bool = False
    slow: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do with an image's certificate, and why.

    Attributes:
        because: One sentence.
        failed: The failing checks, to be named to people.
        rollout: What must not be rolled out: `driver 6.14 -> 6.16`. Empty unless the action is `warn`.
        flaky: Whether the image failed once and passed the repeat.
    """

    action: Action
    because: str
    failed: tuple[str, ...] = ()
    rollout: tuple[str, ...] = ()
    flaky: bool = False


def standing(
    hosts: Sequence[Mapping[str, Any]], here: Mapping[str, Any]
) -> tuple[Standing, tuple[str, ...], int]:
    """How this host relates to an image's certificates, how it differs from the nearest, and which that is.

    Args:
        hosts: The `host` object of each PASSED certificate, the newest first; at least one.
        here: The same of this host.
    """
    differences = [tuple(configuration_changes(host, here)) for host in hosts]
    if () in differences:
        return "same", (), differences.index(())
    for index, host in enumerate(hosts):
        if host["driver"] == here["driver"]:
            return "changed", differences[index], index
    return "new driver", differences[0], 0


def outcome(verdict: Verdict) -> RunOutcome:
    """What counts of a verdict. A skip that was not accepted is a failure; an accepted one has no line."""
    refused = {
        name for name in verdict.skipped if any(line.startswith(f"{name} ") for line in verdict.reasons)
    }
    failed = tuple(name for name in (*verdict.failed, *sorted(refused)) if name not in verdict.warned)
    return RunOutcome(
        status=verdict.status,
        failed=failed,
        reasons=verdict.reasons,
        lacks_only_bounds=verdict.lacks_only_bounds,
    )


def decide(certified: Certified, runs: Sequence[RunOutcome]) -> Decision:
    """What follows from the runs of one image: one, or two if the first one failed."""
    last = runs[-1]
    if last.status == "UNFIT":
        why = "the machine is unfit, so nothing is concluded: " + _first(last.reasons)
        return Decision(action="nothing", because=why, failed=_bad(runs[0]))
    if last.status == "PASSED" and not _slow(runs):
        return _passed(certified, runs)
    if last.lacks_only_bounds:
        why = "figures have no bound on this device model, so nothing is known to be slow"
        return Decision(action="hold", because=why, failed=last.failed)
    if len(runs) == 1:
        return Decision(action="repeat", because="a failure counts if it repeats", failed=_bad(last))
    return _failed_twice(certified, runs)


def _passed(certified: Certified, runs: Sequence[RunOutcome]) -> Decision:
    flaky, failed = len(runs) > 1, _bad(runs[0])
    if certified.standing == "same":
        why = "this configuration passed again" + (" on the repeat, after one failure" if flaky else "")
        return Decision(action="renew", because=why, failed=failed, flaky=flaky)
    if flaky:  # one failure and one pass: neither decides
        why = f"it failed once and passed once with {_changes(certified)}: it runs again next night"
        return Decision(action="hold", because=why, failed=failed, flaky=True)
    actions: dict[Standing, tuple[Action, str]] = {
        "changed": ("renew", f"it passed with {_changes(certified)}"),
        "new driver": ("widen", f"it passed with {_changes(certified)}"),
        "new image": ("certify", "an image without a certificate passed"),
    }
    action, why = actions[certified.standing]
    return Decision(action=action, because=why)


def _failed_twice(certified: Certified, runs: Sequence[RunOutcome]) -> Decision:
    failed = tuple(dict.fromkeys((*(name for run in runs for name in run.failed), *_slow(runs))))
    named = ", ".join(failed) or _first(runs[-1].reasons)
    if certified.standing == "new image":
        why = f"an image without a certificate failed twice: {named}"
        return Decision(action="hold", because=why, failed=failed)
    if certified.standing != "same":
        why = f"it failed twice with {_changes(certified)}: {named}"
        return Decision(action="warn", because=why, failed=failed, rollout=certified.changes)
    lost = tuple(name for name in failed if name in certified.passed)
    if not lost:
        why = f"what failed twice is not in the certificate, so a person has to decide: {named}"
        return Decision(action="hold", because=why, failed=failed)
    why = f"it failed twice on the certified configuration: {', '.join(lost)}"
    return Decision(action="revoke", because=why, failed=failed)


def _slow(runs: Sequence[RunOutcome]) -> tuple[str, ...]:
    """The checks that are far below their certified figures in every run of the night."""
    return tuple(name for name in runs[0].slow if all(name in run.slow for run in runs))


def _bad(run: RunOutcome) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*run.failed, *run.slow)))


def _changes(certified: Certified) -> str:
    return " and ".join(certified.changes)


def _first(reasons: Sequence[str]) -> str:
    return reasons[0] if reasons else "no reason is given"
