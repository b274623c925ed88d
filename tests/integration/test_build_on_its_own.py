"""docs/guides/air-gapped.md, followed literally: a base of this host, wheels of an environment, no network.

The stack has no torch, so that this takes a minute; the page was followed with whole stacks by hand.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from small_stacks import ROOT
from stackcheck.engine import apt
from stackcheck.imaging.image import load_image
from stackcheck.matrix import resolve
from stackcheck.suite.subject import of_build
from waits import run_program

pytestmark = [pytest.mark.integration, pytest.mark.slow]

STACK = "own-debian12"
PAGE = ROOT / "docs" / "guides" / "air-gapped.md"
BASE = ("ca-certificates", "python3.11", "python3.11-venv")


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A checkout whose matrix has one small stack of packages that this test's own environment has."""
    root = tmp_path / "checkout"
    shutil.copytree(ROOT / "images" / "parts", root / "images" / "parts")
    for path in (ROOT / "images").glob("*.*"):
        if path.is_file():
            shutil.copy(path, root / "images")
    text = yaml.safe_load((ROOT / "matrix.yaml").read_text())
    text["packages"] = {name: version(name) for name in ("psutil", "pytest", "pytest-xdist")}
    text["training_packages"] = {}
    text["runtimes"]["cpu"]["packages"] = {}
    text["include"], text["overrides"] = [], []
    block = {"id": STACK, "runtime": "cpu", "python": "3.11", "os": "debian12", "size_budget_gb": 1}
    text["stacks"] = [block]
    (root / "matrix.yaml").write_text(yaml.safe_dump(_as_text(text)))
    return root


def _as_text(value: object) -> object:
    """Numbers as text: the matrix reads `3.10` as it is written."""
    if isinstance(value, dict):
        return {key: _as_text(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_as_text(entry) for entry in value]
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def command(*arguments: str) -> str:
    """Run a program that has to succeed; its output is in the failure."""
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, f"{arguments} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def page_blocks() -> tuple[list[str], list[str]]:
    """The page's blocks of commands: those of section 0, and those after it."""
    before, after = PAGE.read_text().split("## 1. ")
    first, then = (re.findall(r"```sh\n(.*?)```", part, re.DOTALL) for part in (before, after))
    return first, then


def page_commands() -> list[str]:
    """The page's commands from section 1 on, in their order, without those that need torch in the image."""
    lines = [line for block in page_blocks()[1] for line in block.splitlines()]
    assert len(lines) == 6, "the page has a new command: run it here too"
    return [line for line in lines if line.split()[1] in {"base", "wheelhouse", "build"}]


def follow(checkout: Path, lines: list[str]) -> None:
    """Type the commands, on a host whose pip knows only an index that is not there."""
    environment = {
        **os.environ,
        "STACK": STACK,
        "PYTHON": sys.executable,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PIP_INDEX_URL": "https://index.invalid/simple",
        "UV_OFFLINE": "1",
    }
    for line in lines:
        done = run_program(["bash", "-c", line], cwd=checkout, env=environment, timeout=600)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


def test_section_0_installs_stackcheck_where_no_index_is(tmp_path):
    """As the page says, but for the Python of this machine."""
    root = tmp_path / "checkout"
    shutil.copytree(ROOT / "stackcheck", root / "stackcheck")
    shutil.copytree(ROOT / ".ci", root / ".ci")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, root)
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    (fetch, install), _ = page_blocks()
    command("bash", "-e", "-c", f"cd {root}\n{fetch.replace('3.12', here)}")
    own = install.replace("/usr/bin/python3.12", sys.executable)
    follow(root, [f"set -e\n{own}\nstackcheck --help"])
    assert (root / ".venv" / "ready").exists()
    assert "Decide whether" in command(str(root / ".venv" / "bin" / "stackcheck"), "--help")


@pytest.mark.skipif(
    apt.host_release().get("VERSION_CODENAME") != "bookworm", reason="the stack is Debian 12's"
)
def test_the_page_makes_one_image_from_this_host_alone_the_same_in_two_runs(
    checkout, engine, install_packages
):
    install_packages(*BASE)
    lines = page_commands()
    follow(checkout, lines)
    files = checkout / "images" / STACK
    first = {path.name: path.read_bytes() for path in files.iterdir()}
    image = load_image(checkout / "build" / STACK / "image.json")
    shutil.rmtree(checkout / "wheels")
    shutil.rmtree(checkout / "build" / "bases")
    follow(checkout, [*lines[:-1], f"{lines[-1]} --no-cache"])
    assert {path.name: path.read_bytes() for path in files.iterdir()} == first
    again = load_image(checkout / "build" / STACK / "image.json")
    assert again.manifest_digest == image.manifest_digest
    assert {use.how for use in again.stages} == {"built"}

    built = (checkout / "build" / STACK / "context" / "Dockerfile").read_text()
    steps = re.findall(r"^RUN .*", built, re.MULTILINE)
    assert steps
    assert all(step.startswith("RUN --network=none ") for step in steps)

    (stack,) = resolve.load_stacks(checkout, (STACK,))
    told = of_build(stack, image)
    assert told.parameters["baseFrom"].startswith("the packages of a host (debian12)")
    assert "wheels made from the distributions installed in an environment" in told.parameters["wheelsFrom"]
    assert f"file:images/{STACK}/wheelhouse.json" in told.dependencies
    assert "urn:stackcheck:rootfs:host:debian12" in told.dependencies

    inside = ["docker", "run", "--rm", "--network", "none", "--read-only", image.reference]
    trusted = "ssl.create_default_context().cert_store_stats()['x509']"
    code = f"import psutil, pytest, ssl; print(pytest.__version__, {trusted})"
    version, certificates = command(*inside, "python", "-c", code).split()
    assert version == pytest.__version__
    assert int(certificates) > 100
    listed = set(command(*inside, "dpkg-query", "-W", "-f", "${Package}\n").split())
    assert listed == set(json.loads(first["base.json"])["packages"])
    engine.remove(image.reference)
