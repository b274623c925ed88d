"""Play a night: run each image that is due, judge it, record it, and act on its certificate.

In: settings, an engine, a history. Out: a finished `Plan`. The plan is written after each step, so a night
that a power cut ended is continued with the first step that is not finished. Each step may be repeated.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from stackcheck.engine.client import Engine
from stackcheck.errors import ChecksFailedError, FileError, MachineUnfitError, StackcheckError
from stackcheck.history import alerts
from stackcheck.history.runs import Query, Run
from stackcheck.nightly import act, floor, planning, state
from stackcheck.nightly.act import Workplace
from stackcheck.nightly.decide import GOOD, Agreement, Decision, decide, outcome
from stackcheck.nightly.fingerprint import Fingerprint
from stackcheck.nightly.planning import NightSettings
from stackcheck.nightly.state import Ended, Item, JudgedStep, LastNight, Plan
from stackcheck.oci.documents import sha256
from stackcheck.suite.judged import JudgedRun, run_and_judge
from stackcheck.suite.results import RunResult
from stackcheck.suite.subject import Subject

if TYPE_CHECKING:
    from stackcheck.history.history import History

FOLDER = "build/nightly"
RUNS = "runs"


def folder_of(root: Path) -> Path:
    """Where the nights of a checkout keep their files."""
    return root / FOLDER


def case_seed(started: dt.datetime) -> int:
    """The seed of a night's generated cases: its day, so that all nodes and all runs of a night agree."""
    return started.astimezone(dt.UTC).toordinal()


def begin(settings: NightSettings, engine: Engine, report: Callable[[str], None]) -> Plan:
    """The plan of this night: the unfinished one, if it is still about this host, or a new one."""
    folder = folder_of(settings.flow.root)
    plan = state.load_state(folder / state.PLAN, Plan)
    if plan:
        here, _ = planning.read_host(settings)
        stale = state.is_stale(plan, here, settings.flow.target, settings.clock())
        if stale is None:
            report(f"continuing the night {plan.night}, which was interrupted")
            return plan
        report(f"the unfinished night {plan.night} is given up: {stale}")
    last = state.load_state(folder / state.LAST_NIGHT, LastNight)
    return _saved(planning.make(settings, last, engine), folder)


def play(
    plan: Plan, settings: NightSettings, engine: Engine, history: History, report: Callable[[str], None]
) -> Plan:
    """Run and settle every image of a plan that is not settled yet.

    Raises:
        FileError: The disk is full; the night can be continued when it is not.
    """
    stage = _Stage(plan, Workplace(settings=settings, engine=engine, report=report), history)
    for item in plan.items:
        if item.ended is None:
            stage.settle(item)
    return stage.plan


def finish(plan: Plan, settings: NightSettings) -> None:
    """Keep what the next night needs; from here on this night is over."""
    folder = folder_of(settings.flow.root)
    if plan.reboot_pending is None:  # else the host was not validated: the next night is still the first
        unsettled = {
            item.key: item.ended.because
            for item in plan.items
            if item.ended and (item.ended.flaky or item.ended.action not in GOOD | {"revoke"})
        }
        postponed = {skip.postponed: skip.why for skip in plan.skipped if skip.postponed}
        kept = LastNight(
            ended=settings.clock(),
            fingerprint=plan.fingerprint,
            unsettled=postponed | unsettled,
            foreign=plan.foreign,
        )
        state.save(folder / state.LAST_NIGHT, kept)
    (folder / state.PLAN).unlink(missing_ok=True)


def _saved(plan: Plan, folder: Path) -> Plan:
    state.save(folder / state.PLAN, plan)
    return plan


