"""Freeze what a run depends on besides the image: a copy of suites, trainers and pytest, and its digests.

In: the checkout. Out: a folder to mount read-only into the container, and its `InputDigests`. Because of the
copy, the digests are those of the mounted files, also if somebody edits the checkout during a run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from typing import TYPE_CHECKING

from stackcheck.errors import ConfigurationError
from stackcheck.files.digest import sha256_of
from stackcheck.suite import toolkit

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

RUNNER = "runner"
SUITE_FILES = ("conftest.py", "pytest.ini")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")
TOOLS = shutil.ignore_patterns("tools")  # of trainers/: a user's commands, which no job of the suites reaches


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputDigests:
    """Digests (sha256:…) of what a result depends on besides the image and the host.

    `matrix` is `None` for a checkout without matrix.yaml. `runner` is of the tool's pytest and its launcher.
    """

    suites: str
    trainers: str
    thresholds: str
    matrix: str | None
    runner: str

    def as_json(self) -> dict[str, str | None]:
        """The `inputs` object of result.json."""
        return dataclasses.asdict(self)


def freeze(root: Path, target: Path) -> InputDigests:
    """Copy the suites and `trainers/` of the checkout, and the tool's pytest, to `target`, readable by all.

    Of `trainers/`, `tools/` stays behind: what is not there cannot decide a result, and is not hashed.
    An earlier copy in `target` is replaced.

    Raises:
        ConfigurationError: The checkout has no acceptance suites.
    """
    suites = root / "tests" / "acceptance"
    if not suites.is_dir():
        raise ConfigurationError(
            "there are no acceptance suites to run",
            where=str(suites),
            got="no such folder",
            expected="a checkout of stackcheck",
            next_step="run stackcheck in its checkout, or name the checkout with --root",
        )
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(suites, target / "tests" / "acceptance", ignore=LEFT_OUT)
    for name in SUITE_FILES:
        shutil.copy2(root / "tests" / name, target / "tests" / name)
    shutil.copytree(
        root / "trainers",
        target / "trainers",
        ignore=lambda folder, names: LEFT_OUT(folder, names) | TOOLS(folder, names),
    )
    for path in (target, *target.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    toolkit.freeze(target / RUNNER)
    return digest(target, matrix=root / "matrix.yaml")


def digest(frozen: Path, *, matrix: Path | None) -> InputDigests:
    """The digests of a frozen copy, and of matrix.yaml."""
    thresholds = frozen / "tests" / "acceptance" / "thresholds"
    files = [path for path in (frozen / "tests").rglob("*") if path.is_file()]
    return InputDigests(
        suites=_tree_digest(frozen, (path for path in files if not path.is_relative_to(thresholds))),
        trainers=_tree_digest(frozen, (path for path in (frozen / "trainers").rglob("*") if path.is_file())),
        thresholds=_tree_digest(frozen, (path for path in files if path.is_relative_to(thresholds))),
        matrix="sha256:" + sha256_of(matrix) if matrix is not None and matrix.exists() else None,
        runner=_tree_digest(frozen, (path for path in (frozen / RUNNER).rglob("*") if path.is_file())),
    )


def _tree_digest(root: Path, files: Iterable[Path]) -> str:
    lines = sorted(f"{path.relative_to(root).as_posix()} sha256:{sha256_of(path)}" for path in files)
    return "sha256:" + hashlib.sha256("\n".join(lines).encode()).hexdigest()
