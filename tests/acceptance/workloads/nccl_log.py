"""The settings behind a collective's speed: environment, configuration files, and the library's own choices.

In: the environment, and the log that NCCL_DEBUG_FILE names, of NCCL or RCCL. Out: JSON facts.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vendors import multicast
from workloads import backend

PREFIXES = ("NCCL_", "RCCL_", "TORCH_NCCL_", "HSA_", "GPU_MAX_HW_QUEUES", "HIP_FORCE_DEV_KERNARG", "UCX_")
HIDDEN = ("~/.nccl.conf", "/etc/nccl.conf", "~/.rccl.conf", "/etc/rccl.conf")
HIDDEN_BY = "NCCL_CONF_FILE"  # this variable names one more file
BALANCING, COMMAND_LINE = Path("/proc/sys/kernel/numa_balancing"), Path("/proc/cmdline")
# "AllReduce: 1048576 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..15}"; older releases print numbers.
CHOICE = re.compile(r"(\w+): (\d+) Bytes -> Algo (\w+) proto (\w+)")
# Lines such as `NET/IB : Using [0]mlx5_0:1/IB`, `Using network IB`, `NCCL_IB_HCA set by environment to mlx5`.
NETWORK = re.compile(
    r"Using network \S+|NET/\w+ ?: (?:Using|Loaded|No device).*|.*GPU Direct RDMA.*"
    r"|NCCL_(?:IB|NET)\w* set .*"
)
# Variables that the checks set to see the choices; they change no result.
OURS = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
WORDS = {"algo": ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")}
PROTOCOLS = ("LL", "LL128", "SIMPLE")


def facts() -> dict[str, Any]:
    """The settings, the library's choices for each size, what it says of the network, its warnings."""
    text = debug_text()
    named = [os.environ[HIDDEN_BY]] if os.environ.get(HIDDEN_BY) else []
    return {
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(PREFIXES) and name not in OURS
        },
        "files": configuration([*HIDDEN, *named]) if backend() == "nccl" else {},  # gloo reads no such file
        "kernel": kernel(),
        "choices": choices(text),
        "nvls": nvls(text),
        "network": network(text),
        "warnings": sorted(
            {line.split("WARN", 1)[1].strip() for line in text.splitlines() if " WARN " in line}
        ),
        "library": ".".join(map(str, torch.cuda.nccl.version())) if backend() == "nccl" else "gloo",
    }


def nvls(text: str | None = None) -> str:
    """Whether switches add (multicast), by the library's log; call it while the world is open."""
    log = debug_text() if text is None else text
    return multicast.state("nvidia" if torch.version.cuda else "", dist.get_world_size(), log)


def configuration(paths: Iterable[str]) -> dict[str, list[str]]:
    """Each configuration file that exists, with its lines that set what the environment does not set so.

    A variable of the environment comes before a file's line.
    """
    found = {path: Path(path).expanduser() for path in paths}
    return {path: _settings(file) for path, file in found.items() if file.is_file()}


def _settings(file: Path) -> list[str]:
    lines = (line.strip() for line in file.read_text(errors="replace").splitlines())
    words = [line.partition("=") for line in lines if line and not line.startswith("#")]
    return ["".join(one) for one in words if os.environ.get(one[0].strip()) != one[2].strip()]


def kernel() -> dict[str, Any]:
    """Kernel settings that slow collectives: NUMA balancing, which moves pages, and the IOMMU."""
    balancing = BALANCING.read_text().strip() if BALANCING.is_file() else None
    words = COMMAND_LINE.read_text().split() if COMMAND_LINE.is_file() else []
    return {"numa_balancing": balancing, "iommu": [word for word in words if "iommu" in word]}


def debug_text() -> str:
    """The text of this rank's log; empty if no log was requested."""
    pattern = os.environ.get("NCCL_DEBUG_FILE", "").replace("%h", "*").replace("%p", str(os.getpid()))
    if not pattern:
        return ""
    return "".join(p.read_text(errors="replace") for p in Path(pattern).parent.glob(Path(pattern).name))


def network(text: str) -> list[str]:
    """What the library's log says of the network: the plug-in, the devices, GPUDirect, and NCCL_IB_*."""
    bodies = (line.split("INFO", 1)[-1].strip() for line in text.splitlines() if " INFO " in line)
    return sorted({found[0] for body in bodies if (found := NETWORK.search(body))})


def choices(text: str) -> dict[str, dict[str, str]]:
    """{"AllReduce": {"1048576": "RING/LL"}}: the algorithm and protocol for each size seen."""
    found: dict[str, dict[str, str]] = {}
    for op, size, algorithm, protocol in CHOICE.findall(text):
        names = _word(algorithm, WORDS["algo"]), _word(protocol, PROTOCOLS)
        found.setdefault(op, {})[size] = "/".join(names)
    return found


def _word(value: str, names: tuple[str, ...]) -> str:
    return names[int(value)] if value.isdigit() and int(value) < len(names) else value
