"""`make` takes a Python that is new enough wherever the host has one, and else says what to install."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Answers whether it is new enough, and its version, and can make no environment.
STUB = """#!/bin/sh
case "$*" in
--version) echo "Python 3.{minor}" ;;
*version_info*) [ {minor} -ge 11 ] ;;
*) exit 3 ;;
esac
"""


@pytest.mark.parametrize(
    ("there", "taken"),
    [
        ({"python3": 11}, "python3"),
        ({"python3": 10, "python3.11": 11}, "python3.11"),
        ({"python3": 10, "python3.11": 11, "python3.13": 13}, "python3.13"),
        ({"python3": 10}, None),
        ({}, None),
    ],
)
def test_a_newer_python_is_found_beside_an_old_one(
    there: dict[str, int], taken: str | None, tmp_path
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "dirname", "id"):
        (folder / name).symlink_to(shutil.which(name) or name)
    for name, minor in there.items():
        (folder / name).write_text(STUB.format(minor=minor))
        (folder / name).chmod(0o755)
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    done = subprocess.run(
        [str(folder / "sh"), ".ci/venv"],
        cwd=tmp_path,
        env={"PATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if taken:
        assert f"error: {taken} cannot make virtual environments" in done.stderr
        assert f"sudo apt-get install {taken}-venv" in done.stderr
    else:
        assert done.returncode == 2
        assert "sudo apt-get install python3.11 python3.11-venv" in done.stderr
