"""Which machines can certify a stack: one answer everywhere; which ROCm a torch was built with counts."""

import dataclasses
import json
from pathlib import Path

import pytest

from stackcheck.matrix import compat, resolve
from stackcheck.matrix.matrix import TestTarget
from stackcheck.matrix.stack import Stack
from stackcheck.suite import certifiable

pytestmark = pytest.mark.usefixtures("suites_asked_here")

ROOT = Path(__file__).resolve().parents[3]
STACKS = {stack.id: stack for stack in resolve.load_stacks(ROOT)}
CUDA = STACKS["cuda13.0-torch2.13.0-py3.11-debian12"]
ROCM = dataclasses.replace(
    STACKS["rocm7.1.0-torch2.10.0-fa2.8.3-py3.12-ubuntu24.04"], archs=("gfx90a", "gfx942", "gfx950")
)
ROWS = {
    row["model"]: row
    for row in json.loads((ROOT / "tests/acceptance/devices.json").read_text(encoding="utf-8"))["devices"]
}
BY_RUNTIME = {"nvidia": CUDA, "amd": ROCM}


def reasons_of(stack: Stack, models: list[str]) -> tuple[str, ...]:
    """Why a machine with devices of these models cannot certify a stack."""
    missing = certifiable.missing_of(models, ROOT, "standard")
    asked = {"machines": stack.tested_on, "archs": stack.archs, "missing": missing}
    return tuple(certifiable.reasons_against(models, **asked))  # type: ignore[arg-type]


@pytest.mark.parametrize("model", [name for name, row in ROWS.items() if row["vendor"] != "cpu"])
@pytest.mark.parametrize("count", [1, 8])
def test_any_other_machine_is_told_which_bounds_are_missing(model, count):
    """Drawn from all rows of devices.json: there is no third answer, and none is silent."""
    stack = dataclasses.replace(BY_RUNTIME[ROWS[model]["vendor"]], archs=(ROWS[model]["arch"],))
    missing = certifiable.missing_bounds(ROOT, model, count)
    found = reasons_of(stack, [model] * count)
    if missing:
        (reason,) = found
        assert (
            f"{model} x{count} is known, and cannot be certified yet: bounds missing: {missing[0]}" in reason
        )
        assert reason.endswith("next: stackcheck baseline")
    else:
        assert found == ()


def test_a_list_of_machines_narrows_and_an_empty_one_shuts_every_machine_out():
    named = dataclasses.replace(CUDA, tested_on=(TestTarget(device="H200", count=8),))
    assert reasons_of(named, ["H200"] * 8) == ()
    (reason,) = reasons_of(named, ["H100"] * 8)
    assert reason == "the machine has H100 x8, and the stack names H200 x8 (tested_on in matrix.yaml)"
    (reason,) = reasons_of(STACKS["rocm5.7-debian13"], ["MI250X"] * 8)
    assert "the stack names none" in reason


@pytest.mark.parametrize(
    ("built", "arch", "runs"),
    [
        *(
            ("sm_80", "sm_80", True),
            ("sm_80", "sm_86", True),
            ("sm_80", "sm_89", True),
            ("sm_80", "sm_90", False),
        ),
        *(("sm_90", "sm_89", False), ("sm_100", "sm_103", True), ("sm_100", "sm_120", False)),
        *(("gfx942", "gfx942", True), ("gfx942", "gfx950", False), ("gfx90a", "gfx942", False)),
    ],
)
def test_code_runs_on_a_later_minor_of_its_major_and_on_amd_on_its_own(built, arch, runs):
    assert certifiable.serves(built, arch) is runs
    stack = dataclasses.replace(CUDA, archs=(built,))
    devices = [name for name, row in ROWS.items() if row["arch"] == arch and row["vendor"] == "nvidia"]
    for model in devices:
        reasons = certifiable.reasons_against([model], machines=None, archs=stack.archs)
        assert [("holds code for" in reason) for reason in reasons] == ([] if runs else [True])


@pytest.mark.parametrize(
    ("found", "declared", "same"),
    [
        ("7.2.1", "7.2.1", True),
        ("7.2.1", "7.2.4", False),
        ("7.2.4", "7.2.1", False),
        ("7.2.26015-fc0010cf6a", "7.2.0", True),
        ("7.2.26015", "7.2.1", False),
        ("7.2.53211", "7.2.0", False),
        ("7.2.53211", "7.2.4", True),  # HIP alone cannot tell; a wheel from torch 2.14 on says its ROCm too
        ("7.1.25424", "7.1.1", False),
        ("7.14.60850", "7.14.1", True),
        ("7.2.99999", "7.2.1", False),  # not known: fail closed
        ("none", "7.2.1", False),
    ],
)
def test_a_release_is_compared_to_its_patch(found, declared, same, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests/acceptance"))
    from vendors import amd

    assert amd.is_release(found, declared) is same


@pytest.mark.parametrize(
    "stack", [one for one in STACKS.values() if one.wheels == "upstream" and one.vendor == "amd"]
)
def test_no_patch_of_the_matrix_is_another_than_the_wheels(stack):
    """The newest patch under the same minor is no name for these wheels, unless they carry it."""
    rules = compat.load_rules(ROOT / "images/compat.yaml")
    (row,) = [rule for rule in rules if rule.id == f"R1-upstream-rocm[{stack.torch}]"]
    whole = [pattern for pattern in row.require["rocm"] if pattern.count(".") == 2]
    minor = stack.runtime_version.rpartition(".")[0]
    assert stack.runtime_version in whole or minor in row.require["rocm"]
    assert not any(one.startswith(f"{minor}.") for one in whole if one != stack.runtime_version)
