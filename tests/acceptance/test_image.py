"""The image: what it declares, what is installed and what loads are one and the same."""

import importlib.machinery
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.fixtures import OnDevice, RecordMetric
from harness.session import AcceptanceSession
from vendors import Device, Vendor
from workloads import image

DECLARATION = Path(os.environ.get("STACKCHECK_STACK_FILE", "/opt/stackcheck/stack.json"))
SITE = Path(sysconfig.get_path("purelib"))
PIP_TIMEOUT_S = 300


@pytest.fixture
def declared(acceptance: AcceptanceSession) -> Mapping[str, Any]:
    """What the image says of itself; a foreign image says nothing, and that is no fault of it."""
    if not DECLARATION.exists():
        if acceptance.told.get("stack_id"):
            pytest.fail(
                f"an image of stack {acceptance.told['stack_id']} has no {DECLARATION}", pytrace=False
            )
        pytest.skip(f"this image declares nothing: it has no {DECLARATION}")
    return json.loads(DECLARATION.read_text(encoding="utf-8"))


@pytest.fixture
def loaded(on_device: OnDevice) -> Mapping[str, Any]:
    """Versions as the loaded libraries tell them."""
    return on_device(image.loaded)


def test_declared_versions_are_installed(declared: Mapping[str, Any]) -> None:
    """Every package that the image declares is installed in exactly that version."""
    wrong = []
    for name, version in declared["packages"].items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed = "not installed"
        if installed != version:
            wrong.append(f"{name}: declared {version}, {installed}")
    assert not wrong, "\n".join(wrong)


def test_the_image_is_the_stack_that_was_asked_for(
    declared: Mapping[str, Any], acceptance: AcceptanceSession
) -> None:
    """The stack, the vendor, Python and the distribution are those that the declaration names."""
    release = platform.freedesktop_os_release()
    found = {
        "stack_id": acceptance.told.get("stack_id") or declared["stack_id"],
        "vendor": acceptance.vendor,
        "python": ".".join(platform.python_version_tuple()[: declared["python"].count(".") + 1]),
        "os": release["ID"] + release.get("VERSION_ID", ""),
    }
    assert found == {key: declared[key] for key in found}


def test_loaded_libraries_are_the_declared_ones(
    declared: Mapping[str, Any], loaded: Mapping[str, Any], vendor: Vendor
) -> None:
    """torch, its runtime, the collective library, Triton and FlashAttention load in the declared versions."""
    # A wheel of the default index is 2.13.0 in its metadata, and calls itself 2.13.0+cu130.
    assert declared["packages"]["torch"] in (loaded["torch"], loaded["torch"].partition("+")[0])
    for name in ("triton", "flash_attn"):
        if declared.get(name):
            assert loaded[name] == declared[name]["version"], name
    collective = declared.get("collective")
    if collective and collective["name"] in ("nccl", "rccl") and collective.get("version"):
        assert _dotted(loaded["collective"]) == _release(collective["version"])
    if declared.get("runtime_version"):
        assert _same_release(vendor.torch_runtime() or "none", declared["runtime_version"])


def test_torch_is_built_for_the_vendor(vendor: Vendor, loaded: Mapping[str, Any]) -> None:
    """The installed torch is a build for this vendor: a dependency upgrade can silently bring another's."""
    runtimes = {"nvidia": loaded["cuda"], "amd": loaded["hip"]}
    built_for = [name for name, version in runtimes.items() if version] or ["cpu"]
    assert built_for == [vendor.NAME], f"torch {loaded['torch']} is built for {built_for[0]}"


def test_every_architecture_is_compiled_in(
    acceptance: AcceptanceSession, devices: tuple[Device, ...], loaded: Mapping[str, Any]
) -> None:
    """torch holds device code for each architecture of the stack, or of this machine if none is declared."""
    content = json.loads(DECLARATION.read_text(encoding="utf-8")) if DECLARATION.exists() else {}
    machine = [] if acceptance.vendor == "cpu" else [device.arch for device in devices]
    wanted = sorted({*content.get("archs", ()), *machine})
    missing = [arch for arch in wanted if not _covered(arch, loaded["archs"])]
    assert not missing, f"no code for {missing}; compiled in: {loaded['archs']}"


def test_every_extension_loads(on_device: OnDevice, vendor: Vendor, record_metric: RecordMetric) -> None:
    """Each compiled extension of the image loads with every symbol resolved.

    A wheel may carry extensions for another vendor's runtime (torchao's does). What cannot load for want of
    that runtime alone is counted, not failed: nothing of this stack can call it. Of an image that declares
    nothing only torch, what torch needs and what needs torch is judged: it is no stack of ours that such an
    image ships CuPy's bridge to a cuTENSOR, or mpi4py's to an MPI, that it leaves to the user.
    """
    extensions = _extensions(SITE)
    if not DECLARATION.exists():
        extensions = _owned_by(_torch_and_kin(), extensions)
    assert extensions, f"no compiled extension under {SITE}: is this the Python of the image?"
    errors = on_device(image.load_errors, paths=[str(path) for path in extensions], timeout_s=300)
    foreign = [error for error in errors if _is_foreign(error, vendor.FOREIGN_RUNTIMES)]
    record_metric("extensions_for_another_vendor", len(foreign), unit="files")
    assert len(foreign) == len(errors), "\n".join(error for error in errors if error not in foreign)


