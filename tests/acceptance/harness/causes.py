"""The likely causes of a bad measurement. In: a metric's name, or a host's warnings.
Out: causes, the next command.

The causes come from the issues of nccl-tests and from both vendors' acceptance guides.
"""

from collections.abc import Iterable, Mapping
from typing import Any

COLLECTIVE = (
    "peer access off, falling back to host memory (NCCL_DEBUG=INFO says SHM instead of P2P)",
    "PCIe ACS or IOMMU translation between the devices",
    "one link down: see test_devices_links.py::test_every_pair_is_linked and the P2P matrix",
    "a throttled or power-capped device, which slows every ring",
    "a stray NCCL_* or RCCL_* variable or nccl.conf: see `environment` in result.json",
)
CAUSES: Mapping[str, tuple[str, ...]] = {
    "together_": ("throttling or a lowered power cap of that device", "its cooling", "another job on it"),
    "gemm_tflops": ("throttling or a lowered power cap", "another BLAS backend than expected", "another job"),
    "copy_gb_per_s": ("throttling", "ECC repair in progress", "another job on the device"),
    "attention": ("another attention backend than expected", "throttling", "another job on the device"),
    **dict.fromkeys(
        ("all_", "reduce", "broadcast", "scatter", "gather", "send", "p2p", "pair", "barrier"), COLLECTIVE
    ),
    "preflight_gemm": ("throttling or a lowered power cap", "another job on the device"),
    "preflight_copy": ("throttling", "ECC repair in progress", "another job on the device"),
    "preflight_": COLLECTIVE,
    "h2d": ("PCIe link narrower or slower than the slot", "wrong NUMA node", "memory not pinned"),
    "d2h": ("PCIe link narrower or slower than the slot", "wrong NUMA node", "memory not pinned"),
    "train": (
        "a slower attention backend",
        "a graph break",
        "collectives or the GEMM low as well",
        "throttling",
    ),
}


# A text in the library's log -> the cause. The texts are from RCCL's src/init.cc and ROCm/rccl#1562.
NUMA_BALANCING = "NUMA balancing moves pages while they are copied: sysctl kernel.numa_balancing=0"
OF_WARNINGS: Mapping[str, str] = {
    "NUMA auto balancing": NUMA_BALANCING,
    "iommu=pt": "an IOMMU translates between the devices: boot with iommu=pt",
    "HSA_FORCE_FINE_GRAIN_PCIE": "PCIe peers need HSA_FORCE_FINE_GRAIN_PCIE=1 in the environment",
}


# A text in the error of a workload -> the cause.
OF_ERRORS: Mapping[str, str] = {
    "hipIpcGetMemHandle failed": "processes cannot share a device's memory: in containers of the Kubernetes"
    " device plug-in (ROCm/rocm-systems#7864), or beside another job on this node (ROCm/rocm-systems#10609);"
    " run the same image in a container of the node's own engine, alone"
}


def of_host(warnings: Iterable[str], kernel: Mapping[str, Any]) -> tuple[str, ...]:
    """The causes that the warnings of the collective library and the kernel's settings name."""
    log = "\n".join(warnings)
    found = [cause for words, cause in OF_WARNINGS.items() if words in log]
    if kernel.get("numa_balancing") not in (None, "0"):
        found.append(NUMA_BALANCING)
    return tuple(dict.fromkeys(found))


def likely(metric: str) -> tuple[str, ...]:
    """The causes to check first; empty for an unknown metric."""
    for prefix, causes in CAUSES.items():
        if metric.startswith(prefix):
            return causes
    return ()
