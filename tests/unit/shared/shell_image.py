"""A real image of a few megabytes: a shell and programs of this host, with the libraries that they link."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from layered import tar_of
from small_images import linux, put_image
from stackcheck.oci.layout import OciLayout


def linked(program: str | Path) -> list[str]:
    """The libraries that a program of this host links; none of a script."""
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    return [os.path.normpath(word) for word in listed.split() if word.startswith("/")]


def of_host(programs: Sequence[str]) -> dict[str, bytes]:
    """Programs of this host and the libraries that they link, by their absolute path; a shell too."""
    paths = [Path(shutil.which(name) or name) for name in programs]
    found = {str(path): path for path in paths}
    found |= {name: Path(name) for path in paths for name in linked(path)}
    inside = {name: path.resolve().read_bytes() for name, path in found.items()}
    inside["/bin/bash"] = Path(shutil.which("bash") or "").resolve().read_bytes()
    return inside


def layer(programs: Sequence[str], files: Mapping[str, bytes]) -> bytes:
    """The tar of one layer: programs of this host, and files by their absolute path."""
    return tar_of(dict(sorted((of_host(programs) | dict(files)).items())))


def make_layout(
    folder: Path,
    *,
    programs: Sequence[str] = ("bash",),
    files: Mapping[str, bytes] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> str:
    """Write a layout with one image of one layer, with `settings` in its config; the manifest's digest."""
    config = linux(1, **{"Env": ["PATH=/usr/bin:/bin"], **(settings or {})})
    return put_image(OciLayout(folder), config, [layer(programs, files or {})]).digest
