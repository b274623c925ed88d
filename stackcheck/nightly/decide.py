"""What follows from the runs of one image in a night. In: what is certified; the runs. Out: a `Decision`.

Pure.

The rule behind the table: a certificate is taken back only for what it states, and never by one machine's
word alone. After a failure up to three runs decide, and two of them have to agree on the check. If that check
passed in the certificate, on the configuration that it names, by the same suites, and nothing speaks against
the machine or the suites, `policy.revoke` says who has to agree; what fails on anything new is reported.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from stackcheck.files.border import Closed
from stackcheck.nightly.fingerprint import configuration_changes
from stackcheck.suite.results import RunResult
from stackcheck.suite.verdict import Verdict

# How this host relates to the image's certificates.
Standing = Literal["same", "changed", "new driver", "new image"]
Action = Literal["repeat", "renew", "widen", "certify", "revoke", "warn", "hold", "nothing", "error"]
RunStatus = Literal["PASSED", "FAILED", "UNFIT"]
RUNS, AGREE = 3, 2  # after a failure: so many runs at most, and so many of them have to agree
THE_RUN = "the run itself"  # stands for a check, where a run that failed names none
# What ends the night well; `stackcheck nightly` ends with an error for all others.
GOOD: frozenset[Action] = frozenset({"renew", "widen", "certify"})


class Certified(Closed):
    """What an image's certificates say about this host.

    Attributes:
        standing: `same`: a certificate names this configuration. `changed`: one names this driver, and
            something else has changed. `new driver`: none names it. `new image`: it has no certificate.
    """

    standing: Standing = "same"
    changes: tuple[str, ...] = ()  # how this host differs from the nearest certificate, in words
    passed: tuple[str, ...] = ()  # the checks that this certificate names as passed
    suites: str = ""  # digest of the suites of its run; empty if it does not say


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Who has to agree before an image is revoked.

    Attributes:
        nodes: How many different nodes, this one included; None: no night revokes, a person does.
        others: Node -> the checks that fail there, of the same image on the same configuration.
    """

    nodes: int | None = 2
    others: Mapping[str, frozenset[str]] = field(default_factory=dict)


class RunOutcome(Closed):
    """One judged run of the image this night."""

    status: RunStatus
    failed: tuple[str, ...] = ()  # the checks that failed, or were skipped without an accepted reason
    reasons: tuple[str, ...] = ()
    lacks_only_bounds: bool = False  # whether missing bounds are all that keeps the run from PASSED
    slow: tuple[str, ...] = ()  # the checks with a figure far below the certified one (`floor.py`)
    unfit: tuple[str, ...] = ()  # the checks that ended invalid: evidence against the machine
    broken: tuple[str, ...] = ()  # the checks in which the suites themselves raised an exception
    suites: str = ""

    @property
    def bad(self) -> tuple[str, ...]:
        """What failed or was slow; `THE_RUN` where a failed run names no check."""
        found = tuple(dict.fromkeys((*self.failed, *self.slow)))
        return found or ((THE_RUN,) if self.status == "FAILED" else ())


class Decision(Closed):
    """What to do with an image's certificate, and why.

    Attributes:
        rollout: What must not be rolled out: `driver 6.14 -> 6.16`. Empty unless the action is `warn`.
    """

    action: Action  # what is done; `error` if no verdict was reached
    because: str
    failed: tuple[str, ...] = ()  # the failing checks, to be named to people
    rollout: tuple[str, ...] = ()
    flaky: bool = False  # whether one run failed, and two others passed; such an image is due again


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


def outcome(verdict: Verdict, result: RunResult) -> RunOutcome:
    """What counts of a verdict. A skip that was not accepted is a failure; an accepted one has no line."""
    refused = {
        name for name in verdict.skipped if any(line.startswith(f"{name} ") for line in verdict.reasons)
    }
    failed = tuple(name for name in (*verdict.failed, *sorted(refused)) if name not in verdict.warned)
    # A night asks whether an image became worse, and a certified one has met its derived bounds before.
    only_low = verdict.status == "UNFIT" and len(verdict.guessed) == len(verdict.reasons)
    return RunOutcome(
        status="FAILED" if only_low else verdict.status,
        failed=failed,
        reasons=verdict.reasons,
        lacks_only_bounds=verdict.lacks_only_bounds,
        unfit=verdict.invalid,
        broken=tuple(
            check.id for check in result.checks if check.outcome == "error" or check.cause == "exception"
        ),
        suites=result.inputs.suites,
    )


