"""Imports go down the list of rooms (docs/architecture.md), without exceptions."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[3] / "stackcheck"
ROOMS = (
    "cli",
    "fleet",
    "nightly",
    "report",
    "compare",
    "flow",
    "proof",
    "history",
    "certificate",
    "suite",
    "imaging",
    "recipe",
    "matrix",
    "engine",
    "oci",
    "policy",
    "vendors",
    "files",
    "errors",
)
ENTRANCES = {"__init__", "__main__"}  # the version, and `python -m stackcheck`


def room_of(module: str) -> str:
    """The room of a dotted module name below `stackcheck`."""
    return module.split(".")[1] if "." in module else ""


def imported(path: Path) -> set[str]:
    """The rooms that a module imports, at load time, for types or inside a function."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: a relative import hides the room"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {room_of(name) for name in names if name.split(".")[0] == "stackcheck"}
    return found - {"__version__"}


def climbs(package: Path) -> list[str]:
    """Each import that goes up, as `room/module.py imports room`."""
    bad = []
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package)
        room = place.parts[0].removesuffix(".py")
        if room in ENTRANCES:
            continue
        order = ROOMS.index(room)
        bad += [f"{place} imports {name}" for name in imported(path) if ROOMS.index(name) < order]
    return bad


def test_every_module_is_in_a_room() -> None:
    found = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")}
    assert found - ENTRANCES <= set(ROOMS)


def test_imports_go_down_the_list_of_rooms() -> None:
    assert climbs(PACKAGE) == []


@pytest.mark.parametrize(
    "line",
    [
        "from stackcheck.cli import output",
        "from stackcheck import flow",
        "import stackcheck.suite.run",
        "def f():\n    from stackcheck.imaging import build",
    ],
)
def test_an_import_that_goes_up_is_found(tmp_path: Path, line: str) -> None:
    module = tmp_path / "matrix" / "matrix.py"
    module.parent.mkdir()
    module.write_text(line)
    assert len(climbs(tmp_path)) == 1
