"""NVIDIA GPUs on the PCI bus that NVML does not list. In: /sys, /proc, /dev. Out: PCI addresses.

NVML does not show a GPU that its driver never bound or could not start. sysfs shows every GPU of the machine,
even to a container or a job that was given only some. So only GPUs that were given to us count: by the
container toolkit's "all", or by a device node that this process may open.
"""

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from vendors import kernel_files

SYS, PROC, DEV = Path("/sys"), Path("/proc"), Path("/dev")
NVIDIA = "0x10de"
COMPUTE_CLASSES = ("0x0302",)  # 3D controller: a GPU without a display
GIVEN = "NVIDIA_VISIBLE_DEVICES"  # the container toolkit's variable, which CUDA's base images set to "all"
JOB = "SLURM_JOB_ID"  # set in a Slurm job, which has only some devices even if its container was promised all


def gpus() -> Mapping[str, str]:
    """The data-centre GPUs of the bus -> the driver that holds each, or ""."""
    return kernel_files.drivers(SYS, NVIDIA, COMPUTE_CLASSES)


def unheld() -> tuple[str, ...]:
    """GPUs without NVIDIA's driver and not passed through; none if we were given only part of the machine."""
    found = gpus()
    if not all(_is_given(bdf) for bdf, driver in found.items() if driver == "nvidia"):
        return ()
    return tuple(
        bdf for bdf, driver in found.items() if driver not in ("nvidia", kernel_files.PASSED_THROUGH)
    )


def unlisted(listed: Collection[str]) -> tuple[str, ...]:
    """GPUs that the driver holds and we were given, but that NVML does not list."""
    held = (bdf for bdf, driver in gpus().items() if driver == "nvidia")
    return tuple(bdf for bdf in held if bdf not in listed and _is_given(bdf) and _is_allowed(bdf))


def _is_given(bdf: str) -> bool:
    """Whether the GPU was given to us: whether its device node exists, if the driver's file names the node.

    The toolkit hides that file for GPUs that it did not give; then its variable decides. An image may set the
    variable to "all" itself, so it does not count for GPUs whose files are visible.
    """
    if (node := _node(bdf)) is not None:
        return node.exists()
    return os.environ.get(GIVEN) == "all" and JOB not in os.environ


def _is_allowed(bdf: str) -> bool:
    """Whether we may open the node.
    A device cgroup, as of a Slurm job, shows a node and refuses to open it.
    """
    node = _node(bdf)
    if node is None or not node.exists():
        return True
    try:
        os.close(os.open(node, os.O_RDWR))
    except PermissionError:
        return False
    except OSError:  # the GPU itself does not answer
        return True
    return True


def _node(bdf: str) -> Path | None:
    information = kernel_files.text(PROC / "driver/nvidia/gpus" / bdf / "information")
    minor = re.search(r"Device Minor:\s*(\d+)", information)
    return DEV / f"nvidia{minor[1]}" if minor else None
