"""Limits of time inside a workload. In: a limit as it was set on up to four H200s. Out: the limit here.

Pure. The harness makes the limit of the whole workload longer by vendor and number of ranks
(`AcceptanceSession.limit_s`), and tells the workload by how much.
"""

import os

VARIABLE = "STACKCHECK_PATIENCE"  # harness.processes sets it


def patient(limit_s: float) -> float:
    """A limit that is as much longer as that of the whole workload.

    On AMD the first collective of a process loads RCCL's kernels, and MIOpen's first call of a shape
    searches; more ranks import and compile beside each other.
    """
    return limit_s * float(os.environ.get(VARIABLE, "1"))
