"""Every mutant of compiled code, and every named fault of a compiler of Triton, in one process with its
interpreter. In: nothing.

Out: the JSON line of `kernel_mutants`. tests/acceptance must be on the import path.
"""

import json
import os
import sys
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

import drawn_triton_faults
from compiler_checks import CHECKS
from compiler_table import MUTANTS
from kernel_mutants import run
from workloads import arch, generated, generated_triton
from workloads.generated_triton_programs import GUARD, Program
from workloads.generated_triton_text import room
from workloads.generated_triton_values import everywhere

CHECK = "test_generated.py::test_generated_triton"
SEED, HEALTHY = 0, 8  # how many programs run without a fault


def of_programs() -> dict[str, Any]:
    """The programs without a fault, then each fault in those that it strikes, until one fails."""
    healthy = generated.check("triton", SEED, HEALTHY, HEALTHY)
    found = {"healthy programs": {"failing": len(healthy["failed"]), "check": CHECK}}
    programs = drawn_triton_faults.drawn(SEED)
    for name, fault in drawn_triton_faults.NAMED.items():
        _, words = drawn_triton_faults.looked_for(fault, SEED, programs)
        found[name] = {"failing": int(bool(words)), "check": CHECK}
    with mock.patch.object(arch, "has_tma", return_value=True):
        within, beyond = (beside_rows([one for one, _ in programs], pieces) for pieces in (1, 2))
    found["healthy pieces of 16 bytes"] = {"failing": within, "check": CHECK}
    found["a descriptor stores one more piece"] = {"failing": beyond, "check": CHECK}
    return found


def beside_rows(programs: list[Program], pieces: int) -> int:
    """How many results with right rows are refused if so many pieces of 16 bytes at a row's end changed."""
    refused = 0
    for program in programs:
        values = everywhere(program)
        for output in program.outputs:
            if output.form != "descriptor":
                continue
            right = generated_triton.expected(program, output, values)
            memory = generated_triton.empty(program, output, values[0, 0])
            inner = memory[GUARD:-GUARD]
            inner[right.written] = right.number[right.written].to(memory.dtype)
            columns = room(program, output, values[0, 0])[0][1]
            piece = 16 // memory.element_size()
            end = -(-columns // piece) * piece + (pieces - 1) * piece
            inner[columns:end] = 0
            said, _ = generated_triton.compared(program, output, 0, [memory], values)
            refused += said > 1
    return refused


if __name__ == "__main__":
    sys.stdout.write(json.dumps(run(CHECKS, MUTANTS) | of_programs()) + "\n")