def _is_foreign(error: str, runtimes: Sequence[str]) -> bool:
    """Whether the loader misses another vendor's runtime library: `FILE: libcudart.so.13: cannot open …`."""
    missing = error.partition(": ")[2].partition(": ")
    return missing[0].split(".so")[0] in runtimes and missing[2].startswith("cannot open shared object")


def test_libraries_are_there_once(on_device: OnDevice) -> None:
    """One file serves each of NCCL/RCCL, the runtime, Triton and torch: two copies are undefined."""
    doubled = {name: files for name, files in on_device(image.mapped).items() if len(files) > 1}
    owners = importlib.metadata.packages_distributions()
    doubled |= {name: owners[name] for name in ("torch", "triton") if len(set(owners.get(name, ()))) > 1}
    assert not doubled


def test_pip_check_finds_no_conflict() -> None:
    """The installed packages agree with each other's requirements."""
    run = _pip("check")
    assert run.returncode == 0, run.stdout + run.stderr


def test_torch_cannot_be_replaced(declared: Mapping[str, Any], tmp_path: Path) -> None:
    """Installing another torch into the image is refused by its constraints."""
    _wheel(tmp_path, "torch", "0.0.1")
    offered = ("--dry-run", "--no-index", "--no-cache-dir", "--find-links", str(tmp_path))
    run = _pip("install", *offered, "torch==0.0.1")
    assert run.returncode != 0, f"{declared['stack_id']} would take torch 0.0.1:\n{run.stdout}"
    assert "constraint" in run.stdout + run.stderr, run.stdout + run.stderr


def test_environment_is_as_declared(declared: Mapping[str, Any]) -> None:
    """Each variable that the image declares is set to that value."""
    wrong = {
        name: os.environ.get(name) for name, value in declared["env"].items() if os.environ.get(name) != value
    }
    assert not wrong, f"declared { ({name: declared['env'][name] for name in wrong}) }, got {wrong}"


def _pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False)


def _extensions(site: Path) -> list[Path]:
    """Importable modules of compiled code, and torch's own libraries; not the plug-ins that others load."""
    suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    modules = [path for path in site.rglob("*.so") if path.name.endswith(suffixes)]
    return sorted(path for path in modules if not path.name.startswith("lib") or _is_core(path))


def _torch_and_kin() -> set[str]:
    """torch, all that it requires, and what requires torch: normalised names of installed distributions."""
    needs = {_plain(d.metadata["Name"]): _requirements(d) for d in importlib.metadata.distributions()}
    found, waiting = set[str](), ["torch"]
    while waiting:
        name = waiting.pop()
        if name in needs and name not in found:
            found.add(name)
            waiting += needs[name]
    return found | {name for name, required in needs.items() if "torch" in required}


def _requirements(distribution: importlib.metadata.Distribution) -> set[str]:
    """Names that a distribution requires in any case; an extra is somebody else's wish."""
    lines = [line for line in distribution.requires or () if "extra ==" not in line]
    return {_plain(match[0]) for line in lines if (match := re.match(r"[\w.-]+", line))}


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _owned_by(names: set[str], paths: Sequence[Path]) -> list[Path]:
    owned = {
        Path(str(distribution.locate_file(file))).resolve()
        for distribution in importlib.metadata.distributions()
        if _plain(distribution.metadata["Name"]) in names
        for file in distribution.files or ()
    }
    return [path for path in paths if path.resolve() in owned]


def _is_core(path: Path) -> bool:
    return path.match("torch/lib/*.so") and path.name.startswith(("libtorch", "libc10"))


def _wheel(folder: Path, name: str, version: str) -> None:
    """The smallest wheel that pip would install."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def _covered(arch: str, compiled: Sequence[str]) -> bool:
    """Code for sm_XY runs on a later minor of the same major (CUDA's binary compatibility); gfx has no such
    rule.
    """
    if arch in compiled or not arch.startswith("sm_"):
        return arch in compiled
    major, minor = int(arch[3:-1]), int(arch[-1])
    numbers = [name[3:] for name in compiled if re.fullmatch(r"sm_\d+", name)]
    return any(int(number[:-1]) == major and int(number[-1]) <= minor for number in numbers)


def _dotted(version: Sequence[int] | None) -> str:
    return ".".join(map(str, version or ()))


def _release(version: str) -> str:
    return re.split(r"[-+]", version)[0]


def _same_release(found: str, declared: str) -> bool:
    wanted = declared.split(".")[:2]  # the patch of a runtime is the wheel's own affair: cu130 is 13.0
    return found.split(".")[:2] == wanted