class _Stage:
    """One night while it is played."""

    def __init__(self, plan: Plan, place: Workplace, history: History) -> None:
        self.plan = plan
        self._place = place
        self._history = history
        self._report = place.report
        self._folder = folder_of(place.settings.flow.root)

    def settle(self, item: Item) -> None:
        """Bring one image to its end. What the user has to mend for all images ends the night instead."""
        self._report(f"{item.tag}: due: {'; '.join(item.reasons)}")
        try:
            item, ended = self._settled(item)
        except FileError:
            raise
        except StackcheckError as error:
            because = " ".join(part for part in (error.what, error.got and f"({error.got})") if part)
            ended = Ended(action="error", because=because, exit_code=error.exit_code)
        self._report(f"{item.tag}: {ended.action}: {ended.because}")
        self._keep(item.model_copy(update={"ended": ended}))

    def _settled(self, item: Item) -> tuple[Item, Ended]:
        subject = act.subject_of(item, self.plan, self._place)
        judged: JudgedRun | None = None
        while True:
            decision = self._decision(item) if item.runs else None
            if decision is None or decision.action == "repeat":
                item, judged = self._run(item, subject)
                continue
            if decision.action in GOOD and judged is None:  # this night was interrupted after the run
                item, judged = self._found_again(item, subject)
                continue
            return item, self._act(item, subject, decision, judged)

    def _decision(self, item: Item) -> Decision:
        others = _failed_elsewhere(item, self.plan, self._history) if len(item.runs) > 1 else {}
        return decide(item, item.runs, Agreement(nodes=self.plan.revoke_nodes, others=others))

    def _run(self, item: Item, subject: Subject) -> tuple[Item, JudgedRun]:
        """One more run of the image; the one of this night that was not yet recorded, if there is one."""
        seen = {step.run_id for step in item.runs}
        judged = self._judged(
            item, subject, lambda run: run.started >= self.plan.started and run.run_id not in seen
        )
        item = item.model_copy(update={"runs": (*item.runs, self._recorded(item, judged))})
        self._keep(item)
        return item, judged

    def _found_again(self, item: Item, subject: Subject) -> tuple[Item, JudgedRun]:
        """The last run of an interrupted night; if its files are gone, a new run in place of all."""
        run_id = item.runs[-1].run_id
        judged = self._judged(item, subject, lambda run: run.run_id == run_id)
        if judged.result.run_id != run_id:
            item = item.model_copy(update={"runs": (self._recorded(item, judged),)})
            self._keep(item)
        return item, judged

    def _judged(self, item: Item, subject: Subject, finished: Callable[[RunResult], bool]) -> JudgedRun:
        """A run of the image: the one that `finished` finds in its folder, or a new one."""
        settings = self._place.settings.flow
        return run_and_judge(
            subject,
            self._place.engine,
            tier=settings.tier_of(subject),
            root=settings.root,
            out=self._folder / RUNS / item.tag,  # `build/<name>/` is about an image that was built here
            report=self._report,
            reuse=finished,
            case_seed=case_seed(self.plan.started),
        )

    def _recorded(self, item: Item, judged: JudgedRun) -> JudgedStep:
        # The end of the run, and not this moment: a step that is repeated has to say the same.
        now = judged.result.finished or judged.result.started
        body = (judged.folder / "run" / "result.json").read_bytes()
        host = judged.result.host.model_dump(mode="json")
        record = self._history.append(body, judged.verdict.as_json(), host, source="nightly", judged=now)
        found, slow = outcome(judged.verdict, judged.result), floor.below(item.figures, judged.result)
        kept = self._history.of_result(sha256(body))
        return JudgedStep(
            **found.model_dump(exclude={"slow"}),
            run_id=judged.result.run_id,
            record=record,
            judged=now,
            slow=tuple(slow),
            slow_words=tuple(slow.values()),
            warnings=tuple(each.words for each in alerts.look(self._history, kept)) if kept else (),
        )

    def _act(self, item: Item, subject: Subject, decision: Decision, judged: JudgedRun | None) -> Ended:
        done = ""
        if decision.action == "hold" and item.standing == "same" and decision.failed:
            done = f"; to take it back: stackcheck revoke {item.reference} --reason TEXT"
        if decision.action == "revoke":
            done = act.revoke(item, decision, self._place)
        elif decision.action in GOOD:
            assert judged is not None
            done = act.certify(item, subject, judged, self._place)
        if item.image_id and decision.action == "certify":
            foreign = {**self.plan.foreign, item.reference: item.image_id}
            self.plan = self.plan.model_copy(update={"foreign": foreign})
        changed = decision.model_copy(update={"because": decision.because + done})
        return Ended(**changed.model_dump(), exit_code=_exit_code(decision))

    def _keep(self, item: Item) -> None:
        self.plan = _saved(self.plan.with_item(item), self._folder)


def _exit_code(decision: Decision) -> int:
    if decision.action in GOOD:
        return 0
    return MachineUnfitError.exit_code if decision.action == "nothing" else ChecksFailedError.exit_code


SINCE = dt.timedelta(days=7)  # a certificate is renewed at least that often by default
TWICE = 2  # on another node too, one failure is no failure


def _failed_elsewhere(item: Item, plan: Plan, history: History) -> dict[str, frozenset[str]]:
    """The checks that failed twice on each other node of this device model and driver, in these days.

    The history that nodes share (`history:` in matrix.yaml) is how they hear of each other. Nodes that share
    none never agree, and then a person decides.
    """
    asked = Query(status="FAILED", since=plan.started - SINCE)
    counts: dict[str, Counter[str]] = {}
    for run in history.runs(asked):
        if run.node != plan.node and _is_about(run, item, plan.fingerprint):
            counts.setdefault(run.node, Counter()).update(run.failed)
    return {
        node: frozenset(name for name, count in failed.items() if count >= TWICE)
        for node, failed in counts.items()
    }


def _is_about(run: Run, item: Item, here: Fingerprint) -> bool:
    """Whether a real run was of this image on such a machine, and found no fault of its machine."""
    machine = (run.device_model, run.device_count, run.driver)
    alike = machine == (here.device_model, len(here.devices), here.driver)
    unfit = any(" invalid: " in reason for reason in run.reasons)
    return alike and run.image in {item.digest, item.config_digest} and not (unfit or run.simulated)
