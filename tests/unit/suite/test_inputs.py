"""What a run depends on is frozen and digested, so that every change is seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stackcheck.errors import ConfigurationError
from stackcheck.suite import inputs, toolkit

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(toolkit, "PACKAGES", ("iniconfig",))  # the whole of it is `test_launcher.py`'s
    root = tmp_path / "checkout"
    for name, text in {
        "matrix.yaml": "stacks: []\n",
        "tests/conftest.py": "",
        "tests/pytest.ini": "[pytest]\n",
        "tests/acceptance/test_image.py": "def test_a(): ...\n",
        "tests/acceptance/thresholds/amd/MI300X.json": "{}\n",
        "tests/unit/test_tool.py": "",
        "trainers/train.py": "",
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
    ],
)
def test_a_changed_byte_changes_exactly_the_digest_of_its_part(
    checkout: Path, tmp_path: Path, changed: str, part: str | None
) -> None:
    before = inputs.freeze(checkout, tmp_path / "frozen").as_json()
    with (checkout / changed).open("a", encoding="utf-8") as file:
        file.write("#")
    after = inputs.freeze(checkout, tmp_path / "frozen").as_json()
    assert {name for name in before if before[name] != after[name]} == ({part} if part else set())


def test_the_tools_own_tests_do_not_travel(checkout: Path, tmp_path: Path) -> None:
    inputs.freeze(checkout, tmp_path / "frozen")
    assert not (tmp_path / "frozen" / "tests" / "unit").exists()


def test_a_private_checkout_is_readable_by_the_containers_user(checkout: Path, tmp_path: Path) -> None:
    (checkout / "tests" / "acceptance" / "test_image.py").chmod(0o600)
    inputs.freeze(checkout, tmp_path / "frozen")
    assert (tmp_path / "frozen" / "tests" / "acceptance" / "test_image.py").stat().st_mode & 0o004


def test_an_edit_during_the_run_does_not_reach_what_was_digested(checkout: Path, tmp_path: Path) -> None:
    frozen = tmp_path / "frozen"
    told = inputs.freeze(checkout, frozen)
    (checkout / "trainers" / "train.py").write_text("raise SystemExit\n", encoding="utf-8")
    assert inputs.digest(frozen, matrix=checkout / "matrix.yaml") == told


def test_a_folder_without_suites_is_refused_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no acceptance suites"):
        inputs.freeze(tmp_path, tmp_path / "frozen")