def decide(certified: Certified, runs: Sequence[RunOutcome], agreement: Agreement | None = None) -> Decision:
    """What follows from the runs of one image: one, or up to three if the first one failed."""
    last, agreed = runs[-1], _agreed(runs)
    if nothing := _nothing(runs):
        return nothing
    if len(runs) == 1 and not last.bad:
        actions: dict[Standing, tuple[Action, str]] = {
            "same": ("renew", "this configuration passed again"),
            "changed": ("renew", f"it passed with {_changes(certified)}"),
            "new driver": ("widen", f"it passed with {_changes(certified)}"),
            "new image": ("certify", "an image without a certificate passed"),
        }
        action, why = actions[certified.standing]
        return Decision(action=action, because=why)
    if agreed:
        return _failed(certified, runs, agreed, agreement or Agreement())
    if len(runs) < RUNS:
        return Decision(action="repeat", because="two of three runs have to agree", failed=runs[0].bad)
    if sum(not run.bad for run in runs) < AGREE:
        why = f"{RUNS} runs do not agree, so a person has to look: {', '.join(_named(runs))}"
        return Decision(action="hold", because=why, failed=_named(runs))
    return _passed_in_the_end(certified, runs)


def _nothing(runs: Sequence[RunOutcome]) -> Decision | None:
    """What follows where the last run says nothing of the image; None if it does."""
    last = runs[-1]
    if last.status == "UNFIT":
        why = "the machine is unfit, so nothing is concluded: " + _first(last.reasons)
        return Decision(action="nothing", because=why, failed=runs[0].bad)
    if last.lacks_only_bounds:
        why = "figures have no bound on this device model, so nothing is known to be slow"
        return Decision(action="hold", because=why, failed=last.failed)
    return None


def _agreed(runs: Sequence[RunOutcome]) -> tuple[str, ...]:
    """The checks that are bad in two of the runs."""
    counts = Counter(name for run in runs for name in run.bad)
    return tuple(name for name, count in counts.items() if count >= AGREE)


def _named(runs: Sequence[RunOutcome]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for run in runs for name in run.bad))


def _passed_in_the_end(certified: Certified, runs: Sequence[RunOutcome]) -> Decision:
    """Two of three runs passed: what is certified stays so, and nothing new is."""
    if certified.standing == "same":
        why = "two of three runs of this configuration passed: it runs again next night"
        return Decision(action="renew", because=why, failed=_named(runs), flaky=True)
    where = _changes(certified) or "no certificate"
    why = f"it failed once and passed twice with {where}: it runs again next night"
    return Decision(action="hold", because=why, failed=_named(runs), flaky=True)


def _failed(
    certified: Certified, runs: Sequence[RunOutcome], agreed: tuple[str, ...], agreement: Agreement
) -> Decision:
    named = ", ".join(agreed) if agreed != (THE_RUN,) else _first(runs[-1].reasons)
    if certified.standing == "new image":
        why = f"an image without a certificate failed twice: {named}"
        return Decision(action="hold", because=why, failed=agreed)
    if certified.standing != "same":
        why = f"it failed twice with {_changes(certified)}: {named}"
        return Decision(action="warn", because=why, failed=agreed, rollout=certified.changes)
    bad = [run for run in runs if run.bad]
    broken = {name for run in bad for name in run.broken}  # by the suites, so it says nothing of the image
    lost = tuple(name for name in agreed if name in certified.passed and name not in broken)
    doubt = _doubt(certified, bad, lost, named) or _alone(lost, agreement)
    if doubt:
        return Decision(action="hold", because=f"a person has to decide: {doubt}", failed=agreed)
    why = f"it failed twice on the certified configuration: {', '.join(lost)}"
    return Decision(action="revoke", because=why, failed=agreed)


def _doubt(certified: Certified, bad: Sequence[RunOutcome], lost: tuple[str, ...], named: str) -> str | None:
    """Why two failures say nothing certain about the image; None if they do."""
    if not lost and any(run.broken for run in bad):
        return f"the suites themselves raised an exception: {named}"
    if not lost:
        return f"what failed twice is not in the certificate: {named}"
    if any(run.suites != certified.suites for run in bad):
        return f"other suites than the certificate's failed it twice: {named}"
    if against := sorted({name for run in bad for name in run.unfit}):
        return f"it failed twice, and {', '.join(against)} found the machine unfit: {named}"
    return None


def _alone(lost: Sequence[str], agreement: Agreement) -> str | None:
    """Why the nodes that agree are not enough to revoke; None if they are."""
    named = ", ".join(lost)
    if agreement.nodes is None:
        return f"policy.revoke is report, and it failed twice: {named}"
    agreeing = 1 + sum(not failed.isdisjoint(lost) for failed in agreement.others.values())
    if agreeing < agreement.nodes:
        return f"it failed twice, on {agreeing} of the {agreement.nodes} nodes that revoke: {named}"
    return None


def _changes(certified: Certified) -> str:
    return " and ".join(certified.changes)


def _first(reasons: Sequence[str]) -> str:
    return reasons[0] if reasons else "no reason is given"
