"""AMD's real SMI library on fabricated hosts: a healthy host passes, and each fault is named by its check.

Every test enters a Debian root file system with one generation of libamd_smi (docs/reference/amd.md) and
runs the device suite there as a user would. `STACKCHECK_AMD_HOSTS=quick` keeps one healthy host for each
library, and each kind of fault of an MI300X once: on the newest library that can show it. `rest` keeps what
`quick` leaves out, among it the same readings on other products, and `ALIKE`.
"""

# ruff: noqa: E501 - a table of faults reads in rows
import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import fakehip
import host_verdicts
import planting
from fakeamd import host, kfd, rootfs
from fakeamd.rootfs import LIBRARIES, Library, library
from fakeamd.states import FAULTS, HEALTHY, STATES
from harness import bytecode
from harness.resultfile import anonymous

HERE = Path(__file__).resolve().parent

TESTS = HERE.parent
OLD, NEW = LIBRARIES
WHICH = os.environ.get("STACKCHECK_AMD_HOSTS", "all")
HIP = "7.2.4"  # what the image's torch would have been built with
# Library -> the release of the image that has one as old, and the stack that is judged; 6.1.2 is in none.
IMAGES = {OLD.release: ("6.2.4", None), NEW.release: (HIP, "rocm7.2.*-torch2.*")}
# What the stand-in for torch shows of HIP: without it these checks are skipped on a fabricated host.
SAME = "test_torch_and_the_library_mean_the_same_devices"
COPIES = "test_peer_copies_arrive"
OVER_HIP = ("test_device_count", SAME, COPIES)
ABSENT = "no AMD device is visible"


@dataclass(frozen=True)
class Named:
    """A state, the check that must fail on it, and a text that its reason must contain."""

    state: str
    function: str
    says: str
    libraries: tuple[Library, ...] = LIBRARIES
    outcome: str = "failed"
    vendor: str = "amd"
    also: tuple[str, ...] = ()  # words of what the verdict says besides, because of the same fault

    def __str__(self) -> str:
        return self.state

    @property
    def name(self) -> str:
        """As `stackcheck prove` lists it."""
        return f"AMD host: {self}"

    @property
    def check(self) -> str:
        """Its id in the suite."""
        return planting.device_check(self.function)


