"""The call chains of docs/reference/architecture.md name only what exists, and leave no call back out."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FLOW = ("matrix", "recipe", "imaging", "suite", "certificate")  # rooms in the order of the flow
BACKWARD = 15  # calls back to an earlier room: this number only falls
FOLDERS = (ROOT / "stackcheck", ROOT / "tests" / "acceptance")
SECTION = re.compile(r"^## Two paths.*?(?=^## )", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```\n(.*?)^```", re.MULTILINE | re.DOTALL)
# `suite/results.read_result_file, .parse` names two functions of one module.
ENTRY = re.compile(
    r"(?:^ *|, )(?P<module>\w[\w/]*)\.(?P<first>\w+(\.\w+)?)(?P<others>(, \.\w+)*)", re.MULTILINE
)


def named(page: str) -> Iterator[tuple[str, str]]:
    """Module and function of each entry of the call chains."""
    for block in BLOCK.findall("".join(SECTION.findall(page))):
        for line in block.splitlines():
            for entry in ENTRY.finditer(re.split(r"(?<=\S)  ", line)[0]):
                owner = entry["first"].rpartition(".")[0]
                yield entry["module"], entry["first"]
                for other in entry["others"].split(", .")[1:]:
                    yield entry["module"], f"{owner}.{other}" if owner else other


def defined(module: str) -> set[str]:
    """The functions, classes and methods of a module: `load`, `Engine.connect`."""
    ends = (f"{module}.py", f"{module}/__init__.py")
    path = next((folder / end for folder in FOLDERS for end in ends if (folder / end).is_file()), None)
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body if path else ():
        names.add(getattr(node, "name", ""))
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return names


def missing(page: str) -> list[str]:
    """The entries that name nothing."""
    return sorted({f"{module}.{name}" for module, name in named(page) if name not in defined(module)})


def calls(path: Path, name: str) -> Iterator[str]:
    """What a function calls in other modules, itself and through functions of its own module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    own = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}".removeprefix("stackcheck.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    waiting, seen = [name], set[str]()
    while waiting:
        current = waiting.pop()
        if current in seen or current not in own:
            continue
        seen.add(current)
        for node in ast.walk(own[current]):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            waiting.append(called.removeprefix("self."))
            first, dot, rest = called.partition(".")
            if first in imported:
                module, _, last = f"{imported[first]}{dot}{rest}".rpartition(".")
                yield f"{module.replace('.', '/')}.{last}"


def hidden(page: str, package: Path) -> list[str]:
    """Calls from a function of the chains back to an earlier room of the flow that the chains do not show."""
    shown = {f"{module}.{name}" for module, name in named(page)}
    found = set()
    for module, name in set(named(page)):
        room, path = module.partition("/")[0], package / f"{module}.py"
        earlier = FLOW[: FLOW.index(room)] if room in FLOW and path.is_file() else ()
        for call in calls(path, name.rpartition(".")[2]) if earlier else ():
            constant = call.rpartition("/")[2].partition(".")[0].isupper()  # its method is a string's
            if call.partition("/")[0] in earlier and call not in shown and not constant:
                found.add(f"{module}.{name} calls {call}")
    return sorted(found)


def backward(package: Path) -> list[str]:
    """Each call, in any module of the flow, of a name that is imported from an earlier room."""
    found = []
    for room in FLOW:
        for path in sorted((package / room).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            names = {
                alias.asname or alias.name: f"{node.module}.{alias.name}"
                for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom)
                for alias in node.names
            }
            for node in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
                first, dot, rest = ast.unparse(node.func).partition(".")
                called = f"{names.get(first, first)}{dot}{rest}"
                if called.startswith(tuple(f"stackcheck.{name}." for name in FLOW[: FLOW.index(room)])):
                    found.append(f"{path.relative_to(package)}:{node.lineno} calls {called}")
    return found


def test_the_calls_back_to_earlier_rooms_do_not_become_more():
    found = backward(ROOT / "stackcheck")
    assert len(found) == BACKWARD, "\n".join(["lower BACKWARD, or take the new call out:", *found])


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("from stackcheck.recipe import lock\nlock.lock(1)", 1),
        ("from stackcheck.recipe.lock import lock as made\nmade(1)\nmade(2)", 2),
        ("def late():\n    from stackcheck.matrix.matrix import Matrix\n    return Matrix.load()", 1),
        ("import stackcheck.recipe.lock\nstackcheck.recipe.lock.lock()", 1),
        ("from stackcheck import recipe\nrecipe.lock.lock()", 1),
        ("from stackcheck.suite import run\nrun.run()", 0),
        ("from stackcheck.imaging import build\nbuild.build()", 0),
        ("from stackcheck.engine import client\nclient.connect()", 0),
    ],
)
def test_a_call_back_counts_once_for_each_place(tmp_path, line, counts):
    (tmp_path / "imaging").mkdir()
    (tmp_path / "imaging" / "site.py").write_text(f"{line}\n")
    assert len(backward(tmp_path)) == counts


def test_every_call_back_to_an_earlier_room_is_in_the_chains():
    assert (
        hidden(
            (ROOT / "docs" / "reference" / "architecture.md").read_text(encoding="utf-8"), ROOT / "stackcheck"
        )
        == []
    )


@pytest.mark.parametrize(
    "body",
    [
        "def judge():\n    matrix.load()",
        "def judge():\n    _help()\ndef _help():\n    return str(matrix.load(1))",
        "class Verdict:\n    def judge(self):\n        self.one()\n    def one(self):\n        matrix.load()",
    ],
)
def test_a_call_back_that_is_left_out_is_found(tmp_path, body):
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite" / "verdict.py").write_text(f"from stackcheck.matrix import matrix\n{body}\n")
    page = "## Two paths\n```\nsuite/verdict.judge   -> Verdict\n```\n## Next\n"
    assert hidden(page, tmp_path) == ["suite/verdict.judge calls matrix/matrix.load"]


def test_every_function_of_the_call_chains_exists():
    page = (ROOT / "docs" / "reference" / "architecture.md").read_text(encoding="utf-8")
    assert missing(page) == []
    assert len(set(named(page))) > 50


def test_a_renamed_function_is_found():
    lines = (
        "suite/results.read_result_file, .parsed   -> RunResult",
        "  engine/client.Engine.start",
        "gone/module.run",
    )
    page = "## Two paths\n```\n" + "\n".join(lines) + "\n```\n## Next\n"
    assert missing(page) == ["engine/client.Engine.start", "gone/module.run", "suite/results.parsed"]
