"""The image: does what it declares equal what is installed and what loads? In: the image. Out: differences.

No device is needed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from harness import about, installed, skips
from harness.asked import of_image
from harness.calls import InChild, RecordMetric
from harness.readings import only_with
from harness.session import AcceptanceSession
from vendors import Device, Vendor, software
from workloads import image

pytestmark = pytest.mark.static


@pytest.fixture
def declared(acceptance: AcceptanceSession) -> Mapping[str, Any]:
    """The image's declaration. An image that stackcheck did not build has none, and that is not a fault."""
    content = of_image(installed.declaration)
    if content is None and acceptance.run_file.get("stack_id"):
        pytest.fail(
            f"this image of stack {acceptance.run_file['stack_id']} has no {installed.DECLARATION}",
            pytrace=False,
        )
    if content is None:
        skips.without_package(
            "declaration", f"this image declares nothing: it has no {installed.DECLARATION}"
        )
    return content


@pytest.fixture
def torch_is_declared() -> None:
    """Skip a check about torch in a stack that declares no torch; such a stack is never certified."""
    if not of_image(installed.has_torch):
        skips.without_package("torch", "this stack has no torch, so it can never be certified for training")


@pytest.fixture
def loaded(torch_is_declared: None, in_child: InChild) -> Mapping[str, Any]:
    """Versions as the loaded libraries report them."""
    del torch_is_declared
    versions: Mapping[str, Any] = in_child(image.loaded)
    return versions


