"""What decided a collective's speed: environment, configuration files, and the library's own choices.

In: the environment, and the file that NCCL_DEBUG_FILE names. Out: JSON facts. Both libraries, NCCL and RCCL.
"""

import os
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vendors import multicast
from workloads import backend

PREFIXES = ("NCCL_", "RCCL_", "TORCH_NCCL_", "HSA_", "GPU_MAX_HW_QUEUES", "HIP_FORCE_DEV_KERNARG", "UCX_")
HIDDEN = ("~/.nccl.conf", "/etc/nccl.conf", "~/.rccl.conf", "/etc/rccl.conf")
# "AllReduce: 1048576 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..15}"; older releases print numbers.
CHOICE = re.compile(r"(\w+): (\d+) Bytes -> Algo (\w+) proto (\w+)")
# What the tests set themselves to learn the choices; it changes no result.
OURS = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
WORDS = {"algo": ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")}
PROTOCOLS = ("LL", "LL128", "SIMPLE")


def facts() -> dict[str, Any]:
    """`environment`, `files`, `choices` per operation and size, `nvls`, `library`."""
    text = debug_text()
    return {
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(PREFIXES) and name not in OURS
        },
        "files": [path for path in HIDDEN if Path(path).expanduser().exists()],
        "choices": choices(text),
        "nvls": multicast.state("nvidia" if torch.version.cuda else "", dist.get_world_size(), text),
        "warnings": sorted(
            {line.split("WARN", 1)[1].strip() for line in text.splitlines() if " WARN " in line}
        ),
        "library": ".".join(map(str, torch.cuda.nccl.version())) if backend() == "nccl" else "gloo",
    }


def debug_text() -> str:
    """This rank's debug file; empty where none was asked for."""
    pattern = os.environ.get("NCCL_DEBUG_FILE", "").replace("%h", "*").replace("%p", str(os.getpid()))
    if not pattern:
        return ""
    return "".join(p.read_text(errors="replace") for p in Path(pattern).parent.glob(Path(pattern).name))


def choices(text: str) -> dict[str, dict[str, str]]:
    """{"AllReduce": {"1048576": "RING/LL"}}: the algorithm and protocol for each size seen."""
    found: dict[str, dict[str, str]] = {}
    for op, size, algorithm, protocol in CHOICE.findall(text):
        names = _word(algorithm, WORDS["algo"]), _word(protocol, PROTOCOLS)
        found.setdefault(op, {})[size] = "/".join(names)
    return found


def _word(value: str, names: tuple[str, ...]) -> str:
    return names[int(value)] if value.isdigit() and int(value) < len(names) else value
