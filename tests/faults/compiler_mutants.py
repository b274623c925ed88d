"""Every mutant of compiled code, and every named fault of a compiler of Triton, in one process with its
interpreter. In: nothing.

Out: the JSON line of `kernel_mutants`. tests/acceptance must be on the import path.
"""

import json
import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

import drawn_triton_faults
from compiler_checks import CHECKS
from compiler_table import MUTANTS
from kernel_mutants import run
from workloads import generated

CHECK = "test_generated.py::test_generated_triton"
SEED, HEALTHY = 0, 12  # how many programs run without a fault


def of_programs() -> dict[str, Any]:
    """The programs without a fault, then each fault in those that it strikes, until one fails."""
    healthy = generated.check("triton", SEED, HEALTHY, HEALTHY)
    found = {"healthy programs": {"failing": len(healthy["failed"]), "check": CHECK}}
    programs = drawn_triton_faults.drawn(SEED)
    for name, fault in drawn_triton_faults.NAMED.items():
        _, words = drawn_triton_faults.looked_for(fault, SEED, programs)
        found[name] = {"failing": int(bool(words)), "check": CHECK}
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(run(CHECKS, MUTANTS) | of_programs()) + "\n")
