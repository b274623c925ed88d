"""Faults of an image: its declaration, its packages and its loaded libraries differ from each other."""

# ruff: noqa: E501 - a table of faults reads in rows
import base64
import functools
import hashlib
import json
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

import device_code
from planting import SUITE_PYTHON, Fault, judge_each

I = "test_image.py::"  # noqa: E741
LOADED = "workloads.image:loaded"
LIBRARIES = I + "test_the_vendor_libraries_that_load_are_the_installed_ones"
DECLARED = {
    "packages": {"torch": "2.15.0"},
    "runtime_version": "13.0",
    "collective": {"name": "nccl", "version": "2.30.7"},
}
VERSIONS = {
    "the CUDA runtime": [13, 0],
    "NVRTC": [13, 0],
    "NCCL": [2, 30, 7],
    "cuBLAS": [13, 1, 1],
    "cuBLASLt": [13, 1, 1],
    "cuDNN": [9, 20, 0],
    "torch's CUDA kernels": None,
}


def release() -> str:
    found = platform.freedesktop_os_release()
    return found["ID"] + found.get("VERSION_ID", "")


def declaration(**changes: object) -> str:
    told = {
        "schema": 1,
        "stack_id": "cpu-test",
        "vendor": "cpu",
        "runtime": "cpu",
        "runtime_version": None,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "os": release(),
        "archs": [],
        "wheels": "upstream",
        "packages": {"torch": "2.13.0"},
        "triton": None,
        "collective": None,
        "flash_attn": None,
        "env": {},
    }
    return json.dumps(told | changes)


@functools.cache
def mapped_by_torch() -> list[Path]:
    """What a healthy process has mapped."""
    show = "import torch; print(open('/proc/self/maps').read())"
    told = subprocess.run([SUITE_PYTHON, "-c", show], capture_output=True, text=True, check=True).stdout
    return sorted({Path(line.split(maxsplit=5)[5]) for line in told.splitlines() if ".so" in line})


