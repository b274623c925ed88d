"""`pytest tests/ --gpu-vendor amd` in one command on fabricated hosts: what runs passes, a fault is named.

Each host runs all suites of the standard tier. What cannot run there is skipped with a reason of
fakeamd/whole/needs.json, and the judge accepts none of these skips. `make lists` writes the
table of docs/reference/amd.md anew.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import amd_whole
from amd_whole import Planted
from stackcheck.suite import skips
from test_amd_hosts import HIP_FAULTS, NAMED

HERE = Path(__file__).resolve().parent

pytestmark = pytest.mark.slow  # without -n: then Triton compiles once
PAGE = HERE.parents[1] / "docs/reference/amd.md"
TABLE_BEGINS, TABLE_ENDS = "<!-- table of the whole command -->", "<!-- end of the table -->"
WRITE = bool(os.environ.get("STACKCHECK_WRITE_CHECKS"))
Run = Callable[[Planted], Mapping[str, Any]]

# Host -> check -> the reason of a skip that a real host and an image of this stack would have too.
SKIPS = json.loads((HERE / "fakeamd/whole/skips.json").read_text(encoding="utf-8"))
HOSTS = ("mi300x", "mi250x-as-740c", "mi210")
SUMS = ("test_all_reduce_busbw", "test_reduce_scatter_busbw", "test_all_gather_busbw")
# A fault of the host, of RCCL, of torch and of a package in one run: exactly these checks fail.
PLANTED = Planted(state="page-fault", fault="last", hip=None, packages={"triton": "3.0.0"})
CAUGHT = {
    "test_devices_after.py::test_no_fault_was_reported": "device 3",
    **{f"test_collective_speed.py::{name}": "rank 0: library's" for name in SUMS},
    "test_image.py::test_torch_is_built_for_the_vendor": "is a build for cpu, expected amd",
    "test_image.py::test_loaded_libraries_are_the_declared_ones": "is_release",
    "test_devices.py::test_driver_serves_the_runtime": "this torch is not a build for amd",
    "test_image.py::test_declared_versions_are_installed": "triton: declared 3.0.0, installed",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Run:
    """The whole command on a host; each state and fault runs once."""
    kept = tmp_path_factory.mktemp("kept")
    done: dict[str, Mapping[str, Any]] = {}

    def run(planted: Planted) -> Mapping[str, Any]:
        name = repr(planted)
        if name not in done:
            done[name] = amd_whole.run(planted, tmp_path_factory.mktemp("whole"), kept)
        return done[name]

    return run


def plain(check: str) -> str:
    """A check's id without its parameter, which for links and collectives is the number of devices."""
    return check.partition("[")[0]


@pytest.mark.parametrize("state", HOSTS)
def test_all_suites_in_one_command_on_a_healthy_host(state, whole):
    result = whole(Planted(state=state))
    checks = result["checks"]
    assert result["exit"] == 0, result["output"]
    assert (result["selection"]["dropped"], result["tier"]) == (0, "standard")
    needed = {name: check for name, check in checks.items() if amd_whole.needs(name)}
    for name, check in needed.items():
        says = amd_whole.NEEDS[amd_whole.needs(name)]["says"]
        assert (check["outcome"], check["reason"]) == ("skipped", says), name
    own = {name: check["reason"] for name, check in checks.items() if name not in needed and check["reason"]}
    foreign = {
        name: "does not declare sm_"
        for name in checks
        if name.startswith("test_static.py::") and "[sm_" in name
    }
    expected = SKIPS["every host"] | SKIPS.get(state, {}) | foreign
    assert own.keys() == expected.keys(), own
    assert all(says in own[name] for name, says in expected.items()), own
    others = {check["outcome"] for name, check in checks.items() if name not in {*needed, *expected}}
    assert others == {"passed"}


def test_the_judge_accepts_no_skip_for_want_of_a_device(whole):
    checks = whole(Planted(state="mi300x"))["checks"]
    facts = skips.Facts(
        rows=[{"model": "MI300X", "lacks": [], "unreadable": [], "memory_bytes": 1 << 37}] * 8
    )
    judged = {
        name: skips.problem(check["skip"], facts) for name, check in checks.items() if amd_whole.needs(name)
    }
    assert len(judged) > 100
    assert None not in judged.values()


def test_the_binding_of_rccl_ran_before_its_speed_was_skipped(whole):
    checks = whole(Planted(state="mi300x"))["checks"]
    right = {check["skip"]["needs"].get("right_over_rccl") for check in checks.values() if check["skip"]}
    assert right == {None, "all_reduce", "all_gather", "reduce_scatter", "all_to_all"}


def test_planted_faults_are_named_by_the_whole_command(whole):
    result = whole(PLANTED)
    failed = {plain(name): check["reason"] for name, check in result["checks"].items() if is_bad(check)}
    assert failed.keys() == CAUGHT.keys(), result["output"]
    assert all(says in failed[check] for check, says in CAUGHT.items()), failed
    assert result["exit"] == 1


def is_bad(check: Mapping[str, Any]) -> bool:
    return check["outcome"] not in {"passed", "skipped"}


def table(checks: Mapping[str, Mapping[str, Any]]) -> str:
    """The rows of docs/reference/amd.md: checks of each suite that pass, are shown to fail, cannot run."""
    named = {plain(fault.check) for fault in (*NAMED, *HIP_FAULTS)}
    named |= set(CAUGHT)
    rows = ["| suite | checks | pass | shown to fail | skipped as on a real host | cannot run |"]
    rows.append("|---|---|---|---|---|---|")
    for suite in sorted({name.partition("::")[0] for name in checks}):
        own = {name: check for name, check in checks.items() if name.startswith(f"{suite}::")}
        why = Counter(key for name in own if (key := amd_whole.needs(name)))
        passed = sum(check["outcome"] == "passed" for check in own.values())
        failing = len({plain(name) for name in own} & named)
        absent = "; ".join(f"{count}: {key}" for key, count in sorted(why.items())) or "none"
        skipped = len(own) - passed - why.total()
        rows.append(
            f"| `{suite.removesuffix('.py')}` | {len(own)} | {passed} | {failing} | {skipped} | {absent} |"
        )
    passed = sum(check["outcome"] == "passed" for check in checks.values())
    return "\n".join([*rows, f"| all | {len(checks)} | {passed} | {len(named)} | | |"])


def test_the_page_has_the_table_of_a_real_run(whole):
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(TABLE_BEGINS)
    old, _, after = rest.partition(TABLE_ENDS)
    new = f"\n{table(whole(Planted(state='mi300x'))['checks'])}\n"
    if WRITE:
        PAGE.write_text(f"{before}{TABLE_BEGINS}{new}{TABLE_ENDS}{after}", encoding="utf-8")
    assert old == new or WRITE, "the table in docs/reference/amd.md is out of date: make lists"
