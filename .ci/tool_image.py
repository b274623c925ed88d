"""Build the image of the tool itself, and write it as a layout and into the engine.

In: `FOLDER [--no-cache]`, an engine, a checkout. Out: FOLDER/oci, the image `stackcheck/tool:VERSION`, its
digest on stdout: the same from the same files, whenever it is built.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from stackcheck import __version__
from stackcheck.engine import host_setup
from stackcheck.engine.client import Engine
from stackcheck.imaging import bootstrap
from stackcheck.imaging.bakefile import PROXIES
from stackcheck.imaging.plans import COMPRESSION, bases
from stackcheck.imaging.wheels.host_settings import host_settings
from stackcheck.oci.image_layout import ImageLayout

ROOT = Path(__file__).resolve().parents[1]
FILES = ROOT / "images" / "tool"
BASE = ("ca-certificates", "python3.11", "python3.11-venv")  # as the cpu stack, so that it is made once
REFERENCE = f"stackcheck/tool:{__version__}"
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc")
TREE = ("stackcheck", "images", "tests/acceptance", "trainers")
SINGLE = ("pyproject.toml", "README.md", "LICENSE", "matrix.yaml", "tests/conftest.py", "tests/pytest.ini")


def wheel(folder: Path) -> None:
    """Build the wheel of this checkout in a copy, so that equal files give equal bytes."""
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
        for each in TREE:
            shutil.copytree(ROOT / each, tree / each, ignore=LEFT_OUT)
        for each in SINGLE:
            shutil.copy2(ROOT / each, tree / each)
        for path in (tree, *tree.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        subprocess.run(
            (
                *(sys.executable, "-m", "pip", "--quiet", "wheel", "--no-deps", "--no-build-isolation"),
                "-w",
                folder,
                ".",
            ),
            cwd=tree,
            env=os.environ | {"SOURCE_DATE_EPOCH": str(bootstrap.SOURCE_DATE_EPOCH)},
            check=True,
        )


def context(folder: Path) -> Path:
    """What the builder sees: the two files of images/tool, the wheel and the base."""
    base = bootstrap.bootstrap("bookworm", BASE, bases(ROOT), os_name="debian12", report=report)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(FILES, folder)
    shutil.copyfile(base.path, folder / "rootfs.tar")
    wheel(folder)
    return folder


def build(folder: Path, *, no_cache: bool) -> str:
    """The digest of the image, which lies in `folder`/oci and in the engine."""
    host_setup.ensure_engine(report, builds=True)
    engine = Engine.connect()
    layout, settings = folder / "oci", host_settings()
    shutil.rmtree(layout, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        secrets = {"pip_conf": settings.pip_conf(wheelhouse=False).encode()}
        if settings.ca:
            secrets["ca"] = settings.ca.read_bytes()
        for key, text in secrets.items():
            (Path(name) / key).write_bytes(text)
        proxies = {key: os.environ[key] for key in PROXIES if key in os.environ}
        target: dict[str, Any] = {
            "context": str(context(folder / "context")),
            "args": {"SOURCE_DATE_EPOCH": str(bootstrap.SOURCE_DATE_EPOCH), **proxies},
            "secret": [f"id={key},src={Path(name) / key}" for key, text in secrets.items() if text],
            "output": [f"type=oci,dest={layout},tar=false,rewrite-timestamp=true,{COMPRESSION}"],
            "no-cache": no_cache,
        }
        engine.bake({"target": {"tool": target}}, ["tool"], report=report)
    made = ImageLayout(layout)
    digest = made.image().digest
    made.keep_only(digest)
    engine.load(layout, REFERENCE)
    return digest


def report(line: str) -> None:
    """Write a line of progress."""
    print(line, file=sys.stderr)


if __name__ == "__main__":
    print(build(Path(sys.argv[1]).absolute(), no_cache="--no-cache" in sys.argv[2:]))
