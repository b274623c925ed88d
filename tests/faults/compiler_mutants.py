"""Every mutant of compiled code, in one process with torch and Triton's interpreter. In: nothing.

Out: the JSON line of `kernel_mutants`. tests/acceptance must be on the import path.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

from compiler_checks import CHECKS
from compiler_table import MUTANTS
from kernel_mutants import run

if __name__ == "__main__":
    run(CHECKS, MUTANTS)
