"""What the checks call by name is there: a worker resolves the name, and a skip would hide its loss."""

import ast
import re
from pathlib import Path

ACCEPTANCE = Path(__file__).resolve().parents[2] / "acceptance"
NAMED = re.compile(r'"workloads\.(\w+):(\w+)"')


def test_every_workload_that_a_check_names_is_defined() -> None:
    named = {
        (path.name, *found)
        for path in ACCEPTANCE.glob("test_*.py")
        for found in NAMED.findall(path.read_text())
    }
    assert named
    missing = [
        f"{check} calls {module}:{name}"
        for check, module, name in sorted(named)
        if name not in _defined(module)
    ]
    assert not missing, missing


def _defined(module: str) -> set[str]:
    path = ACCEPTANCE / "workloads" / f"{module}.py"
    if not path.exists():
        return set()
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
