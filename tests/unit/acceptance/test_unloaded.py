"""The controller of a run loads no torch, on a bare machine too. In: the modules. Out: imports."""

import ast
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from harness import unloaded

ACCEPTANCE = Path(unloaded.__file__).resolve().parents[1]
# Programs and parts of them that run in children only.
CHILDREN = {"forked.py", "forked_ranks.py", "rank.py", "server_main.py", "worker_main.py"}
OF_CONTROLLER = sorted(
    path
    for folder in ("harness", "vendors")
    for path in (ACCEPTANCE / folder).glob("*.py")
    if path.name not in CHILDREN
)


@pytest.mark.parametrize("path", OF_CONTROLLER, ids=lambda path: path.stem)
def test_nothing_that_the_controller_calls_imports_torch(path: Path) -> None:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    modules = [name.name for node in nodes if isinstance(node, ast.Import) for name in node.names]
    modules += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    names = {module.partition(".")[0] for module in modules}
    assert not names & set(unloaded.PACKAGES)


def test_a_package_is_installed_only_if_another_finder_finds_it() -> None:
    """In a process of its own, where the names stand for packages."""
    program = (
        "from harness import unloaded; unloaded.install(); import torch, triton.language as tl;"
        "names = ('json', 'pytest', 'sys', 'triton', 'no_such_package');"
        "print(*map(unloaded.is_installed, names), tl.constexpr.__name__)"
    )
    command = [sys.executable, "-S", "-c", program]
    printed = subprocess.run(
        command, cwd=ACCEPTANCE, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert printed.split() == ["True", "False", "True", "False", "False", "triton.language.constexpr"]


def test_a_process_that_has_loaded_torch_gets_no_names_for_parts_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a fork of a process with torch: a name for `torch.testing` would be half of another torch."""
    finder = unloaded._Finder()
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert finder.find_spec("torch")
    assert finder.find_spec("torch.testing")
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    assert not finder.find_spec("torch.testing")
    assert not finder.find_spec("torchvision")
