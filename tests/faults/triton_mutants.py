"""Every named fault of a compiler of Triton, in one process with its interpreter. In: nothing.

Out: the JSON line of `kernel_mutants`. tests/acceptance must be on the import path.
"""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

import torch

import drawn_triton_faults
from workloads import generated

CHECK = "test_generated.py::test_generated_triton"
RUN, HEALTHY = 0, 12  # the seed, and how many programs run without a fault


def main() -> None:
    """The programs without a fault, then each fault in those that it strikes, until one fails."""
    torch.set_num_threads(1)
    healthy = generated.check("triton", RUN, HEALTHY, HEALTHY)
    found = {"healthy programs": {"failing": len(healthy["failed"]), "check": CHECK}}
    programs = drawn_triton_faults.drawn(RUN)
    for name, fault in drawn_triton_faults.NAMED.items():
        _, words = drawn_triton_faults.looked_for(fault, RUN, programs)
        found[name] = {"failing": int(bool(words)), "check": CHECK}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
