"""Suites and trainers run in images of any Python from 3.10 on, and in environments of uv or virtualenv."""

import ast
import hashlib
import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import requirements, startup

ROOT = Path(__file__).resolve().parents[3]
OLDEST = (3, 10)
SUITES = sorted([ROOT / "tests/conftest.py", *(ROOT / "tests/acceptance").rglob("*.py")])
RESEARCH = ROOT / "benchmarks" / "training"
TRAINERS = sorted([*(ROOT / "trainers").rglob("*.py"), *RESEARCH.glob("*.py")])
ALLOWED = {"torch", "pytest"}
# An SMI library, and psutil, which has a fallback: only inside functions, where their absence is handled.
# packaging is there wherever pytest is: pytest requires it.
GUARDED = {"amdsmi", "pynvml", "psutil", "packaging"}
# Part of a stack or of a user's choice, imported by what is only called where they are.
WHERE_PRESENT = {
    "tests/acceptance/workloads/machine_code.py": {"triton"},
    "tests/acceptance/workloads/attention_masks.py": {"flash_attn"},
    "tests/acceptance/workloads/attention_models.py": {"flash_attn"},
    "tests/acceptance/workloads/attention_packed.py": {"flash_attn"},
    "tests/acceptance/workloads/flash_compile.py": {"flash_attn"},
    "tests/acceptance/workloads/flash_package.py": {"flash_attn"},
    "tests/acceptance/workloads/linear_losses.py": {"liger_kernel"},
    "tests/acceptance/workloads/package_layers.py": {
        *("bitsandbytes", "liger_kernel", "torchao", "transformer_engine")
    },
    "tests/acceptance/workloads/triton_kernels.py": {"triton"},
    "tests/acceptance/workloads/generated_torchao.py": {"torchao"},
    "tests/acceptance/workloads/generated_triton.py": {"triton"},
    "tests/acceptance/workloads/transformers_models.py": {"transformers"},
    # What reads data that a user brings; data.py imports it for a path alone.
    "trainers/arrow.py": {"datasets", "numpy"},
    "trainers/shards.py": {"numpy"},
    "trainers/streams.py": {"numpy", "tokenizers"},
    "trainers/initial.py": {"safetensors"},
    "trainers/trackers.py": {"wandb"},
    "benchmarks/training/rows.py": {"yaml"},
    "trainers/layouts/fp8_weights.py": {"torchao"},
    "trainers/layouts/prepare.py": {"torchao"},
    "trainers/models/hf_llama.py": {"transformers"},
    "trainers/tools/evaluate.py": {"lm_eval"},
    "trainers/tools/scoring.py": {"transformers"},
    "trainers/fused/triton_ops.py": {"triton"},
}
AT_TOP = {
    "tests/acceptance/workloads/machine_code.py",
    "tests/acceptance/workloads/generated_triton.py",
    "tests/acceptance/workloads/triton_kernels.py",
    "trainers/fused/triton_ops.py",
    "trainers/arrow.py",
    "trainers/shards.py",
    "trainers/streams.py",
}


@pytest.mark.parametrize("path", [*SUITES, *TRAINERS], ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_parses_and_imports_only_what_an_image_has(path):
    name = str(path.relative_to(ROOT))
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=OLDEST)
    foreign = [
        f"{name}:{line} imports {module}"
        for module, line, at_top in _imports(tree)
        if not _may_import(name, module, at_top=at_top)
    ]
    assert not foreign, "\n".join(foreign)


def test_no_module_uses_what_a_later_python_brought():
    done = _vermin(ROOT / "tests/conftest.py", ROOT / "tests/acceptance", ROOT / "trainers", RESEARCH)
    assert done.returncode == 0, done.stdout


def test_what_a_later_python_brought_is_found(tmp_path):
    late = (
        "import datetime\nprint(datetime.UTC)\n",
        "import hashlib\nhashlib.file_digest\n",
        "from typing import Self\n",
        "import tomllib\n",
        "import contextlib\nwith contextlib.chdir('/'): pass\n",
    )
    planted = [tmp_path / f"late{number}.py" for number in range(len(late))]
    for path, text in zip(planted, late, strict=True):
        path.write_text(text, encoding="utf-8")
    found = _vermin(*planted)
    assert found.returncode != 0
    assert [path for path in planted if f"{path}" not in found.stdout] == []


