"""What is said of a stack before a build agrees with the verdict that its run would end with."""

import datetime as dt
import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from result_files import CONFIG_DIGEST, check, result
from stackcheck import vendors
from stackcheck.errors import ConfigurationError
from stackcheck.matrix import matrix, resolve
from stackcheck.matrix.rules import one_of
from stackcheck.matrix.stack import Stack
from stackcheck.policy import is_advisory, names
from stackcheck.suite import certifiable, expected, outlook, results, skips, verdict
from stackcheck.suite.bounds import Bounds
from stackcheck.suite.outlook import Known, Machine, Outlook
from stackcheck.suite.requirements import Requirements
from suites_answers import asked_here

pytestmark = pytest.mark.usefixtures("suites_asked_here")
ROOT = Path(__file__).resolve().parents[3]
STACKS = resolve.load_stacks(ROOT)
MODELS = sorted(str(row["model"]) for row in vendors.device_table())
TABLE = json.loads((ROOT / "tests" / "acceptance" / "drivers.json").read_text(encoding="utf-8"))
# Every driver that the documents list, one that is too old, and the one of a reported fault.
DRIVERS = {
    "amd": [*(row["release"] for row in TABLE["amd"]), "5.0"],
    "nvidia": [*TABLE["nvidia"]["minimum"].values(), "470.57.02", "580.95.05", "580.142"],
    "cpu": [None],
}
MACHINES = [
    outlook.named(f"{model}:{count}", driver)
    for model, count in itertools.product(MODELS, (1, 2, 4, 8))
    for driver in DRIVERS[outlook.named(model).vendor]
    if model != "CPU" or count == 1
]
TIERS = matrix.load_matrix(ROOT / "matrix.yaml").policy.certifies


FIXED = {stack.id: stack for stack in STACKS}


@functools.cache  # most machines differ in the driver alone, which changes nothing here
def is_named(stack_id: str, models: tuple[str, ...]) -> bool:
    stack = FIXED[stack_id]
    missing = certifiable.missing_of(models, ROOT, TIERS[stack.vendor])
    return not any(
        certifiable.reasons_against(models, machines=stack.tested_on, archs=stack.archs, missing=missing)
    )


PAIRS = [pair for pair in itertools.product(STACKS, MACHINES) if pair[0].vendor == pair[1].vendor]
with asked_here():
    NAMED = [(stack, machine) for stack, machine in PAIRS if is_named(stack.id, machine.models)]
USUAL = (None, "580.95.05", "30.30")
UNHURRIED = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
POLICY = matrix.load_matrix(ROOT / "matrix.yaml").policy
FA4 = "cuda13.0-torch2.11.0-fa4.0.0b36-py3.12-ubuntu24.04"
PLAIN = "cuda13.0-torch2.13.0-py3.11-debian12"
EXPECTED = "rocm6.4.0-torch2.8.0-fa2.8.3-py3.12-ubuntu24.04"  # matrix.yaml expects it to fail
MI300X = outlook.named("MI300X:8", "30.30")
H200 = outlook.named("H200:2", "580.95.05")


@functools.cache
def known(machine: Machine) -> Known:
    return outlook.known_of(STACKS, machine, ROOT, POLICY)


def said(stack: Stack, machine: Machine) -> Outlook:
    return outlook.outlook(stack, machine, known(machine))


def kinds(found: Outlook) -> set[str]:
    return {reason.kind for reason in found.reasons}


def ended(stack: Stack, machine: Machine) -> verdict.Verdict:
    """The verdict on a run in which all passes, except what the known issues of the stack there name."""
    about, today = known(machine), dt.datetime.now(dt.UTC).date()
    hit = [issue for issue in about.issues if broken(stack, machine, issue.when)]
    failing = {name for name in about.checks for issue in hit for one in issue.checks if names(one, name)}
    lacking = stack.archs and not any(runs(built, machine.archs[0]) for built in stack.archs)
    if lacking:
        failing.add("test_image.py::test_every_architecture_is_compiled_in")
    ids = [f"id-{number}" for number in range(len(machine.models))]
    checks = [check(name, "failed" if name in failing else "passed", devices=ids) for name in about.checks]
    told = result(*checks)
    told["host"] |= {
        "vendor": machine.vendor,
        "driver": machine.driver,
        "devices": [
            {**told["host"]["devices"][0], "model": model, "arch": arch, "id": name}
            for model, arch, name in zip(machine.models, machine.archs, ids, strict=True)
        ],
    }
    run = results.parse(json.dumps(told).encode())
    needed = Requirements(
        checks=about.checks,
        image_config_digest=CONFIG_DIGEST,
        machines=stack.tested_on,
        vendor=stack.vendor,
        facts=skips.Facts(rows=(), archs=stack.archs),
        advisory=about.policy.advisory,
        waivers=about.policy.waivers_for(stack.id, today),
    )
    return verdict.judge(run, needed, Bounds(missing=about.missing_bounds))


def runs(built: str, arch: str) -> bool:
    """NVIDIA's rule, once more in words: code of 10.0 runs on 10.0 to 10.9. AMD has no such rule."""
    return built == arch or (built[:-1] == arch[:-1] and built.startswith("sm_") and built[-1] < arch[-1])