def test_declared_versions_are_installed(declared: Mapping[str, Any]) -> None:
    """Every package that the image declares is installed in exactly that version."""
    found = of_image(about.versions, names=list(declared["packages"]))
    wrong = [
        f"{name}: declared {version}, installed {found[name]}"
        for name, version in declared["packages"].items()
        if not _is_declared(found[name], version, declared)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_image_is_the_stack_that_was_asked_for(
    declared: Mapping[str, Any], acceptance: AcceptanceSession
) -> None:
    """Stack, vendor, Python and distribution are the declared ones."""
    system = of_image(about.system)
    found = {
        "stack_id": acceptance.run_file.get("stack_id") or declared["stack_id"],
        "vendor": acceptance.vendor,
        "python": ".".join(system["python"].split(".")[: declared["python"].count(".") + 1]),
        "os": system["os"],
    }
    expected = {key: declared[key] for key in found}
    assert found == expected, f"this image is {found}, but declares {expected}"


def test_loaded_libraries_are_the_declared_ones(
    declared: Mapping[str, Any], loaded: Mapping[str, Any], vendor: Vendor
) -> None:
    """torch, its runtime, the collective library, Triton and FlashAttention load in the declared versions."""
    # A wheel of the default index has version 2.13.0 in its metadata, and torch.__version__ is 2.13.0+cu130.
    assert declared["packages"]["torch"] in (loaded["torch"], loaded["torch"].partition("+")[0])
    for name in ("triton", "flash_attn"):
        if declared.get(name):
            assert _is_declared(loaded[name], declared[name]["version"], declared), name
    collective = declared.get("collective")
    if collective and collective["name"] in ("nccl", "rccl") and collective.get("version"):
        assert installed.agree(loaded["collective"] or (), collective["version"]), (
            loaded["collective"],
            collective,
        )
    if declared.get("runtime_version"):
        found = of_image(about.torch_runtime, vendor=vendor.NAME) or "none"
        assert vendor.is_release(found, declared["runtime_version"]), (found, declared["runtime_version"])


def test_the_vendor_libraries_that_load_are_the_installed_ones(
    acceptance: AcceptanceSession, in_child: InChild, record_metric: RecordMetric
) -> None:
    """Each library of the vendor reports the version that is declared and that its wheel has."""
    table = software.of(acceptance.vendor).LIBRARIES
    if not table:
        skips.without_feature("gpu", f"vendor {acceptance.vendor} has no libraries of its own")
    found = in_child(image.libraries, vendor=acceptance.vendor, fresh=True)["libraries"]
    versions = {name: installed.dotted(entry["version"]) for name, entry in found.items() if entry["version"]}
    record_metric("vendor_libraries_asked", len(versions), unit="libraries", conditions=versions)
    wrong = of_image(about.problems_of_loaded, vendor=acceptance.vendor, found=found)
    assert versions, f"this image has none of the libraries of vendor {acceptance.vendor}"
    assert not wrong, "\n".join(wrong)


def test_torch_is_built_for_the_vendor(vendor: Vendor, loaded: Mapping[str, Any]) -> None:
    """The installed torch is a build for this vendor.
    An upgrade can silently install another vendor's build.
    """
    runtimes = {"nvidia": loaded["cuda"], "amd": loaded["hip"]}
    built_for = [name for name, version in runtimes.items() if version] or ["cpu"]
    assert built_for == [vendor.NAME], (
        f"torch {loaded['torch']} is a build for {built_for[0]}, expected {vendor.NAME}"
    )


def test_every_architecture_is_compiled_in(
    acceptance: AcceptanceSession, devices: tuple[Device, ...], loaded: Mapping[str, Any]
) -> None:
    """torch holds device code for each architecture of the stack, or of this machine if none is declared."""
    covers = software.of(acceptance.vendor).covers
    wanted = installed.architectures(acceptance.vendor, devices, of_image(installed.declaration))
    missing = [arch for arch in wanted if not covers(arch, loaded["archs"])]
    assert not missing, f"torch has no code for {missing}; compiled in: {loaded['archs']}"


def test_every_extension_loads(in_child: InChild, vendor: Vendor, record_metric: RecordMetric) -> None:
    """Each compiled extension of the image loads with every symbol resolved.

    A wheel may contain extensions for another vendor's runtime (torchao does). If only that runtime is
    missing, the file is counted and does not fail the check: nothing in this stack can call it. In an image
    without a declaration, only torch, its requirements and the packages that require it are judged: such an
    image may contain CuPy's bridge to cuTENSOR or mpi4py's to MPI and leave those libraries to the user.
    """
    found = of_image(about.extensions)
    assert found["paths"], f"no compiled extension under {found['site']}: is this the image's own Python?"
    errors = in_child(image.load_errors, paths=found["paths"], after_torch=of_image(installed.has_torch))
    foreign = [error for error in errors if _is_foreign(error, vendor.FOREIGN_RUNTIMES)]
    record_metric("extensions_for_another_vendor", len(foreign), unit="files")
    assert len(foreign) == len(errors), "\n".join(error for error in errors if error not in foreign)


def test_every_package_is_for_the_vendor(acceptance: AcceptanceSession, record_metric: RecordMetric) -> None:
    """No package is for another vendor alone:
    by its name, its device code, the runtimes that it needs, or inline assembly. Such a package imports, and
    fails or silently falls back when a job reaches it.

    FlashAttention 3, the CUDA build of bitsandbytes and wheels for CUDA are found in an image for AMD.
    """
    only_with(
        acceptance.vendor != "cpu", "gpu", "vendor cpu has no device code, so none can be for another vendor"
    )
    wrong, tolerated = of_image(about.foreign_problems, vendor=acceptance.vendor)
    record_metric(
        "packages_with_parts_for_another_vendor",
        len(tolerated),
        unit="packages",
        conditions={"packages": "; ".join(tolerated) or "none"},
    )
    assert not wrong, "\n".join(wrong)


def test_the_management_library_does_not_break_torch(
    acceptance: AcceptanceSession, in_child: InChild
) -> None:
    """Where the vendor's management module is on Python's path, torch imports it: it must import.

    The package index's `amdsmi` has no library, and `import torch` itself ends (pytorch#188724).
    """
    module = software.of(acceptance.vendor).SMI
    if module is None:
        skips.without_feature("gpu", f"vendor {acceptance.vendor} has no management library")
    error = in_child(image.import_error, module=module, fresh=True)
    assert error is None, (
        f"`import {module}`, which torch does when it is imported, ends with {error}: remove the package, or"
        " install its library"
    )


def test_libraries_are_there_once(
    acceptance: AcceptanceSession, in_child: InChild, record_metric: RecordMetric
) -> None:
    """A training job loads NCCL/RCCL, the runtimes, BLAS, OpenMP and C++ from one file each.
    This holds after all of its imports; with two copies the behaviour is undefined.
    """
    report = in_child(image.libraries, vendor=acceptance.vendor, fresh=True)
    imported = {"imported": " ".join(report["modules"])}
    record_metric("libraries_mapped", len(report["files"]), unit="files", conditions=imported)
    doubled = {
        name: files
        for name, stems in software.once().items()
        if len(files := [file for file in report["files"] if software.stem(file) in stems]) > 1
    }
    owners = of_image(about.providers, modules=["torch", "triton"])
    doubled |= {name: found for name, found in owners.items() if len(found) > 1}
    assert not doubled, f"loaded or installed more than once: {doubled}"


def test_nothing_runs_unasked_when_python_starts(in_child: InChild, record_metric: RecordMetric) -> None:
    """Each .pth file, sitecustomize and usercustomize is as an installed package brought it.
    Such a file can change any result.
    """
    found = of_image(about.startup_problems, folders=in_child(image.import_path, fresh=True))
    files = {"files": " ".join(found["files"])}
    record_metric("startup_files", len(found["files"]), unit="files", conditions=files)
    assert not found["problems"], "\n".join(found["problems"])


def test_pip_check_finds_no_conflict() -> None:
    """The installed packages satisfy each other's requirements.

    An environment that uv made has no pip; there the packages' metadata are read, as `pip check` does.
    """
    problems = of_image(about.conflicts)
    assert not problems, "\n".join(problems)


def test_torch_cannot_be_replaced(declared: Mapping[str, Any], torch_is_declared: None) -> None:
    """The image's constraints refuse the installation of another torch."""
    del torch_is_declared
    run = of_image(about.replacing_torch)
    assert run["code"] != 0, (
        f"pip would install torch 0.0.1 into {declared['stack_id']}, expected a constraint:\n{run['text']}"
    )
    assert "constraint" in run["text"], run["text"]


def test_environment_is_as_declared(
    declared: Mapping[str, Any], acceptance: AcceptanceSession, record_metric: RecordMetric
) -> None:
    """Each variable that the image declares has the declared value; those that change speed are recorded."""
    there, names = of_image(about.environment), software.of(acceptance.vendor).VARIABLES
    told = {name: there[name] for name in sorted(there) if name.startswith(names)}
    record_metric("variables_for_speed", len(told), unit="variables", conditions=told)
    wrong = {name: there.get(name) for name, value in declared["env"].items() if there.get(name) != value}
    assert not wrong, f"declared { ({name: declared['env'][name] for name in wrong}) }, got {wrong}"


def _is_declared(found: str, version: str, declared: Mapping[str, Any]) -> bool:
    """Whether a version is the declared one; AMD's own wheels add a commit, `+rocm7.2.4.lw.git39497456`."""
    return found == version or (declared["wheels"] == "amd" and found.partition("+rocm")[0] == version)


def _is_foreign(error: str, runtimes: Sequence[str]) -> bool:
    """Whether the loader could not find another vendor's runtime: `FILE: libcudart.so.13: cannot open …`."""
    missing = error.partition(": ")[2].partition(": ")
    return missing[0].split(".so")[0] in runtimes and missing[2].startswith("cannot open shared object")