MI210X8 = "MI210 x8 is known, and cannot be certified yet"
unfit = functools.partial(Named, outcome="invalid")  # the fault is the machine's
NAMED = (
    unfit("gpu-missing", "test_the_host_offers_what_devices_need", "0000:c6:00.0: on the PCI bus", also=("MI300X x7 is known, and cannot be certified yet",)),
    unfit("ecc-before-run", "test_memory_is_healthy", "device 3: 3 uncorrectable"),
    unfit("ecc-during-run", "test_no_memory_error_since_the_start", "device 3: uncorrectable grew from 0 to 3"),
    unfit("bad-pages", "test_memory_is_healthy", "device 3: 1 pending"),
    unfit("pcie-x8", "test_pcie_link_is_full", "device 3: PCIe width 8, expected at least 16"),
    unfit("xgmi-link-down", "test_every_pair_is_linked", "2-3: xgmi, down", (NEW,)),
    unfit("xgmi-error", "test_no_link_error_since_the_start", "1-3: link errors grew from 0 to 2"),
    unfit("xgmi-error-mi250", "test_no_link_error_since_the_start", "1-3: link errors grew from 0 to 1"),
    Named("page-fault", "test_no_fault_was_reported", "device 3"),
    unfit("hot-in-events", "test_no_fault_was_reported", "device 3"),
    unfit("reset", "test_no_fault_was_reported", "device 5"),
    unfit("pcie-pair", "test_every_pair_is_linked", "2-5: pcie"),
    unfit("power-cap-lowered", "test_power_cap_is_the_default", "device 3: power cap 550.0 W, expected the default 750.0 W"),
    unfit("throttling", "test_nothing_throttles", "device 3 throttles: prochot", (NEW,), also=("device 3 throttled: prochot",)),
    unfit("throttling-mi250", "test_nothing_throttles", "device 3 throttles: hotspot temperature", also=("device 3 throttled: hotspot temperature",)),
    unfit("nps4", "test_partition_is_the_reference", "device 3: memory NPS4", also=("MI300X x7 and unknown", "device 3: SPX/NPS4")),
    unfit("cpx", "test_partition_is_the_reference", "device 3: compute CPX", also=("MI300X x7 and unknown", "device 3: CPX/NPS1")),
    unfit("memory-short", "test_device_identity", "device 3", also=("MI325X x7 and unknown",)),
    unfit("firmware-differs", "test_firmware_is_equal", "CP_MEC1"),
    unfit("pcie-gen4-mi355x", "test_pcie_link_is_full", "device 3: PCIe generation 4"),
    unfit("pcie-gen3-mi210", "test_pcie_link_is_full", "device 3: PCIe generation 3", also=(MI210X8,)),
    unfit("ecc-deferred-mi325x", "test_memory_is_healthy", "device 3: 2 uncorrectable"),
    unfit("ecc-before-run-mi210", "test_memory_is_healthy", "device 3: 1 uncorrectable", also=(MI210X8,)),
    unfit("bad-pages-mi355x", "test_memory_is_healthy", "device 3: 1 pending"),
    unfit("ecc-during-run-mi355x", "test_no_memory_error_since_the_start", "device 5: uncorrectable grew from 0 to 1"),
    unfit("xgmi-error-mi325x", "test_no_link_error_since_the_start", "1-3: link errors grew from 0 to 1", also=("device 3: uncorrectable grew from 0 to 1",)),
    unfit("pcie-pair-mi355x", "test_every_pair_is_linked", "0-7: pcie"),
    unfit("power-cap-mi355x", "test_power_cap_is_the_default", "device 3: power cap 1000.0 W, expected the default 1400.0 W"),
    unfit("power-cap-mi250", "test_power_cap_is_the_default", "device 2: power cap 500.0 W, expected the default 560.0 W"),
    *(unfit(f"throttling-{name}", "test_nothing_throttles", f"device 3 throttles: {words}", (NEW,), also=(f"device 3 throttled: {words}",))
      for name, words in (("socket_thm", "socket temperature"), ("vr_thm", "voltage regulator temperature"), ("hbm_thm", "HBM temperature"))),
    unfit("nps2-mi355x", "test_partition_is_the_reference", "device 3: memory NPS2", also=("MI355X x7 and unknown", "device 3: SPX/NPS2")),
    unfit("dpx", "test_partition_is_the_reference", "device 3: compute DPX", also=("MI300X x7 and unknown", "device 3: DPX/NPS1")),
    unfit("firmware-differs-mi355x", "test_firmware_is_equal", "SDMA"),
    unfit("gpu-missing-mi210", "test_the_host_offers_what_devices_need", "0000:26:00.0: on the PCI bus", also=("MI210 x3 is known, and cannot be certified yet",)),
    Named("page-fault-mi250", "test_no_fault_was_reported", "device 1"),
    unfit("reset-mi355x", "test_no_fault_was_reported", "device 0"),
    Named("numa-elsewhere", "test_numa_nodes_of_devices_are_ours", "device 3 is on NUMA node 1"),
    Named("driver-too-old", "test_driver_serves_the_runtime", "driver 6.1 (amdgpu 6.7.0) supports ROCm 5.7 to 6.4"),
    Named("permission-denied", "test_device_identity", "no permission on it: owned by 0:105"),
    Named("driver-not-loaded", "test_device_identity", "DRIVER_NOT_LOADED"),
    Named("init-hangs", "test_device_identity", "did not answer in 3 s"),
)  # fmt: skip
# By the check and the reading of another one: the same field of the library, with another number in it.
ALIKE = {"throttling-socket_thm", "throttling-vr_thm", "throttling-hbm_thm", "dpx"}
# What a release cannot show must be a skip with that reason: neither a pass nor a false alarm.
UNSEEN = (
    Named("xgmi-link-down", "test_every_pair_is_linked", "active links: not supported", (OLD,), "skipped"),
    Named("throttling", "test_nothing_throttles", "throttle reasons: not supported", (OLD,), "skipped"),
)