@pytest.mark.parametrize(
    ("module", "at_top", "allowed"),
    [
        ("json", True, True),
        ("torch", True, True),
        ("pynvml", True, False),
        ("pynvml", False, True),
        ("stackcheck", False, False),
        ("numpy", False, False),
        ("requests", True, False),
    ],
)
def test_what_may_be_imported_where(module, at_top, allowed):
    assert _may_import("tests/acceptance/test_devices.py", module, at_top=at_top) is allowed


def _vermin(*paths: Path) -> subprocess.CompletedProcess[str]:
    version = ".".join(map(str, OLDEST))
    program = str(Path(sys.executable).with_name("vermin"))
    command = [program, f"--target={version}-", "--violations", "--no-parse-comments"]
    return subprocess.run([*command, *map(str, paths)], capture_output=True, text=True, check=False)


def _imports(tree: ast.Module) -> Iterator[tuple[str, int, bool]]:
    """Module, line, and whether it is imported as soon as the file is."""
    inside = {
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (
                (alias.name.partition(".")[0], node.lineno, node not in inside) for alias in node.names
            )
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield str(node.module).partition(".")[0], node.lineno, node not in inside


def _may_import(name: str, module: str, *, at_top: bool) -> bool:
    rooms = {"trainers": [], "benchmarks": [RESEARCH]}.get(
        name.partition("/")[0], [ROOT / "tests/acceptance"]
    )
    owns = ROOT / "trainers", *rooms
    if module in sys.stdlib_module_names or module in ALLOWED:
        return True
    if any((own / module).is_dir() or (own / f"{module}.py").is_file() for own in owns):
        return True
    guarded = module in GUARDED and not at_top
    return guarded or (module in WHERE_PRESENT.get(name, ()) and (not at_top or name in AT_TOP))


MODULE = "a module that corrects distutils\n"


@pytest.fixture
def site(tmp_path, monkeypatch) -> Path:
    """An environment with the hook, whose module is one of the known ones."""
    monkeypatch.setattr(startup, "HOOK_DIGESTS", (hashlib.sha256(MODULE.encode()).hexdigest(),))
    (tmp_path / startup.HOOK).write_text("import _virtualenv")
    (tmp_path / startup.HOOK_MODULE).write_text(MODULE)
    return tmp_path


def test_the_hook_of_uv_is_accepted_as_uv_wrote_it(site):
    assert startup.problems([str(site)]) == ([site / startup.HOOK], [])


@pytest.mark.parametrize(
    ("name", "body"),
    [
        (startup.HOOK, "import _virtualenv; import os"),
        (startup.HOOK, "import evil"),
        (startup.HOOK_MODULE, MODULE + "import os\n"),
        (startup.HOOK_MODULE, ""),
    ],
)
def test_a_changed_hook_is_a_problem_that_names_the_way_out(site, name, body):
    (site / name).write_text(body)
    (problem,) = startup.problems([str(site)])[1]
    assert "no known virtualenv or uv wrote these bytes" in problem
    assert f"rm {site / startup.HOOK}" in problem


def test_the_hook_without_its_module_and_another_name_are_problems(site):
    (site / "other.pth").write_text("import _virtualenv")
    (site / startup.HOOK_MODULE).unlink()
    assert len(startup.problems([str(site)])[1]) == 2


def test_the_known_digests_are_digests():
    assert len(set(startup.HOOK_DIGESTS)) == len(startup.HOOK_DIGESTS)
    assert all(len(digest) == len(bytes.fromhex(digest)) * 2 == 64 for digest in startup.HOOK_DIGESTS)


def test_unmet_requirements_are_found_without_pip(tmp_path):
    wanted = {
        "Torch": ("2.13.0+cpu", ("numpy>=2", "setuptools; extra == 'dev'", "sympy; python_version < '3'")),
        "numpy": ("1.26.4", ("missing_one",)),
        "fine": ("1.0rc1", ("torch==2.13.0", "torch>=2.0; python_version > '3'")),
        "broken": ("1", ("not a requirement !",)),
    }
    for name, (version, requires) in wanted.items():
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {each}" for each in requires)]
        (folder / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n")
    found = requirements.problems(importlib.metadata.distributions(path=[str(tmp_path)]))
    assert found == [
        "Torch 2.13.0+cpu has requirement numpy>=2, but you have numpy 1.26.4",
        "broken 1 has a requirement that is not valid: not a requirement !",
        "numpy 1.26.4 requires missing_one, which is not installed",
    ]