def installed_package(site: Path, name: str, version: str, files: dict[str, bytes]) -> tuple[str, ...]:
    """A package on Python's path, with its metadata."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for path, data in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(data)
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in files))
    return (str(site),)


def asked(folder: Path, changes: dict[str, object]) -> dict[str, object]:
    """The versions that the libraries report, with a planted wheel for cuDNN; None in `changes` removes
    one.
    """
    own = folder / "site" / "libcudnn.so.9"
    paths = installed_package(folder / "site", "nvidia-cudnn-cu13", "9.20.0.48", {own.name: b""})
    versions = {
        name: version for name, version in {**VERSIONS, **changes}.items() if name not in changes or version
    }
    told = {
        name: {
            "file": str(own) if name == "cuDNN" else f"/opt/nccl/lib{name.lower()}.so.2",
            "version": version,
        }
        for name, version in versions.items()
    }
    report = {"modules": ["torch"], "files": [], "libraries": told}
    return {"paths": paths, "patches": {"workloads.image:libraries": f"lambda vendor: {report!r}"}}


@pytest.fixture
def stack(tmp_path, request) -> dict[str, str]:
    """The environment of an image that declares what the test asks for."""
    path = tmp_path / "stack.json"
    if (told := getattr(request, "param", {})) is not None:  # None: an image that declares nothing
        path.write_text(declaration(**told), encoding="utf-8")
    # Without this, the constraints of the image in which these tests run would apply.
    return {"STACKCHECK_STACK_FILE": str(path), "PIP_CONSTRAINT": ""}


@pytest.mark.parametrize(
    ("stack", "check", "says"),
    [
        ({"python": "3.2"}, "test_the_image_is_the_stack_that_was_asked_for", "3.2"),
        pytest.param({"vendor": "amd"}, "test_the_image_is_the_stack_that_was_asked_for", "amd", marks=pytest.mark.slow),
        ({"packages": {"torch": "2.0.0"}}, "test_loaded_libraries_are_the_declared_ones", "2.0.0"),
        ({"archs": ["gfx942"]}, "test_every_architecture_is_compiled_in", "gfx942"),
        ({"env": {"HSA_NO_SCRATCH_RECLAIM": "1"}}, "test_environment_is_as_declared", "HSA_NO_SCRATCH_RECLAIM"),
        ({}, "test_torch_cannot_be_replaced", "would install torch 0.0.1"),
    ],
    indirect=["stack"],
)  # fmt: skip
def test_drift_from_the_declaration_is_caught(stack, check, says, plant):
    plant(Fault("drift", I + check, says=says, env=stack))


@pytest.mark.parametrize("stack", [{"packages": {"pytest": "1.0.0", "no-such-thing": "1"}}], indirect=True)
def test_packages_that_are_not_the_declared_ones_are_caught(stack, plant, request):
    fault = Fault("drift of packages", I + "test_declared_versions_are_installed", env=stack)
    says = {"another version": "pytest: declared 1.0.0", "an absent one": "declared 1, installed none"}
    judge_each(request.node, fault, plant(fault), says)


def test_torch_of_another_vendor_is_caught(plant):
    other = "lambda: {**original(), 'cuda': '13.0', 'torch': '2.12.0+cu130'}"
    plant(
        Fault(
            "a CUDA torch", I + "test_torch_is_built_for_the_vendor", says="nvidia", patches={LOADED: other}
        )
    )


def test_extension_with_an_undefined_symbol_is_caught(plant, tmp_path):
    broken = tmp_path / "broken.cpython-311-x86_64-linux-gnu.so"
    broken.write_bytes(b"\x7fELF not really")
    patch = {
        "workloads.image:load_errors": f"lambda paths, after_torch: original([*paths[:2], {str(broken)!r}])"
    }
    plant(Fault("a broken extension", I + "test_every_extension_loads", says=broken.name, patches=patch))


def test_extension_that_kills_its_process_is_caught(plant):
    patch = {"workloads.image:load_errors": "lambda paths, after_torch: os.abort()"}
    plant(Fault("a killing extension", I + "test_every_extension_loads", says="SIGABRT", patches=patch))


@pytest.mark.parametrize("stem", [pytest.param("libgomp", marks=pytest.mark.slow), "libstdc++"])
def test_second_copy_of_a_library_is_caught(plant, tmp_path, stem):
    """A module of the job brings its own copy, as extensions with vendored libraries do."""
    first = next(path for path in mapped_by_torch() if path.name.startswith((stem + ".", stem + "-")))
    second = tmp_path / "vendored" / first.name
    second.parent.mkdir()
    shutil.copy(first, second)
    module = f"import ctypes\nimport torch\nctypes.CDLL({str(second)!r})\n"
    files = {"pynvml.py": module}
    plant(Fault(f"two of {stem}", I + "test_libraries_are_there_once", says=str(second), files=files))


def test_two_openmp_runtimes_are_caught(plant):
    two = "lambda vendor: {'modules': [], 'files': ['/a/libgomp-a34b3233.so.1', '/b/libiomp5.so']}"
    once, patches = I + "test_libraries_are_there_once", {"workloads.image:libraries": two}
    plant(Fault("two OpenMP runtimes", once, says="an OpenMP runtime", patches=patches))


# What a library says of its version -> what the check says then.
WRONG = {
    "NCCL": ([2, 27, 3], "NCCL: /opt/nccl/libnccl.so.2 is 2.27.3, declared 2.30.7"),
    "the CUDA runtime": ([12, 8], "is 12.8, declared 13.0"),
    "cuDNN": ([9, 19, 0], "is 9.19.0, installed nvidia-cudnn-cu13 9.20.0.48"),
    "cuBLAS": ("cuBLAS does not report its version: no cublasGetProperty", "does not report its version"),
    "NVRTC": (None, "NVRTC: torch did not load libnvrtc.so"),
}


@pytest.mark.parametrize("stack", [{"vendor": "nvidia", **DECLARED}], indirect=True)
def test_vendor_libraries_that_are_not_the_stated_ones_are_caught(plant, tmp_path, stack, request):
    planted = asked(tmp_path, {name: version for name, (version, _) in WRONG.items()})
    fault = Fault("drift of libraries", LIBRARIES, vendor="nvidia", env=stack, **planted)
    says = {f"drift of {name}": words for name, (_, words) in WRONG.items()}
    judge_each(request.node, fault, plant(fault), says)


@pytest.mark.parametrize("stack", [{"vendor": "nvidia", **DECLARED}], indirect=True)
def test_library_of_the_system_before_the_wheels_is_caught(plant, tmp_path, stack):
    planted = asked(tmp_path, {})
    (tmp_path / "site" / "nvidia_cudnn_cu13-9.20.0.48.dist-info" / "RECORD").write_text("")
    says = "does not belong to nvidia-cudnn-cu13"
    plant(Fault("another cuDNN", LIBRARIES, says=says, vendor="nvidia", env=stack, **planted))


@pytest.mark.parametrize("stack", [{"vendor": "nvidia", **DECLARED}], indirect=True)
def test_the_stated_libraries_pass_without_a_device(plant, tmp_path, stack):
    plant(Fault("nothing", LIBRARIES, "passed", vendor="nvidia", env=stack, **asked(tmp_path, {})))


@pytest.mark.parametrize("stack", [{"vendor": "amd", "packages": {}}], indirect=True)
def test_stack_without_torch_says_so_and_is_not_certified(plant, stack):
    check = I + "test_torch_is_built_for_the_vendor"
    says = "no torch, so it can never be certified"
    result = plant(Fault("no torch", check, outcome="skipped", says=says, vendor="amd", env=stack))
    assert result["host"]["devices"] == []


START = I + "test_nothing_runs_unasked_when_python_starts"
UNASKED = "import os\n"


STARTERS = ("evil.pth", "sitecustomize.py", "usercustomize.py")


def test_code_that_runs_at_every_start_and_has_no_owner_is_caught(plant, request):
    fault = Fault("unowned starters", START, files=dict.fromkeys(STARTERS, UNASKED))
    says = {f"an unowned {name}": f"{name}: no installed package owns it" for name in STARTERS}
    judge_each(request.node, fault, plant(fault), says)


@pytest.mark.parametrize("body", [UNASKED, UNASKED + "os.environ\n"], ids=["owned", "changed"])
def test_code_that_runs_at_every_start_is_accepted_only_as_its_owner_installed_it(
    plant, tmp_path, body, request
):
    paths = installed_package(tmp_path / "site", "owner", "1.0", dict.fromkeys(STARTERS, body.encode()))
    digest = base64.urlsafe_b64encode(hashlib.sha256(UNASKED.encode()).digest()).rstrip(b"=").decode()
    record = "".join(f"{name},sha256={digest},{len(UNASKED)}\n" for name in STARTERS)
    (tmp_path / "site" / "owner-1.0.dist-info" / "RECORD").write_text(record)
    if body == UNASKED:
        plant(Fault("owned starters", START, "passed", paths=paths))
        return
    fault = Fault("changed starters", START, paths=paths)
    says = {f"a changed {name}": f"{name}: it is not as owner 1.0 installed it" for name in STARTERS}
    judge_each(request.node, fault, plant(fault), says)


def test_conflict_of_installed_packages_is_caught(plant, tmp_path):
    site = tmp_path / "needy-1.0.dist-info"
    site.mkdir()
    metadata = "Metadata-Version: 2.1\nName: needy\nVersion: 1.0\nRequires-Dist: torch<1\n"
    (site / "METADATA").write_text(metadata, encoding="utf-8")
    check = I + "test_pip_check_finds_no_conflict"
    plant(Fault("a conflict", check, says="needy", paths=(str(tmp_path),)))


def test_declared_image_without_its_declaration_is_caught(plant, tmp_path):
    told = tmp_path / "run.json"
    told.write_text(json.dumps({"run_id": "ab" * 8, "stack_id": "cpu-test"}), encoding="utf-8")
    env = {"STACKCHECK_STACK_FILE": str(tmp_path / "none")}
    check, arguments = I + "test_declared_versions_are_installed", ("--run-file", str(told))
    plant(Fault("no declaration", check, says="has no", env=env, arguments=arguments))


def test_foreign_image_skips_what_it_does_not_declare(plant, tmp_path):
    env = {"STACKCHECK_STACK_FILE": str(tmp_path / "none")}
    check = I + "test_declared_versions_are_installed"
    plant(Fault("nothing declared", check, outcome="skipped", says="declares nothing", env=env))


# Packages for another vendor: a planted wheel each, as pip would have installed it.
FOREIGN = I + "test_every_package_is_for_the_vendor"
PTX_CODE = (
    '__global__ void f() { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(0), "l"(0)); }\n'
)
PTX_IN_TRITON = 'y = tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,r,r", [a, b])\n'


CUDA, HIP = device_code.nvidia_library(["sm_80"]), device_code.amd_library(["gfx942"])
PLAIN_LIBRARY = device_code.elf({".text": b"x"})


# Package -> its files, and what the check says of it.
OF_NVIDIA = {
    "flash-attn-3": ({"flash_attn_3/_C.abi3.so": CUDA}, "written for NVIDIA's Hopper"),
    "bitsandbytes": (
        {"bitsandbytes/libbitsandbytes_cpu.so": PLAIN_LIBRARY, "bitsandbytes/libbitsandbytes_cuda126.so": CUDA, "bitsandbytes/libbitsandbytes_cuda130.so": PLAIN_LIBRARY},
        "its compiled files are for nvidia alone",
    ),
    "fused-things": ({"fused/_C.cpython-312-x86_64-linux-gnu.so": CUDA}, "for nvidia alone (_C.cpython"),
    "ptx-kernels": ({"ptx_kernels/copy.cu": PTX_CODE.encode()}, "PTX inline in copy.cu"),
    "ptx-triton": ({"ptx_triton/kernels.py": PTX_IN_TRITON.encode()}, "PTX inline in kernels.py"),
    "nvidia-cublas-cu12": ({"nvidia/cublas/lib/libcublas.so.12": CUDA}, "a library of CUDA"),
}  # fmt: skip
OF_AMD = {
    "triton-rocm": ({}, "as PyTorch builds it for ROCm"),
    "hip-kernels": ({"hip_kernels/_C.so": HIP}, "its compiled files are for amd alone"),
}
OF_BOTH = {
    "bitsandbytes": {"b/libbitsandbytes_cuda126.so": CUDA, "b/libbitsandbytes_rocm72.so": HIP},
    "torchao": {"torchao/_C_cutlass_90a.abi3.so": CUDA},
    "guarded": {"guarded/copy.cu": b"#ifndef USE_ROCM\n" + PTX_CODE.encode() + b"#endif\n"},
    "plain": {"plain/_c.abi3.so": PLAIN_LIBRARY, "plain/a.py": b"'''asm( is a word'''\n"},
}


@pytest.mark.parametrize(
    ("stack", "wheels"),
    [
        ({"vendor": "amd", "packages": {}}, OF_NVIDIA),
        pytest.param(None, OF_NVIDIA, marks=pytest.mark.slow),
        ({"vendor": "nvidia", "packages": {}}, OF_AMD),
    ],
    indirect=["stack"],
    ids=["declared", "foreign image", "of AMD"],
)
def test_packages_for_another_vendor_are_caught(plant, tmp_path, stack, wheels, request):
    vendor = "nvidia" if wheels is OF_AMD else "amd"
    for name, (files, _) in wheels.items():
        paths = installed_package(tmp_path / "site", name, "1.0", files)
    fault = Fault("packages for another vendor", FOREIGN, vendor=vendor, env=stack, paths=paths)
    judge_each(
        request.node,
        fault,
        plant(fault),
        {f"{name} not for {vendor}": says for name, (_, says) in wheels.items()},
    )


@pytest.mark.parametrize("stack", [{"vendor": "amd", "packages": {}}], indirect=True)
def test_packages_with_a_way_for_amd_pass(plant, tmp_path, stack):
    for name, files in OF_BOTH.items():
        paths = installed_package(tmp_path / "site", name, "1.0", files)
    plant(Fault("packages for both", FOREIGN, "passed", vendor="amd", env=stack, paths=paths))


MANAGEMENT = I + "test_the_management_library_does_not_break_torch"
# As the wheels of the package index: the module is there, its library is not.
WITHOUT_LIBRARY = (
    'print("libamd_smi.so: cannot open shared object file")\n_libraries = {}\n_libraries["libamd_smi.so"]\n'
)


@pytest.mark.parametrize("stack", [{"vendor": "amd", "packages": {}}], indirect=True)
@pytest.mark.parametrize("body", [WITHOUT_LIBRARY, ""], ids=["without its library", "with it"])
def test_management_module_without_its_library_is_caught(plant, tmp_path, stack, body):
    outcome, says = ("failed", "KeyError: 'libamd_smi.so'") if body else ("passed", "")
    paths = installed_package(tmp_path / "site", "amdsmi", "7.0.2", {"amdsmi/__init__.py": body.encode()})
    what = "amdsmi of the index" if body else "a whole amdsmi"
    plant(Fault(what, MANAGEMENT, outcome, says, vendor="amd", env=stack, paths=paths))


AMDS_OWN = {"vendor": "amd", "wheels": "amd", "packages": {"amds-own": "2.9.1"}}


@pytest.mark.parametrize(
    ("stack", "version", "outcome"),
    [
        (AMDS_OWN, "2.9.1+rocm7.2.4.lw.git39497456", "passed"),
        (AMDS_OWN, "2.9.1+cu130", "failed"),
        ({**AMDS_OWN, "wheels": "upstream"}, "2.9.1+rocm7.2.4.lw.git39497456", "failed"),
    ],
    indirect=["stack"],
)
def test_amds_own_wheel_is_the_declared_version_and_another_build_is_not(
    plant, tmp_path, stack, version, outcome
):
    paths = installed_package(tmp_path / "site", "amds-own", version, {})
    check = I + "test_declared_versions_are_installed"
    says = "" if outcome == "passed" else f"amds-own: declared 2.9.1, installed {version}"
    plant(Fault(f"amds-own {version}", check, outcome, says, vendor="amd", env=stack, paths=paths))
