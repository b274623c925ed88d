"""The tool's own pytest, for images. In: the packages of this installation. Out: a folder to mount read-only.

The suites run in the image's Python, but under the pytest of the tool: an image could ship one that reports
what it likes. Only modules are copied and no metadata: `importlib.metadata` lists the image's own packages.
"""

from __future__ import annotations

import importlib.metadata
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from stackcheck.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import PurePath

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


def freeze(target: Path) -> None:
    """Copy the launcher and the packages to `target`, readable by every user.

    Raises:
        ConfigurationError: A package is not installed beside stackcheck.
    """
    shutil.rmtree(target, ignore_errors=True)
    (target / "pytest").mkdir(parents=True)
    shutil.copy2(LAUNCHER, target / "launcher.py")
    for name in PACKAGES:
        _copy(name, target / "pytest")
    # pluggy asks its metadata for its version when pytest prints its header, and an image need not have any.
    (target / VERSION_FILE).write_text(importlib.metadata.version("pluggy"), encoding="utf-8")
    for path in (target, *target.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _copy(name: str, target: Path) -> None:
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
