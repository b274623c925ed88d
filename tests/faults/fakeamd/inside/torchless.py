"""A pytest plugin for a fabricated host (`-p torchless`), on which ROCm's torch cannot run. In: the suites.
Out: the rest.

ROCm's torch needs a KFD that computes. In its place is a stand-in (`torch/` beside this file) over that for
HIP: checks that ask torch for devices, and those that copy between them, run on it; without $FAKEHIP they are
skipped. What measures speed or fills memory is skipped, and a suite that needs more of torch is skipped.
PCIe links are judged after a moment, because the fabricated links do not step down. $FAKEAMD_HIP is the HIP
release of the torch that the image would have. $FAKEAMD_SMI_TIMEOUT_S shortens the wait for a library that
hangs. Nothing else is changed.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from harness.monitor import Monitor
from harness.worker import Worker

WITHOUT_TORCH = "test_devices*.py"
REASON = "torch cannot run over a fabricated KFD"
BUSY = "workloads.devices:busy_links"
ON_HIP = {"workloads.devices:seen", "workloads.devices:peer_copies", BUSY}
MOMENT_S = 0.1

if "FAKEAMD_SMI_TIMEOUT_S" in os.environ:
    Monitor.__init__.__kwdefaults__["timeout_s"] = float(os.environ["FAKEAMD_SMI_TIMEOUT_S"])


class NeedsTorch(pytest.Module):
    """A suite that cannot be imported here."""

    def collect(self) -> list[pytest.Item]:
        pytest.skip(REASON, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if module_path.match(WITHOUT_TORCH):
        return None
    return NeedsTorch.from_parent(parent, path=module_path)


def _call(self: Worker, function: str, kwargs: Mapping[str, object], **options: object) -> object:
    has_hip = "FAKEHIP" in os.environ
    if function == BUSY and not has_hip:
        time.sleep(MOMENT_S)
        return 1
    if function not in ON_HIP or not has_hip:
        pytest.skip(REASON)
    if function == BUSY:
        kwargs = {**kwargs, "seconds": MOMENT_S / 10}
    return _CALL(self, function, kwargs, **options)  # type: ignore[arg-type]


_CALL = Worker.call
Worker.call = _call  # type: ignore[assignment, method-assign]
