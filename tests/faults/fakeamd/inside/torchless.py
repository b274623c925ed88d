"""A pytest plugin for a fabricated host (`-p torchless`), on which torch cannot run. In: the suites. Out: the
rest.

ROCm's torch needs a KFD that computes. So a suite that imports torch is skipped as a whole, and so is a check
that asks a worker for the devices that torch sees. PCIe links are judged idle instead of under load, because
the fabricated links do not step down. $FAKEAMD_HIP is the HIP release of the torch that the image would have.
$FAKEAMD_SMI_TIMEOUT_S shortens the wait for a library that hangs. Nothing else is changed.
"""

import os
import time
from pathlib import Path

import pytest

from harness.monitor import Monitor
from harness.worker import Worker
from vendors import amd

WITHOUT_TORCH = "test_devices*.py"
REASON = "torch cannot run over a fabricated KFD"

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


def _call(self: Worker, function: str, *arguments: object, **options: object) -> object:
    del self, arguments, options
    if function == "workloads.devices:busy_links":
        time.sleep(0.1)
        return 1
    pytest.skip(REASON)


Worker.call = _call  # type: ignore[method-assign]
amd.torch_runtime = lambda: os.environ["FAKEAMD_HIP"]
