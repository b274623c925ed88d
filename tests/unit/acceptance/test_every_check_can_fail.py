"""No check without a planted fault that names it; `stackcheck prove` then shows that the fault is caught."""

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
CHECK = re.compile(r"^def (test_\w+)\(", re.MULTILINE)
# The mutants of collectives name a check by its operation: cases.all_gather is test_all_gather_values.
OF_AN_OPERATION = re.compile(r"^test_(?P<operation>\w+)_(values|busbw)$")


def checks() -> dict[str, str]:
    """Every check by its function, with its file."""
    files = sorted((TESTS / "acceptance").glob("test_*.py"))
    return {name: path.name for path in files for name in CHECK.findall(path.read_text(encoding="utf-8"))}


def is_named(check: str, faults: str) -> bool:
    if re.search(rf"\b{check}\b", faults):
        return True
    found = OF_AN_OPERATION.match(check)
    return bool(found and re.search(rf"\w\.{found['operation']}\b", faults))


def test_every_check_has_a_planted_fault() -> None:
    faults = "\n".join(path.read_text(encoding="utf-8") for path in (TESTS / "faults").glob("*.py"))
    assert len(checks()) > 50
    without = [f"{file}::{name}" for name, file in checks().items() if not is_named(name, faults)]
    assert not without, f"plant a fault in tests/faults for {without}"
