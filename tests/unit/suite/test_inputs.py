"""What a run depends on is frozen and digested, so that every change is seen."""

import ast
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from stackcheck.errors import ConfigurationError
from stackcheck.suite import inputs

ROOT = Path(__file__).parents[3]


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(inputs, "PACKAGES", ("iniconfig",))  # the whole of it is `test_launcher.py`'s
    root = tmp_path / "checkout"
    for name, text in {
        "matrix.yaml": "stacks: []\n",
        "tests/conftest.py": "",
        "tests/pytest.ini": "[pytest]\n",
        "tests/acceptance/test_image.py": "def test_a(): ...\n",
        "tests/acceptance/thresholds/amd/MI300X.json": "{}\n",
        "tests/unit/test_tool.py": "",
        "trainers/train.py": "",
        "trainers/tools/tune.py": "",
        "benchmarks/training/table.py": "",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ("tests/acceptance/test_image.py", "suites"),
        ("tests/conftest.py", "suites"),
        ("tests/acceptance/thresholds/amd/MI300X.json", "thresholds"),
        ("trainers/train.py", "trainers"),
        ("matrix.yaml", "matrix"),
        ("benchmarks/training/table.py", None),
        ("trainers/tools/tune.py", None),
    ],
)
def test_a_changed_byte_changes_exactly_the_digest_of_its_part(checkout, tmp_path, changed, part):
    before = inputs.freeze(checkout, tmp_path / "frozen").model_dump()
    with (checkout / changed).open("a", encoding="utf-8") as file:
        file.write("#")
    after = inputs.freeze(checkout, tmp_path / "frozen").model_dump()
    assert {name for name in before if before[name] != after[name]} == ({part} if part else set())


def test_a_private_checkout_is_readable_by_the_containers_user(checkout, tmp_path):
    (checkout / "tests" / "acceptance" / "test_image.py").chmod(0o600)
    inputs.freeze(checkout, tmp_path / "frozen")
    assert (tmp_path / "frozen" / "tests" / "acceptance" / "test_image.py").stat().st_mode & 0o004


def test_an_edit_during_the_run_does_not_reach_what_was_digested(checkout, tmp_path):
    frozen = tmp_path / "frozen"
    told = inputs.freeze(checkout, frozen)
    (checkout / "trainers" / "train.py").write_text("raise SystemExit\n", encoding="utf-8")
    assert inputs.digest(frozen, matrix=checkout / "matrix.yaml") == told


def test_a_folder_without_suites_is_refused_with_its_place(tmp_path):
    with pytest.raises(ConfigurationError, match="no acceptance suites"):
        inputs.freeze(tmp_path, tmp_path / "frozen")


def named(path: Path) -> Iterator[str]:
    """What a program may import: its imports at any depth, and texts, for those by `import_module`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def reachable(root: Path) -> tuple[set[str], set[str]]:
    """All modules of `trainers/`, and those that train.py or a suite can reach."""
    folder = root / "trainers"
    files = {
        ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__"): path
        for path in folder.rglob("*.py")
    }
    suites = [root / "tests/conftest.py", *(root / "tests/acceptance").rglob("*.py")]
    todo = ["train", *(name for path in suites for name in named(path))]
    found: set[str] = set()
    while todo:
        name = todo.pop()
        if "." in name:
            todo.append(name.rpartition(".")[0])
        if name in files and name not in found:
            found.add(name)
            todo += named(files[name])
    return set(files), found


def test_a_run_depends_on_exactly_the_modules_that_its_jobs_can_reach():
    every, reached = reachable(ROOT)
    tools = {name for name in every if name.split(".")[0] == "tools"}
    assert len(tools) > 5
    # The word alone leads to no code: `tools/__init__.py` is a docstring.
    assert reached - {"tools"} == every - tools, "what no job reaches belongs to trainers/tools"


def test_a_comment_in_a_tool_changes_no_digest_and_one_in_a_layout_does(tmp_path):
    """Modules of this checkout, each with one more line."""
    every, reached = reachable(ROOT)
    for name in ("tools.export", "tools.flux_weights", "models.mpt", "layouts.zero1", "corpus"):
        assert name in every
        assert (name in reached) == (not name.startswith("tools."))
    copy = tmp_path / "checkout"
    for part in ("trainers", "tests/acceptance"):
        shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
    for name in inputs.SUITE_FILES:
        shutil.copy2(ROOT / "tests" / name, copy / "tests" / name)
    before = inputs.freeze(copy, tmp_path / "frozen").trainers
    for path, same in {"tools/export.py": True, "tools/tune.py": True, "models/mpt.py": False}.items():
        with (copy / "trainers" / path).open("a", encoding="utf-8") as file:
            file.write("# a comment\n")
        assert (inputs.freeze(copy, tmp_path / "frozen").trainers == before) == same, path
