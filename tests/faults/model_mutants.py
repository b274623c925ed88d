"""Every mutant of a check in the shapes and sizes of models, in one process with torch. In: nothing.

Out: the JSON line of `kernel_mutants`. tests/acceptance must be on the import path.
"""

from kernel_mutants import run
from model_checks import CHECKS
from model_table import MUTANTS

if __name__ == "__main__":
    run(CHECKS, MUTANTS)
