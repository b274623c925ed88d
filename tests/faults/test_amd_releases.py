"""Healthy AMD hosts of each model over four releases of AMD's module: PASSED, and faults keep their names.

The library is the newest one; what a release does not tell is taken away as `amdsmi_releases.json` has it.
"""

from pathlib import Path

import pytest

import amdsmi_releases
import host_verdicts
from stackcheck.matrix import resolve
from stackcheck.suite.verdict import Verdict
from test_amd_hosts import NAMED, NEW, STATES, WITHOUT_BOUNDS, run

pytestmark = pytest.mark.slow
RELEASES = tuple(amdsmi_releases.table())
MODELS = ("mi210", "mi210-alone", "mi250x-as-740c", "mi300x", "mi308x", "mi325x", "mi350x", "mi355x")
HOSTS = (*MODELS, "mi300x-cpx-nps4", "mi325x-guest", "mi355x-guest")
# Of each kind of reading that a release may lack: links, counters, pages, power, partitions, the driver.
READINGS = (
    "xgmi-link-down", "xgmi-error", "throttling", "throttling-mi250", "bad-pages", "power-cap-lowered",
)  # fmt: skip
FAULTS = [fault for fault in NAMED if fault.state in {*READINGS, "cpx", "nps4", "ecc-during-run", "pcie-x8"}]
# What a release cannot tell at all: the check is skipped, and the judge accepts it by devices.json.
UNSEEN = {("6.2.4", "xgmi-link-down"), ("6.3.3", "xgmi-link-down"), ("6.2.4", "throttling")}


def judged(state: str, release: str, folder: Path, **chosen: str) -> Verdict:
    result = run(state, NEW, folder, {**amdsmi_releases.environment(release), **chosen})
    arch = result["host"]["devices"][0]["arch"]
    stacks = amdsmi_releases.table()[release]["stacks"]
    has_code = stacks and any(
        arch in one.archs for one in resolve.load_stacks(host_verdicts.made_up.ROOT, (stacks,))
    )
    return host_verdicts.judged(result, folder, stacks if has_code else None)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("state", HOSTS)
def test_a_healthy_host_passes_with_each_release(state, release, tmp_path):
    found = judged(state, release, tmp_path)
    missing = WITHOUT_BOUNDS.get(state)
    assert found.status == ("UNFIT" if missing else "PASSED"), found.reasons
    assert len(found.reasons) == bool(missing)
    assert all(missing in reason for reason in found.reasons)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("partition", ["0", "5"])
def test_one_partition_alone_passes_with_each_release(partition, release, tmp_path):
    found = judged("mi300x-cpx-nps4", release, tmp_path, ROCR_VISIBLE_DEVICES=partition)
    assert (found.status, found.reasons) == ("PASSED", ())


def test_every_model_that_can_be_certified_has_a_host_that_passes():
    products = {STATES[state].product.name for state in HOSTS if state not in WITHOUT_BOUNDS}
    assert products == {"MI210", "MI250X", "MI300X", "MI308X", "MI325X", "MI350X", "MI355X"}
    assert len(RELEASES) == 4


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_is_named_with_each_release_that_can_tell(fault, release, tmp_path):
    found = judged(fault.state, release, tmp_path)
    if (release, fault.state) in UNSEEN:
        assert (found.status, found.reasons) == ("PASSED", ())
        return
    assert found.status == host_verdicts.status(fault.check, fault.outcome), found.reasons
    named = [reason for reason in found.reasons if reason.startswith(fault.check)]
    assert any(fault.says in reason for reason in named), found.reasons
    assert host_verdicts.others(found, fault.check, *fault.also) == []
