"""The workflow that locks stacks, run step by step against a local mirror: it locks and opens a change."""

import gzip
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import rocm_bases
import rocm_mirror
from bridge import bridge_address
from small_images import tar_of
from stackcheck.engine import host_setup
from stackcheck.matrix import resolve
from waits import run_program

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
REACHED = (
    "rocm7.2.1-torch2.13.0-fa2.8.3-py3.12-ubuntu24.04"  # the mirror has all of it, and nothing of the next
)
OUT_OF_REACH = "cuda12.6-torch2.7.1-fa2.8.3-py3.12-ubuntu24.04"
COMMANDS = {"stackcheck": f"{sys.executable} -m stackcheck", "python": sys.executable}
GH = '#!/bin/sh\nprintf "%s\\n" "$@" > "$GH_ASKED"\n'


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    command = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A clone of the committed files, with an origin that takes a push, and this interpreter as its .venv."""
    root = tmp_path / "checkout"
    for name in ("images", ".ci"):
        shutil.copytree(ROOT / name, root / name)
    for name in ("tests", "trainers"):
        (root / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "matrix.yaml", root)
    git(tmp_path, "init", "--quiet", "--bare", "origin.git")
    git(root, "init", "--quiet", "--initial-branch=main")
    (root / ".gitignore").write_text("/.venv\n/locks.txt\n")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", "start")
    git(root, "remote", "add", "origin", str(tmp_path / "origin.git"))
    (root / ".venv/bin").mkdir(parents=True)
    for name in ("stackcheck", "python"):
        (root / ".venv/bin" / name).write_text(f'#!/bin/sh\nexec {COMMANDS[name]} "$@"\n')
        (root / ".venv/bin" / name).chmod(0o755)
    return root


@pytest.fixture
def environment(tmp_path, registry: str) -> Iterator[dict[str, str]]:
    """What the steps see: a site that has a mirror of one stack, and a `gh` that notes what it is asked."""
    host_setup.ensure_engine(lambda _line: None)
    stacks = resolve.load_stacks(ROOT, (REACHED,))
    gh = tmp_path / "bin/gh"
    gh.parent.mkdir()
    gh.write_text(GH)
    gh.chmod(0o755)
    with rocm_mirror.served(tmp_path / "mirror", bridge_address()) as mirror:
        rocm_mirror.fill(mirror, stacks)
        # A lock asks for the digests of bases alone.
        rocm_bases.push_bases(stacks, registry, layer=gzip.compress(tar_of("etc/small", b""), mtime=0))
        mirror.write_configuration(registry)
        seen = mirror.environment(tmp_path / "cache")
        yield {
            **seen,
            "PATH": f"{gh.parent}:{seen['PATH']}",
            "GH_ASKED": str(tmp_path / "asked"),
            "GITHUB_RUN_ID": "7",
            "STACKS": f"{REACHED} {OUT_OF_REACH}",
        }


def steps() -> dict[str, str]:
    """Name -> script of the workflow's own steps."""
    workflow: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/locks.yml").read_text())
    return {step["name"]: step["run"] for step in workflow["jobs"]["lock"]["steps"] if "name" in step}


def run(script: str, root: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]  # as GitHub's runner does
    return run_program(command, cwd=root, env=environment, timeout=2000)


def test_the_workflow_locks_what_it_reaches_and_opens_a_change(tmp_path, checkout, environment):
    scripts = steps()
    assert [*scripts] == ["key", "lock", "change"]
    lock = run(scripts["lock"], checkout, environment)
    assert lock.returncode == 0, lock.stderr
    change = run(scripts["change"], checkout, environment)
    assert change.returncode == 0, change.stderr
    pushed = git(tmp_path / "origin.git", "diff-tree", "-r", "--name-only", "--no-commit-id", "locks-7")
    assert f"images/{REACHED}/requirements.lock" in pushed
    assert all(name.startswith("images/") for name in pushed.splitlines())
    told = git(tmp_path / "origin.git", "show", f"locks-7:images/{REACHED}/pins.json")
    assert '"locked": true' in told
    assert (tmp_path / "asked").read_text().splitlines()[:2] == ["pr", "create"]
    said = (checkout / "locks.txt").read_text()
    assert REACHED in said
    assert f"{OUT_OF_REACH}  unlocked: " in said
    assert rocm_mirror.PASSWORD not in said
    again = run(scripts["lock"], checkout, environment)
    assert REACHED not in (checkout / "locks.txt").read_text(), again.stderr


def test_where_nothing_can_be_reached_no_change_is_opened(tmp_path, checkout, environment):
    alone = environment | {"STACKS": OUT_OF_REACH}
    scripts = steps()
    assert run(scripts["lock"], checkout, alone).returncode == 0
    git(checkout, "checkout", "images")  # what is missing is said in words of this machine
    change = run(scripts["change"], checkout, alone)
    assert (change.returncode, "no lock changed" in change.stdout) == (0, True), change.stderr
    assert not (tmp_path / "asked").exists()
