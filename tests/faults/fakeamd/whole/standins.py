"""A pytest plugin for the whole command on a fabricated host. In: the suites, as a user starts them. Out:
each check either runs, or is skipped with a reason of needs.json.

torch is PyTorch's own build for processors, whose version.py names a HIP release: its import then takes the
branch of ROCm, and loads AMD's management module. What asks for devices runs in children that have the
stand-in for torch over that for HIP. Before a check of collective speed is skipped, the suite's binding of
RCCL runs over the stand-in for it: wrong data fails the check. A check that calls for anything else, and is
not in needs.json, fails: nothing passes because nobody looked.
"""

import fnmatch
import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from harness import launch, processes, skips
from harness.monitor import Monitor
from harness.records import check_id
from harness.session import PLUGIN, AcceptanceSession
from harness.worker import Worker

HERE = Path(__file__).resolve().parent
KIND = "not without a GPU"  # the host knows no such kind, and so accepts no such skip
NEEDS = json.loads((HERE / "needs.json").read_text(encoding="utf-8"))
STANDIN = "/stackcheck/inside"  # the folder of the stand-in for torch
HIP = Path("/stackcheck/hip")
BUSY = "workloads.devices:busy_links"
ON_HIP = {"workloads.devices:seen", "workloads.devices:peer_copies", BUSY}
WITHOUT_A_DEVICE = (
    *("workloads.image:*", "workloads.machine_code:*", "workloads.flash_compile:*"),
    "workloads.network_plugins:*",
)
MOMENT_S = 0.01
RCCL_TIMEOUT_S = 600
PATIENCE = "10"  # eight ranks on two cores that others use too; nothing here is judged by its time

Monitor.__init__.__kwdefaults__["timeout_s"] = float(os.environ.get("FAKEAMD_SMI_TIMEOUT_S", "60"))


def need(check: str) -> str | None:
    """The key in needs.json of what a check lacks here; None if it runs."""
    keys = [
        key for key, one in NEEDS.items() if any(fnmatch.fnmatchcase(check, name) for name in one["checks"])
    ]
    assert len(keys) < 2, f"{check} is listed under {keys}"
    return keys[0] if keys else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    check = check_id(item.nodeid)
    key = need(check)
    if key is None:
        return
    function = check.rpartition("::")[2].partition("[")[0]
    operation = NEEDS[key].get("over_rccl", {}).get(function)
    if operation and (failures := _over_rccl(item.config.pluginmanager.get_plugin(PLUGIN))[operation]):
        pytest.fail("\n".join(failures), pytrace=False)
    raise skips.Skipped(NEEDS[key]["says"], KIND, key=key, right_over_rccl=operation)


@functools.cache
def _over_rccl(session: AcceptanceSession) -> Mapping[str, list[str]]:
    """Operation -> what is wrong with the library's result on the ranks of all devices."""
    report = _LAUNCH(
        HERE / "rccl_values.py",
        [str(HIP)],
        nproc=len(session.devices),
        environment={**session.child_environment(session.devices), processes.PATIENCE: PATIENCE},
        timeout_s=session.limit_s(RCCL_TIMEOUT_S),
        folder=session.result_dir / "children",
        server=session.rank_server,
    )
    failures: dict[str, list[str]] = report["failures"]
    return failures


def _call(self: Worker, function: str, kwargs: Mapping[str, Any], **options: Any) -> object:
    if function in ON_HIP:
        path = os.pathsep.join((STANDIN, str(processes.ACCEPTANCE), os.environ["PYTHONPATH"]))
        options["environment"] = {**options["environment"], "PYTHONPATH": path}
        if function == BUSY:  # the links of a fabricated host do not step down
            kwargs = {**kwargs, "seconds": MOMENT_S}
    elif not any(fnmatch.fnmatchcase(function, name) for name in WITHOUT_A_DEVICE):
        pytest.fail(f"{function} needs a device, and its check is not in needs.json", pytrace=False)
    return _CALL(self, function, kwargs, **options)


def _launch(program: str | Path, *_: object, **__: object) -> object:
    return pytest.fail(f"{program} needs a device, and its check is not in needs.json", pytrace=False)


_CALL, _LAUNCH = Worker.call, launch.launch
Worker.call = _call  # type: ignore[assignment, method-assign]
launch.launch = _launch  # type: ignore[assignment]
