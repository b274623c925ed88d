"""A Python with torch, Triton and pytest for a fabricated host, whose root has none of them.

In: $STACKCHECK_SUITE_PYTHON, or the cpu image in dist/. Out: folders to bind, a file for torch.

The interpreter is another release than the root's own. It runs there all the same: the root's C library is
newer than the one that it was linked with.
"""

import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fakeamd import rootfs
from fakeamd.rootfs import FakeAmdError

VARIABLE = "STACKCHECK_SUITE_PYTHON"
DIST = rootfs.HERE.parents[2] / "dist"
SKELETON = "env"  # a virtual environment of links: its packages are bound into it
INSIDE = Path("/", rootfs.MOUNT_POINT)
ASK = (
    "import importlib.util as u, json, sys, sysconfig, torch, triton, pytest; "
    "print(json.dumps([sys.base_prefix, sysconfig.get_path('purelib'), sys.version_info[:2]]))"
)
PROGRAMS = {"zstd": "zstd", "gzip": "gzip"}  # the end of a layer's media type -> what unpacks it
WANTED = ("usr/bin/python3", "usr/lib/python3", "opt/venv/lib/python3")  # what is unpacked of the image


@dataclass(frozen=True)
class Interpreter:
    """Where a Python and its packages lie here."""

    prefix: Path
    packages: Path
    release: str

    @property
    def binds(self) -> Mapping[str, Path]:
        """Name below the mount point -> folder here."""
        inside = f"lib/python{self.release}/site-packages"
        return {
            "python": self.prefix,
            SKELETON: self._skeleton(inside),
            f"{SKELETON}/{inside}": self.packages,
        }

    def over(self, hip: str, folder: Path) -> Mapping[str, Path]:
        """A file of torch -> the file mounted over it: this torch then says that it was built for HIP.

        An image's byte code is valid whatever its source says. Over it goes an empty file, which is none.
        """
        text = (self.packages / "torch/version.py").read_text(encoding="utf-8")
        changed, empty = folder / "version.py", folder / "empty.pyc"
        changed.write_text(f"{text}\nhip = {hip!r}\n", encoding="utf-8")
        empty.touch()
        compiled = f"torch/__pycache__/version.cpython-{self.release.replace('.', '')}.pyc"
        place = f"{SKELETON}/lib/python{self.release}/site-packages"
        over = {f"{place}/torch/version.py": changed}
        return over | ({f"{place}/{compiled}": empty} if (self.packages / compiled).exists() else {})

    def _skeleton(self, inside: str) -> Path:
        folder = rootfs.CACHE / f"{SKELETON}-{self.release}"
        (folder / "bin").mkdir(parents=True, exist_ok=True)
        (folder / inside).mkdir(parents=True, exist_ok=True)
        home = INSIDE / "python/bin"
        (folder / "pyvenv.cfg").write_text(
            f"home = {home}\nversion = {self.release}\ninclude-system-site-packages = false\n",
            encoding="utf-8",
        )
        for name in ("python", "python3"):
            link = folder / "bin" / name
            if not link.is_symlink():
                link.symlink_to(home / f"python{self.release}")
        return folder


def found() -> Interpreter:
    """The Python that the variable names, else that of the cpu image. Raises `FakeAmdError` without both."""
    named = os.environ.get(VARIABLE)
    if named:
        done = subprocess.run([named, "-c", ASK], capture_output=True, text=True, check=False)
        if done.returncode:
            raise FakeAmdError(f"{VARIABLE}={named} has no torch, Triton or pytest: {done.stderr[-300:]}")
        prefix, packages, (major, minor) = json.loads(done.stdout)
        return Interpreter(Path(prefix), Path(packages), f"{major}.{minor}")
    image = unpacked(DIST)
    packages = next(image.glob("opt/venv/lib/python3*/site-packages"))
    return Interpreter(image / "usr", packages, packages.parent.name.removeprefix("python"))


def unpacked(layout: Path) -> Path:
    """Python and packages of the cpu image in an OCI layout, unpacked once. Raises `FakeAmdError`."""
    layers = list(_layers(layout)) if (layout / "index.json").exists() else []
    if not layers:
        raise FakeAmdError(
            f"no Python with torch: {layout} holds no cpu image, and {VARIABLE} is not set; make the image:"
            " stackcheck images 'cpu-*'"
        )
    folder = rootfs.CACHE / f"cpu-{layers[-1][0].name[:12]}"
    if not (folder / "whole").exists():
        for blob, program in layers:
            _unpack(blob, program, folder)
        (folder / "whole").touch()
    return folder


def _layers(layout: Path) -> Iterator[tuple[Path, str]]:
    """The layers of the cpu image, with the program that unpacks each."""
    blobs = layout / "blobs/sha256"
    index = json.loads((layout / "index.json").read_text(encoding="utf-8"))
    for entry in index["manifests"]:
        name = entry.get("annotations", {}).get("org.opencontainers.image.ref.name", "")
        manifest = json.loads((blobs / entry["digest"].partition(":")[2]).read_text(encoding="utf-8"))
        if name.startswith("cpu-") and manifest.get("layers") and "subject" not in manifest:
            for layer in manifest["layers"]:
                packed = layer["mediaType"].rpartition("+")[2]
                yield blobs / layer["digest"].partition(":")[2], PROGRAMS.get(packed, "cat")
            return


def _unpack(blob: Path, program: str, folder: Path) -> None:
    if shutil.which(program) is None:
        subprocess.run(["apt-get", "install", "-y", "-q", program], check=False, capture_output=True)
    if shutil.which(program) is None:
        raise FakeAmdError(f"{program} is not installed; on Debian: apt-get install {program}")
    words = [program, str(blob)] if program == "cat" else [program, "-dc", str(blob)]
    with (
        subprocess.Popen(words, stdout=subprocess.PIPE) as raw,
        tarfile.open(fileobj=raw.stdout, mode="r|") as tar,
    ):
        tar.extractall(folder, filter(_is_wanted, tar), filter="tar")


def _is_wanted(member: tarfile.TarInfo) -> bool:
    """Not Debian's link into /etc either: its package is not in the root, so nobody would own it there."""
    name = member.name.lstrip("./")
    return name.startswith(WANTED) and not name.endswith("/sitecustomize.py")
