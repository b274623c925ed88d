"""Environments that uv or virtualenv made: a start-up hook that nobody owns, and no pip."""

import hashlib
import importlib.metadata
from pathlib import Path

import pytest

from harness import requirements, startup

MODULE = "a module that corrects distutils\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment with the hook, whose module is one of the known ones."""
    monkeypatch.setattr(startup, "HOOK_DIGESTS", (hashlib.sha256(MODULE.encode()).hexdigest(),))
    (tmp_path / startup.HOOK).write_text("import _virtualenv")
    (tmp_path / startup.HOOK_MODULE).write_text(MODULE)
    return tmp_path


def test_the_hook_of_uv_is_accepted_as_uv_wrote_it(site: Path) -> None:
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
def test_a_changed_hook_is_a_problem_that_names_the_way_out(site: Path, name: str, body: str) -> None:
    (site / name).write_text(body)
    (problem,) = startup.problems([str(site)])[1]
    assert "no known virtualenv or uv wrote these bytes" in problem
    assert f"rm {site / startup.HOOK}" in problem


def test_the_hook_without_its_module_and_another_name_are_problems(site: Path) -> None:
    (site / "other.pth").write_text("import _virtualenv")
    (site / startup.HOOK_MODULE).unlink()
    assert len(startup.problems([str(site)])[1]) == 2


def test_the_known_digests_are_digests() -> None:
    assert len(set(startup.HOOK_DIGESTS)) == len(startup.HOOK_DIGESTS)
    assert all(len(digest) == len(bytes.fromhex(digest)) * 2 == 64 for digest in startup.HOOK_DIGESTS)


def test_unmet_requirements_are_found_without_pip(tmp_path: Path) -> None:
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
