"""What a container must provide. In: device nodes, shared memory, memory limits. Out: `Requirement`s."""

import os
import resource
from pathlib import Path

from vendors import Requirement

SHM = Path("/dev/shm")
INFINIBAND = Path("/sys/class/infiniband")  # cards of RDMA, also of RoCE


def shared_memory(least_bytes: int) -> Requirement:
    """/dev/shm, through which the ranks of one machine exchange buffers."""
    stats = os.statvfs(SHM) if SHM.is_dir() else None
    size = stats.f_frsize * stats.f_blocks if stats else 0
    return Requirement(
        name="/dev/shm",
        ok=size >= least_bytes,
        got=f"{size / 2**30:.2f} GiB",
        expected=f"at least {least_bytes / 2**30:.2f} GiB",
        next_step=f"start the container with --shm-size {-(-least_bytes // 2**30)}g",
    )


def locked_memory(least_bytes: int) -> tuple[Requirement, ...]:
    """RLIMIT_MEMLOCK, which limits the memory that a network card may reach.
    The drivers of GPUs pin memory outside it, so a machine without such a card needs none, and a default host
    allows 8 MiB.
    """
    if not any(INFINIBAND.glob("*")):
        return ()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    return (
        Requirement(
            name="memlock",
            ok=unlimited or soft >= least_bytes,
            got="unlimited" if unlimited else f"{soft} bytes",
            expected=f"unlimited, or at least {least_bytes} bytes, for the network cards in {INFINIBAND}",
            next_step="start the container with --ulimit memlock=-1:-1",
        ),
    )


def device_node(path: Path, next_step: str) -> Requirement:
    """A device node that this user may read and write."""
    present = path.exists()
    usable = present and os.access(path, os.R_OK | os.W_OK)
    stat = path.stat() if present else None
    owner = f"owned by {stat.st_uid}:{stat.st_gid}, mode {stat.st_mode & 0o777:o}" if stat else "missing"
    groups = ",".join(map(str, os.getgroups()))
    return Requirement(
        name=str(path),
        ok=usable,
        got=owner if usable or not present else f"no permission on it: {owner}",
        expected=f"readable and writable by uid {os.getuid()}, groups {groups}",
        next_step=next_step,
    )
