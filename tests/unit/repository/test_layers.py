"""Imports go down the list of rooms (docs/reference/architecture.md), without exceptions."""

import ast
import graphlib
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
    "mirrors",
    "versions",
    "policy",
    "vendors",
    "files",
    "errors",
)
ORCHESTRATED = {"run": "run", "verdict": "judge"}  # a module of suite/ -> its function with one caller
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


def test_every_module_is_in_a_room():
    found = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")}
    assert found - ENTRANCES <= set(ROOMS)


def test_imports_go_down_the_list_of_rooms():
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
def test_an_import_that_goes_up_is_found(tmp_path, line):
    module = tmp_path / "matrix" / "matrix.py"
    module.parent.mkdir()
    module.write_text(line)
    assert len(climbs(tmp_path)) == 1


def users(package: Path, module: str, function: str) -> list[str]:
    """The modules that name a function of a module of suite/, through whatever import."""
    found = []
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {f"stackcheck.suite.{module}"}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "stackcheck.suite":
                names |= {alias.asname or alias.name for alias in node.names if alias.name == module}
            elif isinstance(node, ast.Import):
                names |= {alias.asname for alias in node.names if alias.name in names and alias.asname}
        for node in ast.walk(tree):
            direct = isinstance(node, ast.ImportFrom) and node.module == f"stackcheck.suite.{module}"
            if (direct and function in {alias.name for alias in node.names}) or (
                isinstance(node, ast.Attribute) and node.attr == function and ast.unparse(node.value) in names
            ):
                found.append(str(path.relative_to(package)))
    return found


@pytest.mark.parametrize(("module", "function"), ORCHESTRATED.items())
def test_one_module_runs_and_judges(module, function):
    assert users(PACKAGE, module, function) == ["suite/judged.py"]


@pytest.mark.parametrize(
    "line",
    [
        "from stackcheck.suite import run\nrun.run(1)",
        "from stackcheck.suite import run as suites\nhand_over(suites.run)",
        "from stackcheck.suite.run import run as go",
        "import stackcheck.suite.run\nstackcheck.suite.run.run(1)",
        "import stackcheck.suite.run as there\nthere.run(1)",
    ],
)
def test_a_second_caller_is_found(tmp_path, line):
    (tmp_path / "night.py").write_text(line)
    assert users(tmp_path, "run", "run") == ["night.py"]


def doubles(package: Path) -> dict[str, list[str]]:
    """Each name of a class that stands in several modules, with these."""
    found: dict[str, list[str]] = {}
    for path in sorted(package.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(str(path.relative_to(package)))
    return {name: places for name, places in found.items() if len(places) > 1}


def test_the_name_of_a_class_stands_once():
    assert doubles(PACKAGE) == {}


def test_a_second_class_of_a_name_is_found(tmp_path):
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("class Wanted: ...")
    assert doubles(tmp_path) == {"Wanted": ["a.py", "b.py"]}


def loaded(package: Path) -> dict[str, set[str]]:
    """Module -> the modules of the package that have to be loaded before it; those for types do not."""
    paths = {
        ".".join(path.relative_to(package.parent).with_suffix("").parts) for path in package.rglob("*.py")
    }
    found: dict[str, set[str]] = {}
    for name in paths:
        tree = ast.parse(
            (package.parent / name.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
        )
        whole = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module]
        found[name] = {
            place
            for node in whole
            for place in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
            if place in paths
        }
    return found


def test_each_module_can_be_the_first_that_is_loaded():
    graphlib.TopologicalSorter(loaded(PACKAGE)).prepare()


def test_modules_that_load_each_other_are_found(tmp_path):
    for name, other in ("ab", "ba"):
        (tmp_path / f"{name}.py").write_text(f"from {tmp_path.name} import {other}")
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(loaded(tmp_path)).prepare()
