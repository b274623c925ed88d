"""NVIDIA GPUs on the PCI bus that no list names. In: /sys, /proc, /dev. Out: bus addresses.

NVML says nothing of a GPU that its driver never held or could not start. sysfs shows every GPU of the machine
also to a container or a job that was given some of them, so only what was given counts: by the container
toolkit's "all", or by a device node that this process may open.
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
JOB = "SLURM_JOB_ID"  # its jobs hold some of the devices in a container that was promised all


def gpus() -> Mapping[str, str]:
    """The data-centre GPUs of the bus -> the driver that holds each, or ""."""
    return kernel_files.drivers(SYS, NVIDIA, COMPUTE_CLASSES)


def unheld() -> tuple[str, ...]:
    """GPUs that neither NVIDIA's driver nor a virtual machine holds, unless ours is a part of the machine."""
    found = gpus()
    if not all(_is_given(bdf) for bdf, driver in found.items() if driver == "nvidia"):
        return ()
    return tuple(bdf for bdf, driver in found.items() if driver not in ("nvidia", kernel_files.HANDED_ON))


def unlisted(listed: Collection[str]) -> tuple[str, ...]:
    """GPUs that the driver holds and that were given to us, and that NVML does not list all the same."""
    held = (bdf for bdf, driver in gpus().items() if driver == "nvidia")
    return tuple(bdf for bdf in held if bdf not in listed and _is_given(bdf) and _is_allowed(bdf))


def _is_given(bdf: str) -> bool:
    """By its node, where the driver's file names that. The toolkit hides the file of what it did not give,
    and then its promise counts; an image's own "all" promises nothing of GPUs whose files are in sight.
    """
    if (node := _node(bdf)) is not None:
        return node.exists()
    return os.environ.get(GIVEN) == "all" and JOB not in os.environ


def _is_allowed(bdf: str) -> bool:
    """A device cgroup, as of a Slurm job, leaves a node in sight and refuses to open it."""
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
    told = re.search(
        r"Device Minor:\s*(\d+)", kernel_files.text(PROC / "driver/nvidia/gpus" / bdf / "information")
    )
    return DEV / f"nvidia{told[1]}" if told else None
