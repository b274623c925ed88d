"""What the journeys share: a user types command lines in an empty folder, and the terminal's text is kept.

`STACKCHECK_WRITE_GOLDEN=1 pytest tests/journeys -m slow` writes the files of golden/ anew: review the diff.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import registry_process

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent / "golden"
WRITE = "STACKCHECK_WRITE_GOLDEN"
CHANGING = (  # what another day, machine or folder prints in another way -> its placeholder
    (re.compile(r"sha256:[0-9a-f]{12,64}"), "sha256:<digest>"),
    (re.compile(r"\b[0-9a-f]{32,64}\b"), "<digest>"),
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:\d\d)?"), "<time>"),
    (re.compile(r"\d{4}-\d\d-\d\d"), "<day>"),
    (re.compile(r"tini \(\d+\)"), "tini (<pid>)"),
    (re.compile(r"\[ *\d+\.\d s\]"), "[<seconds>]"),
    (re.compile(r"\b\d+(\.\d+)? s\b"), "<seconds>"),
    (re.compile(r"\b(localhost|127\.0\.0\.1):\d+"), "<registry>"),
)


STARTED = {  # a program on the user's PATH -> what this Python is told
    "stackcheck": "-m stackcheck ",
    "python": "",
    "as-the-unit": f"{ROOT}/tests/unit/shared/sandboxed.py ",  # what systemd does with a service
}


class Journey:
    """One user's terminal: each line that is typed, what it printed and its exit code."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.folder, self.env, self.home = folder, env, Path(env["HOME"])
        self.hidden: dict[str, str] = {
            str(folder): "<folder>",
            str(ROOT): "<checkout>",
            sys.executable: "<python>",
        }
        self.changing: tuple[tuple[re.Pattern[str], str], ...] = ()  # more, of one journey
        self.text = ""

    def types(self, line: str, *, code: int = 0, timeout: float = 600) -> str:
        """Run one line in a shell, require its exit code, and return the text of the terminal."""
        done = subprocess.run(
            ["bash", "-c", line],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            cwd=self.folder,
            env=self.env,
            timeout=timeout,
            check=False,
        )
        ending = f"[exit code {done.returncode}]\n" if done.returncode else ""
        self.text += self.normal(f"$ {line}\n{done.stdout}{ending}\n")
        assert done.returncode == code, f"{line}\n{done.stdout}"
        assert "Traceback" not in done.stdout, done.stdout
        return done.stdout

    def checkout(self, *built: str) -> Path:
        """A checkout with a copy of the suites; stacks that this one built are not built again."""
        own = self.folder / "checkout"
        own.mkdir()
        for path in ROOT.iterdir():
            if path.name not in {"build", "tests"} and not path.name.startswith("."):
                (own / path.name).symlink_to(path)
        shutil.copytree(ROOT / "tests", own / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        for name in built:
            (own / "build" / name).mkdir(parents=True)
            shutil.copy(ROOT / "build" / name / "image.json", own / "build" / name)
            (own / "build" / name / "oci").symlink_to(ROOT / "build" / name / "oci")
            self.hidden[name] = "<stack>"
        if built:
            (own / "build" / "bases").symlink_to(ROOT / "build" / "bases")
        return own

    def normal(self, text: str) -> str:
        """The text without what changes from run to run; `hidden` has more of it."""
        for value in sorted(self.hidden, key=len, reverse=True):
            text = text.replace(value, self.hidden[value])
        for pattern, placeholder in (*CHANGING, *self.changing):
            text = pattern.sub(placeholder, text)
        return text

    def is_as_in(self, name: str) -> None:
        """Compare the whole terminal with golden/NAME, or write it."""
        path = GOLDEN / name
        if os.environ.get(WRITE):
            path.write_text(self.text, encoding="utf-8")
        assert self.text == path.read_text(encoding="utf-8")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "journeys" in item.path.parts:  # other folders' tests come to this hook too
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.integration)
            item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture
def journey(tmp_path) -> Journey:
    """An empty folder and home, and `stackcheck` of this checkout on PATH."""
    folder, programs = tmp_path / "work", tmp_path / "bin"
    folder.mkdir()
    programs.mkdir()
    for name, starts in STARTED.items():
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {starts}"$@"\n')
        program.chmod(0o755)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("XDG_", "STACKCHECK_"))}
    env = {
        **kept,
        "HOME": str(tmp_path / "home"),
        "PATH": f"{programs}:{kept['PATH']}",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "110",
    }
    (tmp_path / "home").mkdir()
    made = Journey(folder, env)
    made.hidden[str(tmp_path / "home")] = "~"
    return made


@pytest.fixture
def registry(tmp_path):
    """The address of a registry of this journey."""
    program = shutil.which("docker-registry")
    assert program, "install the distribution's package docker-registry"
    with registry_process.running(program, tmp_path / "registry") as port:
        yield f"127.0.0.1:{port}"
