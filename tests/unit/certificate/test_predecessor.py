"""A run is held to its stack's best certified figures: a loss of 5 % fails, renewals never lower them."""

import dataclasses
import datetime as dt
import runpy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import result_files
from small_dist import release
from small_images import NOW, STACK_ID, SmallImage, judged_run, make_image, new_key, sbom_of
from stackcheck.certificate import predecessor, predicates
from stackcheck.certificate.statement import VSA, Statement
from stackcheck.errors import ConfigurationError
from stackcheck.oci.documents import RegistryError
from stackcheck.suite import results
from stackcheck.suite.results import RunResult
from stackcheck.suite.subject import Provenance
from stackcheck.suite.verdict import Verdict

ROOT = Path(__file__).parents[3]
RUN = results.load_result(ROOT / "docs" / "results" / "stack-h200-x2-fa4" / "result.json")
GATES = runpy.run_path(str(ROOT / "benchmarks" / "speed_gates.py"))
RUNS = [GATES["figures"](name) for name in GATES["FILES"]]
MONTH = dt.timedelta(days=30)

pytestmark = pytest.mark.usefixtures("no_disk_flushes")


@pytest.fixture(scope="module")
def stack(tmp_path_factory) -> SmallImage:
    return make_image(tmp_path_factory.mktemp("stack") / "oci")


def slower(run: RunResult, share: float, only: str | None = None) -> RunResult:
    """The run with each figure, or those of one name and check, slower by a share."""

    def moved(check: Any, metric: Any) -> Any:
        direction = metric.direction or predecessor.OWN.get(metric.name)
        if metric.value is None or direction is None or (only and f"{check.id} {metric.name}" != only):
            return metric
        rate = 1 - share if direction == "min" else 1 / (1 - share)
        return metric.model_copy(update={"value": metric.value * rate})

    checks = tuple(
        check.model_copy(update={"metrics": tuple(moved(check, metric) for metric in check.metrics)})
        for check in run.checks
    )
    return run.model_copy(update={"checks": checks})


def passed(image: SmallImage, **changes: Any) -> Verdict:
    _, verdict = judged_run(image, host=result_files.host())
    return dataclasses.replace(verdict, **({"status": "PASSED", "reasons": ()} | changes))


def certificate(image: SmallImage, run: RunResult, verdict: Verdict, now: dt.datetime = NOW) -> Statement:
    provenance = Provenance(parameters={"stack": STACK_ID}, started=now)
    made = predicates.statements(
        image, run, verdict, provenance, sbom_of(image), terms=predicates.Terms(now=now)
    )
    return next(each for each in made if each.predicate_type == VSA)


GATED = sorted({f"{figure['check']} {figure['name']}" for figure in predecessor.judged(RUN)})


@pytest.mark.parametrize("only", GATED)
def test_a_loss_beyond_its_margin_of_any_figure_fails_a_certified_stack(stack, only):
    before = [certificate(stack, RUN, passed(stack))]
    share = 0.1 if only.split()[1] in {name for name, _ in predecessor.WIDER} else 0.05
    found = predecessor.held(passed(stack), slower(RUN, share, only), before)
    assert found.status == "FAILED"
    assert all(reason.startswith(only.split(" ", maxsplit=1)[0]) for reason in found.reasons)
    assert predecessor.held(passed(stack), RUN, before).status == "PASSED"


def test_each_slower_figure_has_its_reason_although_a_check_has_several(stack):
    found = predecessor.held(passed(stack), slower(RUN, 0.5), [certificate(stack, RUN, passed(stack))])
    assert len(found.reasons) == len(found.baselines) > len(found.failed) > 0


def test_a_figure_that_is_not_measured_any_more_fails(stack):
    before = [certificate(stack, RUN, passed(stack))]
    silent = slower(RUN, 0)
    checks = tuple(check.model_copy(update={"metrics": ()}) for check in silent.checks)
    found = predecessor.held(passed(stack), silent.model_copy(update={"checks": checks}), before)
    assert found.status == "FAILED"
    assert "was not measured" in found.reasons[0]


@settings(max_examples=10, deadline=None)
@given(st.lists(st.floats(-0.03, 0.03), min_size=1, max_size=6))
def test_renewals_never_lower_what_a_stack_is_held_to(stack, changes):
    runs = [RUN, *(slower(RUN, share) for share in changes)]
    known: list[Statement] = []
    for month, run in enumerate(runs):
        verdict = predecessor.held(passed(stack), run, known)
        carried = dataclasses.replace(passed(stack), baselines=verdict.baselines)
        known = [certificate(stack, run, carried, NOW + month * MONTH)]  # older ones are tidied away
    best = slower(RUN, min(0.0, *changes))
    held_to = {predecessor.key(figure): figure["value"] for figure in predecessor.certified(RUN, known)}
    expected = {predecessor.key(figure): figure["value"] for figure in predecessor.judged(best)}
    assert held_to == pytest.approx(expected)


def test_a_stack_that_loses_2_percent_a_month_fails_in_the_third(stack):
    known, ended = [certificate(stack, RUN, passed(stack))], []
    for month in (1, 2, 3):
        run = slower(RUN, 0.02 * month)
        verdict = predecessor.held(passed(stack), run, known)
        ended.append(verdict.status)
        if verdict.status == "PASSED":
            known = [certificate(stack, run, verdict, NOW + month * MONTH)]
    assert ended[0] == "PASSED"
    assert ended[-1] == "FAILED"


def test_a_waived_check_starts_again_from_the_waived_run(stack):
    waived = next(figure["check"] for figure in predecessor.judged(RUN))
    verdict = passed(stack, warned=(waived,))
    found = predecessor.held(verdict, slower(RUN, 0.03), [certificate(stack, RUN, passed(stack))])
    assert waived not in {figure["check"] for figure in found.baselines}


@pytest.mark.parametrize("changes", [{"nvls": True}, {"devices": RUN.host.devices[:1]}])
def test_another_machine_is_no_predecessor(stack, changes):
    other = RUN.model_copy(update={"host": RUN.host.model_copy(update=changes)})
    assert not predecessor.certified(other, [certificate(stack, RUN, passed(stack))])


def test_certificates_are_read_from_where_they_are_published_or_the_run_ends(tmp_path):
    key, dist = new_key(), tmp_path / "dist"
    image = make_image(tmp_path / "oci")
    assert predecessor.read(f"oci:{dist}", STACK_ID, key.public_key()) is None
    release(image, dist)
    (dist / "index.json").write_text("{")
    with pytest.raises((RegistryError, ConfigurationError)):
        predecessor.read(f"oci:{dist}", STACK_ID, key.public_key())


def test_of_the_recorded_runs_none_is_a_false_alarm_and_most_figures_show_5_percent():
    assert GATES["false_alarms"](RUNS, 400) < 1 / 200
    on_its_chips = GATES["found"](RUNS, 0.05, same_chips=True, draws=100)
    unseen = {(name, asked) for (_, name, _, asked), share in on_its_chips.items() if share < 1}
    assert len(on_its_chips) == 61
    assert {name for name, _ in unseen} == {name for name, _ in predecessor.WIDER}
    assert len(unseen) == len(predecessor.WIDER)
