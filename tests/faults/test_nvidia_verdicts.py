"""Verdicts on a stubbed host with NVIDIA GPUs, over its drivers. In: a driver, or a fault. Out: a verdict.

The device suites run over the stub of NVML (`stubs/pynvml.py`); what torch would show comes from the table of
healthy answers (`device_hosts.SEEN`), so that no torch is needed here. The rest is made up (`made_up.py`).
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import host_verdicts
import planting
from device_hosts import SEEN
from planting import Fault
from stackcheck.errors import ConfigurationError
from test_device_faults import FAULTS, UNANSWERED

HERE = Path(__file__).resolve().parent

SUITES = sorted((HERE.parent / "acceptance").glob("test_devices*.py"))
# A plugin: the answers of torch's child, in the process of pytest.
PLUGIN = """import json, os
from harness.worker import Worker
ANSWERS = {name: eval(text) for name, text in json.loads(os.environ["STACKCHECK_ANSWERS"]).items()}
Worker.call = lambda self, function, kwargs, **_: ANSWERS[function](**kwargs)
"""
# Driver -> the newest CUDA that it serves as NVML writes it, and the CUDA of an image that it runs.
DRIVERS = {
    "535.261.03": (12020, "12.1"), "550.163.01": (12040, "12.4"), "560.35.05": (12060, "12.6"),
    "570.195.03": (12080, "12.8"), "580.159.04": (13000, "13.0"), "590.48.01": (13010, "13.0"),
}  # fmt: skip
PLANTED = [fault for fault in FAULTS if fault.vendor == "nvidia"]
# The only skip among them that this host's data confirm.
ACCEPTED = "cards without any bridge"
ABSENT = "no NVIDIA device is visible"
# What the verdict says besides of a machine that is no longer 4 H200s.
OF_ANOTHER = ("cannot be certified yet: bounds missing", "and a bound is for devices of one model")
WITH_RECOVERY = 570  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION came with it


def host(driver: str, **state: Any) -> Fault:
    """A host with this driver, healthy but for `state`."""
    serves, runtime = DRIVERS[driver]
    old = int(driver.partition(".")[0]) < WITH_RECOVERY
    nvml = {"driver": driver, "cuda": serves, **({"recovery": "not_supported"} if old else {}), **state}
    patches = SEEN | {"vendors.nvidia:torch_runtime": f"lambda: {runtime!r}"}
    return Fault("nothing", SUITES[0].name, vendor="nvidia", nvml=nvml, patches=patches)


def run(fault: Fault, folder: Path, *suites: Path) -> dict[str, Any]:
    answers = {name: text for name, text in fault.patches.items() if name.startswith("workloads.")}
    others = {name: text for name, text in fault.patches.items() if name not in answers}
    return planting.run(
        replace(
            fault,
            patches={"vendors.nvidia_device:_numa_node": "lambda bdf: 0", **others},
            files={"answers_of_torch.py": PLUGIN},
            env={**fault.env, "STACKCHECK_ANSWERS": json.dumps(SEEN | answers)},
            arguments=(*map(str, suites), "-p", "answers_of_torch", *fault.arguments),
        ),
        folder,
    )


@pytest.mark.healthy(check="test_devices.py", vendor="nvidia")
@pytest.mark.parametrize("driver", DRIVERS)
def test_a_healthy_host_passes_with_every_driver(driver, tmp_path):
    result = run(host(driver), tmp_path, *SUITES[1:])
    found = host_verdicts.judged(result, tmp_path)
    assert (found.status, found.reasons) == ("PASSED", ()), result["output"]


def test_a_driver_that_tells_the_recovery_action_has_to_tell_it(tmp_path):
    result = run(host("580.159.04", recovery="not_supported"), tmp_path, *SUITES[1:])
    found = host_verdicts.judged(result, tmp_path)
    assert found.status == "FAILED"
    assert not host_verdicts.others(found, planting.device_check("test_no_device_asks_for_recovery"))


@pytest.mark.parametrize("fault", PLANTED, ids=str)
def test_a_planted_fault_is_caught_and_the_only_reason_of_the_verdict(fault, tmp_path):
    result = run(fault, tmp_path)
    planting.judge(fault, result)
    models = [device["model"] for device in result["host"]["devices"]]
    if models and all(model.startswith("unknown") for model in models):
        with pytest.raises(ConfigurationError, match=r"devices\.json has no row for"):
            host_verdicts.judged(result, tmp_path)
        return
    found = host_verdicts.judged(result, tmp_path)
    another = models != ["H200"] * 4
    status = expected(fault)
    assert found.status == ("UNFIT" if another and status == "PASSED" else status), found.reasons
    also = (ABSENT, *(OF_ANOTHER if another else ()))
    assert not host_verdicts.others(found, fault.check, *also)


def expected(fault: Fault) -> str:
    """A skip is no pass, and what the image's library did not answer is no evidence of the machine."""
    if fault.outcome == "skipped":
        return "PASSED" if fault.name == ACCEPTED else "FAILED"
    blames_the_image = fault.outcome == "invalid" and any(words in fault.says for words in UNANSWERED)
    return host_verdicts.status(fault.check, "failed" if blames_the_image else fault.outcome)