@dataclass(frozen=True)
class OfHip(Named):
    """A fault of HIP on a healthy host: a device that it does not show, or a copy that goes wrong."""

    fault: str = ""

    def __str__(self) -> str:
        return self.fault


HIP_FAULTS = (
    OfHip("mi300x", "test_device_count", "torch sees 7 devices, expected 8", fault="device-lost"),
    OfHip("mi300x", COPIES, "'from': 2, 'to': 0, 'access': True, 'wrong_elements': 1", fault="peer-copy"),
    OfHip("mi300x", COPIES, "'from': 0, 'to': 2, 'access': False", fault="no-access"),
    OfHip("mi300x", SAME, "which fits 0", fault="other-place"),
)


def listed(state: str, fault: str = "") -> str:
    """The devices of a host as its driver hands them to HIP: ids, and what HIP tells of each."""
    host_state = STATES[state]
    product, parts = host_state.product, host_state.parts
    version = product.gfx_target_version
    arch = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
    shown = [kfd.devices(host_state)[minor] for minor in kfd.minors(host_state)]
    return ",".join(
        "|".join(
            (
                f"GPU-{kfd.UNIQUE_ID + gpu:016x}",
                "0000:f1:00.0" if fault == "other-place" and gpu == 2 else kfd.bdf(gpu),
                arch,
                str(product.compute_units // parts),
                str(kfd.memory_bytes(host_state, gpu) // parts),
            )
        )
        for gpu, _ in shown
    )


@pytest.fixture(scope="module")
def hip(tmp_path_factory) -> Path:
    """The folder of the stand-in for HIP; without one, as in an image without a compiler, an empty folder."""
    folder = tmp_path_factory.mktemp("fakehip")
    found = fakehip.found(folder)
    return found[0].parent if found else folder


def run(
    state: str | Path,
    used: Library,
    out: Path,
    environment: Mapping[str, str] | None = None,
    *,
    hip: Path | None = None,
    fault: str = "",
) -> Mapping[str, Any]:
    """The device suite inside a fabricated host: its result.json, with the output beside it."""
    out.chmod(0o777)  # a state may run the suite as another user
    cache = rootfs.byte_code(used)
    command = (
        "python3 -m pytest /stackcheck/tests --gpu-vendor amd -k devices -p torchless -p no:cacheprovider"
    )
    done = host.run(
        state if isinstance(state, Path) else STATES[state],
        used,
        [*command.split(), "--result-dir", "/stackcheck/out", "--lease-dir", "/tmp/leases"],
        binds={
            "tests": TESTS,
            "out": out,
            "inside": HERE / "fakeamd/inside",
            "cache": cache,
            **({"hip": hip} if hip else {}),
        },
        writable=("out", "cache"),
        environment={
            "PYTHONPATH": f"/stackcheck/inside:/stackcheck/tests/acceptance:{used.python_path}",
            "FAKEAMD_HIP": IMAGES[used.release][0],
            **(
                {
                    "FAKEHIP": f"/stackcheck/hip/{fakehip.NAMES[0]}",
                    "FAKEHIP_DEVICES": listed(str(state), fault),
                    "FAKEHIP_FAULT": fault,
                }
                if hip
                else {}
            ),
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPYCACHEPREFIX": f"/stackcheck/cache/{bytecode.NAME}",  # such a name the suites may use
            **({"FAKEAMD_SMI_TIMEOUT_S": "3"} if state == "init-hangs" else {}),
            **(environment or {}),
        },
    )
    assert (out / "result.json").exists(), done.stdout
    result: dict[str, Any] = json.loads((out / "result.json").read_text(encoding="utf-8"))
    checks = {check["id"].partition("::")[2]: check for check in result["checks"]}
    return {**result, "checks": checks, "exit": done.returncode, "output": done.stdout}


def _cases(named: tuple[Named, ...]) -> list[object]:
    return [
        pytest.param(one, used, id=f"{one}-{used.release}")
        for one in named
        for used in one.libraries
        if _chosen(quick=used is one.libraries[-1] and _leads(one.state))
    ]


def _leads(state: str) -> bool:
    """Whether no other state has the same reading."""
    return STATES[state].product is HEALTHY[0].product and state not in ALIKE


def _chosen(*, quick: bool) -> bool:
    """Whether a case runs, by whether it is one of the quick ones."""
    return WHICH == "all" or quick == (WHICH == "quick")


@pytest.mark.healthy(check="test_devices.py", vendor="amd")
@pytest.mark.parametrize("used", LIBRARIES, ids=lambda used: used.release)
@pytest.mark.parametrize("state", [state.name for state in HEALTHY if _chosen(quick=state is HEALTHY[0])])
def test_healthy_host_has_no_failure(state, used, hip, tmp_path):
    on_hip = used is NEW  # what HIP shows does not depend on the management library
    result = run(state, used, tmp_path, hip=hip if on_hip else None)
    outcomes = {name: check["outcome"] for name, check in result["checks"].items()}
    assert set(outcomes.values()) == {"passed", "skipped"}, result["output"]
    assert result["exit"] == 0
    host_state = STATES[state]
    whole = host_state.product.name
    model = whole if host_state.parts == 1 else f"{whole}-{host_state.compute}-{host_state.memory}"
    assert [device["model"] for device in result["host"]["devices"]] == [model] * len(kfd.minors(host_state))
    ids = [device["id"] for device in result["host"]["devices"]]
    assert len(set(ids)) == len(ids)
    assert outcomes["test_device_identity"] == "passed"
    ran = {outcomes[name] for name in OVER_HIP if len(ids) > 1 or name != COPIES}
    assert ran == {"passed" if on_hip else "skipped"}, result["output"]
    found = host_verdicts.judged(result, tmp_path, IMAGES[used.release][1])
    if expected := WITHOUT_BOUNDS.get(state):
        assert (found.status, len(found.reasons)) == ("UNFIT", 1), found.reasons
        assert expected in found.reasons[0]
    else:
        assert (found.status, found.reasons) == ("PASSED", ())


# Healthy hosts of a model and count that has no bounds yet.
WITHOUT_BOUNDS = {
    name: f"{machine} is known, and cannot be certified yet: bounds missing"
    for name, machine in {
        "mi210": "MI210 x4",
        "mi210-without-bridge": "MI210 x4",
        "two-of-eight": "MI300X x2",
        "mi300x-cpx-nps4": "MI300X-CPX-NPS4 x8",
    }.items()
}
HALVES = (
    ({"HIP_VISIBLE_DEVICES": "0,1,2,3"}, [0, 1, 2, 3]),
    ({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, [4, 5, 6, 7]),
    ({"ROCR_VISIBLE_DEVICES": "4,5,6,7", "HIP_VISIBLE_DEVICES": "1,3"}, [5, 7]),
)


@pytest.mark.healthy(check="test_devices.py", vendor="amd")
@pytest.mark.parametrize(
    ("environment", "gpus"),
    [half for half in HALVES if _chosen(quick=half is HALVES[-1])],  # the last one has two variables at once
    ids=lambda value: "-".join(map(str, value)),
)
def test_a_part_of_a_node_that_a_user_chose_stays_that_part(environment, gpus, hip, tmp_path):
    result = run("mi300x", NEW, tmp_path, environment, hip=hip)
    ours = [anonymous(f"GPU-{kfd.UNIQUE_ID + gpu:016x}") for gpu in gpus]
    assert [device["id"] for device in result["host"]["devices"]] == ours
    assert result["exit"] == 0, result["output"]


@pytest.mark.parametrize(
    "used", [one for one in LIBRARIES if _chosen(quick=one is NEW)], ids=lambda used: used.release
)
def test_one_partition_alone_passes(used, tmp_path):
    """Also one that is not its GPU's first, which alone has the files of the whole GPU."""
    result = run("mi300x-cpx-nps4", used, tmp_path, {"ROCR_VISIBLE_DEVICES": "5"})
    assert [device["model"] for device in result["host"]["devices"]] == ["MI300X-CPX-NPS4"]
    found = host_verdicts.judged(result, tmp_path, IMAGES[used.release][1])
    assert (found.status, found.reasons) == ("PASSED", ())


@pytest.mark.parametrize(("fault", "used"), _cases(NAMED))
def test_planted_fault_of_a_host_is_named(fault, used, tmp_path):
    newest = {"FAKEAMD_HIP": HIP} if fault.state == "driver-too-old" else None  # it serves an old one
    result = run(fault.state, used, tmp_path, newest)
    check = result["checks"][fault.function]
    assert check["outcome"] == fault.outcome, result["output"]
    assert fault.says in check["reason"]
    assert result["exit"] == 1
    found = host_verdicts.judged(result, tmp_path, IMAGES[used.release][1])
    assert found.status == host_verdicts.status(fault.check, fault.outcome), found.reasons
    others = host_verdicts.others(found, fault.check, *fault.also)
    assert not others or all(ABSENT in reason for reason in others), others


@pytest.mark.parametrize("fault", HIP_FAULTS, ids=str)
def test_planted_fault_of_hip_is_named(fault, hip, tmp_path):
    result = run(fault.state, NEW, tmp_path, hip=hip, fault=fault.fault)
    check = result["checks"][fault.function]
    assert (check["outcome"], result["exit"]) == ("failed", 1), result["output"]
    assert fault.says in check["reason"]
    assert {name for name, one in result["checks"].items() if one["outcome"] == "failed"} <= {
        fault.function,
        *OVER_HIP,
    }


@pytest.mark.parametrize(("fault", "used"), _cases(UNSEEN))
def test_what_a_release_cannot_show_is_skipped_and_says_so(fault, used, tmp_path):
    result = run(fault.state, used, tmp_path)
    check = result["checks"][fault.function]
    assert (check["outcome"], check["reason"]) == ("skipped", fault.says)
    assert host_verdicts.judged(result, tmp_path).status == "PASSED"


def test_every_planted_state_has_a_check_that_names_it():
    assert {fault.name for fault in FAULTS} == {named.state for named in NAMED}
    assert len(NAMED) >= 40


@pytest.mark.parametrize("used", LIBRARIES, ids=lambda used: used.release)
def test_a_trainer_reads_energy_through_the_library_that_is_not_on_its_path(used):
    """The counter is 123456789012 times 15.3 microjoules; up to release 6.1 it has another name."""
    code = "import energy; print(energy.of_amd('0000:05:00.0')); print(energy.of_amd('0000:ff:00.0'))"
    binds = {"trainers": TESTS.parent / "trainers", "inside": HERE / "fakeamd/inside"}
    path = {"PYTHONPATH": "/stackcheck/trainers:/stackcheck/inside"}
    done = host.run(STATES["mi300x"], used, ["python3", "-c", code], binds=binds, environment=path)
    joules, absent = done.stdout.splitlines()[-2:]
    assert float(joules) == pytest.approx(123456789012 * 15.3e-6, rel=1e-3), done.stdout
    assert absent.startswith("amdsmi: "), done.stdout


def test_amd_smi_itself_lists_the_fabricated_host():
    listing = host.run(STATES["mi300x"], library("10.1"), ["amd-smi", "list", "--json"]).stdout
    assert [gpu["bdf"] for gpu in json.loads(listing)][:2] == ["0000:05:00.0", "0000:26:00.0"]
