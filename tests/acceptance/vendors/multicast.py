"""Multicast in NVIDIA's switches (NVLS). In: devices, the environment, NCCL's log.
Out: on, off or unavailable.

Both the host's description and the metrics of collectives use this module, because a bound holds for one
state only. The environment says whether NCCL may use NVLS; only NCCL's log says whether it does.
"""

import os
import re

SWITCH = "NCCL_NVLS_ENABLE"
USED = re.compile(r"NVLS multicast support is available|NVLS comm 0x")
MISSING = "NVLS multicast support is not available"


def state(vendor: str, devices: int, log: str | None = None) -> str:
    """The state of multicast by NCCL's log, or by the environment without a log; one device has no fabric."""
    if vendor != "nvidia" or devices < 2:
        return "unavailable"
    if os.environ.get(SWITCH) == "0":
        return "off"
    if log is None:
        return "on"
    return "on" if USED.search(log) and MISSING not in log else "unavailable"
