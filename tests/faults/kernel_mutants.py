"""Every kernel mutant in one process with torch. In: nothing. Out: a JSON line {"mutant": {"failing": cases,
"check": the check that must catch it}}.

Entries named `healthy …` run without a mutant. tests/acceptance must be on the import path.
"""

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from kernel_changes import Mutate
from kernel_checks import CHECKS, Check
from kernel_table import MUTANTS, Mutant


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


def run(checks: Mapping[str, tuple[str, Check]], mutants: Mapping[str, Mutant]) -> None:
    """Every check without a mutant, then every mutant against its check."""
    torch.set_num_threads(1)
    found = {f"healthy {name}": told(check) for name, check in checks.items()}
    for name, (check, target, mutate) in mutants.items():
        with planted(target, mutate):
            found[name] = told(checks[check])
    sys.stdout.write(json.dumps(found) + "\n")


def told(check: tuple[str, Check]) -> dict[str, Any]:
    """How many cases of a check fail now, and the id of the check in the suite."""
    name, function = check
    return {"failing": sum(bool(case["failures"]) for case in function()["cases"]), "check": name}


if __name__ == "__main__":
    run(CHECKS, MUTANTS)
