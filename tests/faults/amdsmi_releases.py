"""What each release of AMD's module tells of what the suites read. In: packages. Out: amdsmi_releases.json.

A fabricated host with the newest library takes away what an older release does not tell: calls, and keys of
their answers. `tests/integration/test_amdsmi_generations.py` reads AMD's packages anew and compares.
"""

import ast
import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FILE = HERE / "amdsmi_releases.json"
INTERFACE = "amdsmi/amdsmi_interface.py"
SOURCES = sorted((HERE.parent / "acceptance/vendors").glob("amd*.py"))
NAME = re.compile(r"[a-z][a-z0-9_]+")
Told = Mapping[str, frozenset[str]]


def table() -> Mapping[str, Any]:
    """Release -> the stacks that have it, the HIP release of their torch, lacking calls and keys."""
    found: Mapping[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def environment(release: str) -> dict[str, str]:
    """The variables that make the newest library of a fabricated host tell what this release does."""
    row = table()[release]
    keys = [f"{call}:{key}" for call, keys in row["lacks_keys"].items() for key in keys]
    return {
        "FAKEAMD_HIP": row["hip"],
        "FAKEAMD_WITHOUT": ",".join(row["lacks_calls"]),
        "FAKEAMD_WITHOUT_KEYS": ",".join(keys),
    }


def told(package: Path) -> Told:
    """Call -> the keys of its answer; both only where the suites read them."""
    tree = ast.parse((package / INTERFACE).read_text(encoding="utf-8"))
    functions = {one.name: one for one in tree.body if isinstance(one, ast.FunctionDef)}
    read = _read_by_the_suites()
    return {name: _names(functions[name]) & read for name in read & functions.keys()}


def lacking(release: Told, newest: Told) -> dict[str, Any]:
    """What a release does not tell and the newest does."""
    keys = {call: sorted(newest[call] - own) for call, own in sorted(release.items()) if call in newest}
    return {
        "lacks_calls": sorted(newest.keys() - release.keys()),
        "lacks_keys": {call: names for call, names in keys.items() if names},
    }


@functools.cache
def _read_by_the_suites() -> frozenset[str]:
    return frozenset().union(*(_names(ast.parse(path.read_text(encoding="utf-8"))) for path in SOURCES))


def _names(tree: ast.AST) -> frozenset[str]:
    texts = (one.value for one in ast.walk(tree) if isinstance(one, ast.Constant))
    return frozenset(text for text in texts if isinstance(text, str) and NAME.fullmatch(text))
