"""What an image says about itself: files, packages, variables. In: questions. Out: JSON values.

A controller outside the image has these functions called by the image's Python (`harness.asked`).
"""

import atexit
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import vendors
from harness import foreign, installed, requirements, startup
from vendors import software as vendor_software

PIP_TIMEOUT_S = 300
COMPILE_TIMEOUT_S = 120
PACKAGES = (
    "torch", "triton", "pytorch-triton-rocm", "flash-attn", "torchao", "transformer-engine", "numpy",
    "pytest",
)  # fmt: skip


def interpreter() -> dict[str, str]:
    """This Python: its path, the file at the end of its links, and the digest of what runs."""
    return {
        "path": sys.executable,
        "file": os.path.realpath(sys.executable),
        "sha256": "sha256:" + hashlib.sha256(Path("/proc/self/exe").read_bytes()).hexdigest(),
    }


def software() -> dict[str, str]:
    """Versions of the main packages, by their metadata: importing torch would take a second."""
    found = {"python": platform.python_version()}
    return found | {name: version for name in PACKAGES if (version := _version(name)) is not None}


def versions(names: Sequence[str]) -> dict[str, str]:
    """The installed version of each package, or "none"."""
    return {name: _version(name) or "none" for name in names}


def system() -> dict[str, str]:
    """The distribution, and the release of Python."""
    release = platform.freedesktop_os_release()
    return {"os": release["ID"] + release.get("VERSION_ID", ""), "python": platform.python_version()}


def environment() -> dict[str, str]:
    """The variables that a program of the image gets."""
    return dict(os.environ)


def torch_runtime(vendor: str) -> str | None:
    """The runtime that torch was built with."""
    return vendors.module(vendor).torch_runtime()


def needs(vendor: str) -> list[dict[str, Any]]:
    """What this container lacks: the name, what there is, what is expected, what to do."""
    return [
        {"name": need.name, "got": need.got, "expected": need.expected, "next_step": need.next_step}
        for need in vendors.module(vendor).requirements()
        if not need.ok
    ]


def problems_of_loaded(vendor: str, found: dict[str, Any]) -> list[str]:
    """How the libraries that loaded differ from what is declared or installed."""
    return [
        problem
        for library in vendor_software.of(vendor).LIBRARIES
        for problem in installed.problems_of_loaded(library, found.get(library.name))
    ]


def extensions() -> dict[str, Any]:
    """The compiled modules to load. Without a declaration, those of torch and its kin."""
    found = installed.extensions()
    if installed.declaration() is None:
        found = installed.owned_by(installed.torch_and_kin(), found)
    return {"paths": list(map(str, found)), "site": str(installed.SITE)}


def startup_problems(folders: list[str]) -> dict[str, list[str]]:
    """The files that Python runs at every start, and what is wrong with them."""
    found, problems = startup.problems(folders)
    return {"files": list(map(str, found)), "problems": problems}


def foreign_problems(vendor: str) -> list[list[str]]:
    """Two lists, as `foreign.problems` returns them: the problems, and the tolerated packages."""
    return list(foreign.problems(vendor))


def providers(modules: Sequence[str]) -> dict[str, list[str]]:
    """The distributions that provide each module."""
    owners = importlib.metadata.packages_distributions()
    return {name: sorted(set(owners.get(name, ()))) for name in modules}


def conflicts() -> list[str]:
    """What `pip check` finds; without pip, as uv leaves an environment, by the packages' metadata."""
    if importlib.util.find_spec("pip") is None:
        return requirements.problems(importlib.metadata.distributions())
    run = _pip("check")
    return [] if run.returncode == 0 else [run.stdout + run.stderr]


def replacing_torch() -> dict[str, Any]:
    """What pip answers to the wish for another torch."""
    with tempfile.TemporaryDirectory() as folder:
        info = "torch-0.0.1.dist-info"
        # The smallest wheel that pip would install.
        with zipfile.ZipFile(Path(folder, "torch-0.0.1-py3-none-any.whl"), "w") as wheel:
            wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 0.0.1\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
        offered = ("--dry-run", "--no-index", "--no-cache-dir", "--find-links", folder)
        run = _pip("install", *offered, "torch==0.0.1")
    return {"code": run.returncode, "text": run.stdout + run.stderr}


