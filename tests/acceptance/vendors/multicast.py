"""Multicast in NVIDIA's switches (NVLS): on, off or unavailable. In: devices, the environment, NCCL's log.

The one place that decides it, for the host's description and for every figure of a collective: a bound is
of one state, and the environment that a run begins with only says whether NCCL may use it. NCCL's log says
whether it does.
"""

import os
import re

SWITCH = "NCCL_NVLS_ENABLE"
USED = re.compile(r"NVLS multicast support is available|NVLS comm 0x")
MISSING = "NVLS multicast support is not available"


def state(vendor: str, devices: int, log: str | None = None) -> str:
    """As NCCL says in its log, or without one as far as the environment says; one device has no fabric."""
    if vendor != "nvidia" or devices < 2:
        return "unavailable"
    if os.environ.get(SWITCH) == "0":
        return "off"
    if log is None:
        return "on"
    return "on" if USED.search(log) and MISSING not in log else "unavailable"
