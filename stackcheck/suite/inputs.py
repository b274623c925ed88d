"""Freeze what a run depends on besides the image: a copy of suites, trainers and pytest, and its digests.

In: the checkout. Out: a folder to mount read-only into the container, and the digests. Because of the
copy, the digests are those of the mounted files, also if somebody edits the checkout during a run.
"""

import hashlib
import importlib.metadata
import shutil
from collections.abc import Iterable
from pathlib import Path, PurePath

from stackcheck.errors import ConfigurationError
from stackcheck.files.digest import sha256_of
from stackcheck.suite.results import ReportedInputs

RUNNER = "runner"
SUITE_FILES = ("conftest.py", "pytest.ini")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")
TOOLS = shutil.ignore_patterns("tools")  # of trainers/: a user's commands, which no job of the suites reaches


def freeze(root: Path, target: Path) -> ReportedInputs:
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
    freeze_tools(target / RUNNER)
    return digest(target, matrix=root / "matrix.yaml")


def digest(frozen: Path, *, matrix: Path | None) -> ReportedInputs:
    """The digests of a frozen copy, and of matrix.yaml."""
    thresholds = frozen / "tests" / "acceptance" / "thresholds"
    files = [path for path in (frozen / "tests").rglob("*") if path.is_file()]
    return ReportedInputs(
        suites=_tree_digest(frozen, (path for path in files if not path.is_relative_to(thresholds))),
        trainers=_tree_digest(frozen, (path for path in (frozen / "trainers").rglob("*") if path.is_file())),
        thresholds=_tree_digest(frozen, (path for path in files if path.is_relative_to(thresholds))),
        matrix="sha256:" + sha256_of(matrix) if matrix is not None and matrix.exists() else None,
        runner=_tree_digest(frozen, (path for path in (frozen / RUNNER).rglob("*") if path.is_file())),
    )


def _tree_digest(root: Path, files: Iterable[Path]) -> str:
    lines = sorted(f"{path.relative_to(root).as_posix()} sha256:{sha256_of(path)}" for path in files)
    return "sha256:" + hashlib.sha256("\n".join(lines).encode()).hexdigest()


# The suites run under the tool's own pytest: an image could ship one that reports what it likes. Only modules
# are copied and no metadata: `importlib.metadata` lists the image's own packages.
# pytest with the two plug-ins that the suites use, and what they import. Python 3.10 has no exception groups.
PACKAGES = (
    *("pytest", "pluggy", "iniconfig", "packaging", "pygments", "exceptiongroup", "typing_extensions"),
    *("pytest-timeout", "pytest-xdist", "execnet"),
)
LAUNCHER = Path(__file__).with_name("launcher.py")
VERSION_FILE = "pluggy.version"  # launcher.py reads it
_LEFT_OUT = (".dist-info", ".egg-info", ".data", "__pycache__")
# pytest colours Python and differences; pygments knows 500 languages, which are most of its 5 MB.
_COLOURED = ("__init__.py", "_mapping.py", "python.py", "diff.py")


def freeze_tools(target: Path) -> None:
    """Copy the launcher and the packages to `target`, readable by every user.

    Raises:
        ConfigurationError: A package is not installed beside stackcheck.
    """
    shutil.rmtree(target, ignore_errors=True)
    (target / "pytest").mkdir(parents=True)
    shutil.copy2(LAUNCHER, target / "launcher.py")
    for name in PACKAGES:
        _copy_tool(name, target / "pytest")
    # pluggy asks its metadata for its version when pytest prints its header, and an image need not have any.
    (target / VERSION_FILE).write_text(importlib.metadata.version("pluggy"), encoding="utf-8")
    for path in (target, *target.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _copy_tool(name: str, target: Path) -> None:
    try:
        files = importlib.metadata.files(name) or ()
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigurationError(
            f"stackcheck needs the package {name} to run acceptance suites",
            got="it is not installed",
            expected=f"{name} beside stackcheck: the suites run under the tool's own pytest",
            next_step=f"pip install {name}",
        ) from error
    for file in files:
        if _is_needed(file):
            place = target / file
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(str(file.locate()), place)


def _is_needed(file: PurePath) -> bool:
    if file.match("pygments/lexers/*") and file.name not in _COLOURED:
        return False
    return file.suffix == ".py" and not any(part == ".." or part.endswith(_LEFT_OUT) for part in file.parts)