def kernel_libraries(vendor: str, archs: Sequence[str]) -> dict[str, list[str]]:
    """The vendor's libraries with kernels: asked for, present, and what they lack."""
    stack = vendor_software.of(vendor)
    held = [library for library in stack.LIBRARIES if library.device_code or library.kernels or library.parts]
    found = {library: installed.files_of(library.stem, stack.FOLDERS) for library in held}
    problems = [
        problem
        for library, files in found.items()
        for problem in installed.lacking(library, files, archs, stack)
    ]
    present = [library.name for library, files in found.items() if files]
    return {"held": [library.name for library in held], "present": present, "problems": problems}


def releases(patterns: Sequence[str]) -> list[str]:
    """The versions of the distributions whose name matches a pattern."""
    return [item.version for item in installed.distributions(patterns)]


def compiled_files(vendor: str, patterns: Sequence[str]) -> dict[str, list[str]]:
    """The compiled files of distributions, and the architectures that each has code for."""
    files = [path for item in installed.distributions(patterns) for path in installed.shared_objects_of(item)]
    return {path.name: sorted(vendor_software.of(vendor).architectures(path)) for path in files}


def compiler(vendor: str) -> str | None:
    """The path of the vendor's compiler; None if the image has none."""
    wanted = vendor_software.of(vendor).COMPILER
    if wanted is None:
        return None
    return shutil.which(wanted.program) or shutil.which(wanted.program, path=":".join(wanted.folders))


def compile_problem(vendor: str, program: str, arch: str) -> str | None:
    """Why the compiler does not turn one line of device code into code for `arch`; None if it does."""
    stack = vendor_software.of(vendor)
    wanted = stack.COMPILER
    assert wanted is not None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, output = folder / f"twice-{arch}{wanted.suffix}", folder / f"twice-{arch}.out"
        source.write_text(wanted.source, encoding="utf-8")
        words = [option.format(arch=arch, source=source, output=output) for option in wanted.options]
        done = subprocess.run(
            [program, *words],
            capture_output=True,
            text=True,
            timeout=COMPILE_TIMEOUT_S,
            check=False,
            cwd=folder,
        )
        if done.returncode:
            return f"{arch}: {program} exited with {done.returncode}: {(done.stderr or done.stdout)[-2000:]}"
        made = stack.architectures(output) if output.exists() else frozenset[str]()
    return None if arch in made else f"{arch}: {program} reported success, but made code for {sorted(made)}"


def has_flash_attn_4() -> bool:
    """Whether FlashAttention 4 is there. Nothing of it is imported: its `flash_attn` holds no code."""
    found = importlib.util.find_spec("flash_attn")
    folders = (found.submodule_search_locations if found else None) or ()
    return any((Path(folder) / "cute" / "interface.py").is_file() for folder in folders)


def folder_for(name: str) -> str:
    """A new empty folder, which is removed when this process ends."""
    folder = tempfile.mkdtemp(prefix=f"stackcheck-{name}-")
    atexit.register(_remove, folder, os.getpid())
    return folder


def _remove(folder: str, owner: int) -> None:
    """Remove it at the end of its owner; a fork that ends would call this too."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def places(fields: Sequence[str], nodes: Sequence[int]) -> dict[str, Any]:
    """What a process of this container may use: fields of its status, its processors, those of NUMA nodes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    status = {line.partition(":")[0]: line.partition(":")[2].strip() for line in lines}
    lists = {node: Path(f"/sys/devices/system/node/node{node}/cpulist") for node in nodes}
    return {
        "status": {field: status[field] for field in fields},
        "cpus": sorted(os.sched_getaffinity(0)),
        "nodes": {str(node): path.read_text() for node, path in lists.items() if path.is_file()},
    }


def _version(name: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def _pip(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False)