def broken(stack: Stack, machine: Machine, when: Any) -> bool:
    """Whether an issue's `when` fits, written once more from the words of known-issues.yaml."""
    values = {
        **stack.values,
        "arch": machine.archs[0],
        **({"driver": machine.driver} if machine.driver else {}),
    }
    return all(axis in values and one_of(axis, patterns)(values[axis]) for axis, patterns in when.items())


# Every stack with every model and count that it names, each with one driver: what a draw of 60 would miss.
EACH = list({(stack.id, machine.models): (stack, machine) for stack, machine in NAMED}.values())


def test_every_stack_can_be_certified_exactly_on_the_machines_where_its_run_would_pass():
    for stack, machine in EACH:
        agrees(stack, machine)


def agrees(stack: Stack, machine: Machine) -> None:
    found = said(stack, machine)
    refused = known(machine).drivers.get(stack.runtime_version or "")
    would_pass = (
        ended(stack, machine).status == "PASSED"
        and not (refused and refused.state == "refused")
        and (stack.torch is not None)
        and not any(
            issue.severity == "refuse" and broken(stack, machine, issue.when)
            for issue in known(machine).issues
        )
    )
    assert (kinds(found) <= {"lock"}) == would_pass, f"{stack.id} on {machine.words()}: {found.words}"


def test_the_pairs_hold_both_answers():
    answers = {kinds(said(stack, machine)) <= {"lock"} for stack, machine in NAMED if machine.driver in USUAL}
    assert answers == {True, False}
    assert ended(FIXED[FA4], H200).reasons == ()
    assert ended(FIXED[PLAIN], H200).status == "PASSED"
    assert ended(FIXED[EXPECTED], MI300X).status == "FAILED"


@UNHURRIED
@given(st.sampled_from(STACKS), st.sampled_from(MACHINES))
def test_every_reason_is_true(stack, machine):
    found, about = said(stack, machine), known(machine)
    assert ("lock" in kinds(found)) == bool(stack.missing)
    assert ("vendor" in kinds(found)) == (stack.vendor != machine.vendor)
    issues = {issue.id: issue for issue in about.issues}
    waivers = about.policy.waivers_for(stack.id, about.today)
    for reason in found.reasons:
        if reason.kind == "driver":
            assert about.drivers[stack.runtime_version or ""].state == "refused"
        if reason.kind == "fault":
            issue = issues[reason.says.partition(" ")[0]]
            assert broken(stack, machine, issue.when)
            assert issue.severity == "refuse" or [
                name
                for name in about.checks
                if any(names(one, name) for one in issue.checks)
                and not is_advisory(name, about.policy.advisory)
                and not any(waiver.covers(name) for waiver in waivers)
            ]


def test_without_its_waiver_a_known_fault_is_a_reason_and_names_its_issue():
    about = known(H200)
    without = about.policy.model_copy(update={"waivers": ()})
    bare = Known(**{**vars(about), "policy": without, "site_locks": True})
    found = outlook.outlook(FIXED[FA4], H200, bare)
    assert {reason.short for reason in found.reasons} == {
        *("pytorch/pytorch#196678", "pytorch/pytorch#191612", "Dao-AILab/flash-attention#2896"),
        *("pytorch/pytorch#193061", "pytorch/pytorch#180642"),
    }
    ended_waivers = Known(**{**vars(about), "today": dt.date.max, "site_locks": True})
    assert outlook.outlook(FIXED[FA4], H200, ended_waivers) == found


def test_a_driver_that_is_too_old_is_a_reason_with_the_words_of_the_documents():
    (reason,) = (
        one
        for one in said(FIXED[PLAIN], outlook.named("H200:2", "550.54.15")).reasons
        if one.kind == "driver"
    )
    assert reason.says.startswith("driver 550.54.15 is older than 580")
    assert "driver" not in kinds(said(FIXED[PLAIN], outlook.named("H200:2")))  # nobody named one


@pytest.mark.parametrize("text", ["H100:0", "H100:", "H100:-1", "H100:x", "8xH100", "TPU:4", "", ":8"])
def test_a_machine_that_no_row_has_is_refused_with_the_models(text):
    with pytest.raises(ConfigurationError) as caught:
        outlook.named(text)
    assert "MI300X" in str(caught.value)
    assert "--machine H100:8" in str(caught.value)


def test_a_machine_is_named_as_devices_json_spells_it():
    assert outlook.named("mi300x:8", "30.30.3").words() == "MI300X x8, driver 30.30.3"
    assert outlook.named("H100").models == ("H100",)


def test_a_count_without_a_list_of_checks_is_a_reason():
    assert "there is no list of checks" in " ".join(
        reason.says for reason in said(FIXED[PLAIN], outlook.named("H200:16")).reasons
    )


@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: stack.id)
def test_every_known_fault_of_a_stack_is_waived_or_expected_by_name(stack):
    """Nobody learns of a known fault from a run of hours: matrix.yaml says of each which of the two it is."""
    policy = matrix.load_matrix(ROOT / "matrix.yaml").policy
    stated = [one for one in (*policy.waivers, *policy.expects_failures) if one.is_for(stack.id)]
    ids = expected.check_ids(ROOT, vendor=stack.vendor, tier="standard", count=1)
    checks = [check for issue in stack.known_issues for check in issue.checks if stack.torch]
    failing = [name for name in ids if any(names(check, name) for check in checks)]
    required = [name for name in failing if not is_advisory(name, policy.advisory)]
    assert [name for name in required if not any(one.covers(name) for one in stated)] == []
