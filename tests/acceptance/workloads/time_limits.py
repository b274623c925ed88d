"""Limits of time inside a workload. In: a limit as it was set on up to four H200s. Out: the limit here.

Pure. The harness makes the limit of the whole workload longer by vendor and number of ranks
(`AcceptanceSession.limit_s`), and gives the workload the factor in a variable.
"""

import os

VARIABLE = "STACKCHECK_TIME_LIMIT_FACTOR"  # harness.processes sets it


def scaled(limit_s: float) -> float:
    """The limit times the factor of this workload.

    On AMD the first collective of a process loads RCCL's kernels, and MIOpen's first call of a shape
    searches; more ranks import and compile beside each other.
    """
    return limit_s * float(os.environ.get(VARIABLE, "1"))
