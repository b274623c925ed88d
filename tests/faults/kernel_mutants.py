"""Every mutant of kernels and of the sizes of models in one process with torch. In: nothing.

Out: a JSON line {"mutant": {"failing": cases, "check": the check that must catch it}}. A mutant's check ends
with its first case that fails. Entries named `healthy …` run without a mutant. tests/acceptance must be on
the import path.
"""

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch

import kernel_checks
import kernel_table
from kernel_changes import Mutate
from kernel_checks import Check
from kernel_table import Mutant
from workloads import cases


@contextlib.contextmanager
def planted(target: tuple[Any, str], mutate: Mutate) -> Iterator[None]:
    """`owner.attribute` becomes `mutate(original, ...)`."""
    owner, attribute = target
    original = getattr(owner, attribute)
    setattr(owner, attribute, lambda *args, **kwargs: mutate(original, *args, **kwargs))
    try:
        yield
    finally:
        setattr(owner, attribute, original)


def run(checks: Mapping[str, tuple[str, Check]], mutants: Mapping[str, Mutant]) -> dict[str, Any]:
    """Every check without a mutant, then every mutant against its check."""
    torch.set_num_threads(1)
    found = {f"healthy {name}": told(check) for name, check in checks.items()}
    for name, (check, target, mutate) in mutants.items():
        with planted(target, mutate), mock.patch.object(cases, "run", until_one_fails):
            found[name] = told(checks[check])
    return found


def until_one_fails(named: Any, every: Any = cases.run) -> dict[str, Any]:
    """The cases up to the first one that fails, which is enough for a mutant."""
    found: list[Any] = []
    for one in named:
        found += every([one])["cases"]
        if found[-1]["failures"]:
            break
    return {"cases": found}


def told(check: tuple[str, Check]) -> dict[str, Any]:
    """How many cases of a check fail now, and the id of the check in the suite."""
    name, function = check
    return {"failing": sum(bool(case["failures"]) for case in function()["cases"]), "check": name}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(run(kernel_checks.CHECKS, kernel_table.MUTANTS)) + "\n")
