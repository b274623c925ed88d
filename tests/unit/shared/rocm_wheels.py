"""Stand-in wheels of ROCm stacks, where their makers put them: torch, Triton, ROCm's own, FlashAttention.

In: a mirror, a stack. Out: files below the mirror's tree.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import device_code
import rocm_standins as standins
import small_wheels
from rocm_mirror import Mirror
from stackcheck.matrix.stack import Stack


def torch(mirror: Mirror, stack: Stack) -> None:
    """torch with what it needs, where its makers put it."""
    assert stack.triton
    python = f"cp{stack.python.replace('.', '')}"
    release = stack.runtime_version or ""
    libraries = _libraries(mirror, stack)
    own = {
        "torch/lib/" + name: (libraries / name).read_bytes()
        for name in ("libtorch_hip.so", "libtorch_cpu.so")
    }
    needs = ["filelock", "typing-extensions>=4.10.0", 'setuptools; python_version >= "3.12"']
    folders, tag = ["lib"], f"{python}-{python}-manylinux_2_28_x86_64"
    of_rocm = {f"{name}.so": (libraries / f"{name}.so").read_bytes() for name in standins.ROCM_LIBRARIES}
    if stack.wheels == "amd":
        place = mirror.tree / "amd" / "rocm" / "manylinux" / f"rocm-rel-{release}"
        version, triton_version = (
            f"{stack.torch}+rocm{release}.lw.git39497456",
            f"{stack.triton.version}+rocm{release}.gita272dfa8",
        )
        folders, tag = ["lib", "/opt/rocm/lib"], f"{python}-{python}-linux_x86_64"
        triton_place = place
    else:
        place = mirror.tree / "pytorch" / "whl" / (stack.wheel_tag or "") / "torch"
        triton_place = place.parent / stack.triton.name
        version, triton_version = stack.requirements[0].partition("==")[2], stack.triton.version
        if stack.layout == "amdrocm":
            needs.append(f"rocm[libraries,device-all]=={release}")
            folders += ["../_rocm_sdk_core/lib", "../_rocm_sdk_libraries/lib"]
            more = {
                name: (libraries / name).read_bytes() for name in ("libamd_smi.so.26", "librocm_kpack.so.1")
            }
            _rocm_wheels(place.parent, release, {**of_rocm, **more})
        else:
            own |= {f"torch/lib/{name}": body for name, body in of_rocm.items()} | kernels("torch/")
    needs.append(f"{stack.triton.name}=={triton_version}")
    small_wheels.wheel(
        place, "torch", version, {**own, **_modules(stack, version, folders)}, needs=needs, tag=tag
    )
    triton = {
        "triton/__init__.py": standins.TRITON.format(version=stack.triton.version),
        **standins.TRITON_FILES,
    }
    small_wheels.wheel(triton_place, stack.triton.name, triton_version, triton, tag=tag)


def _libraries(mirror: Mirror, stack: Stack) -> Path:
    """A folder with the stand-ins of a release's libraries, made once."""
    assert stack.collective
    release = stack.runtime_version or ""
    major, minor, patch = (int(part) for part in release.split("."))
    numbers = [int(part) for part in stack.collective.version.split(".")]
    codes = {
        "hip": major * 10_000_000 + minor * 100_000 + patch,
        "rccl": numbers[0] * 10_000 + numbers[1] * 100 + numbers[2],
    }
    libraries = mirror.scratch / f"libraries-{release}"
    if not libraries.exists():
        split = stack.layout == "amdrocm"
        for stem in standins.ROCM_LIBRARIES:
            standins.library(libraries, stem, codes, split=split)
        for stem in ("libtorch_hip", "libtorch_cpu"):
            standins.library(libraries, stem, codes)
        standins.library(libraries, "libamd_smi", codes, suffix=".so.26")
        standins.library(libraries, "librocm_kpack", codes, suffix=".so.1")
    return libraries


def _modules(stack: Stack, version: str, folders: Sequence[str]) -> dict[str, str]:
    """The Python files of torch, which answer what the suites and the tool ask."""
    assert stack.collective
    release = stack.runtime_version or ""
    rccl = tuple(int(part) for part in stack.collective.version.split("."))
    return {
        "torch/__init__.py": standins.TORCH.format(
            version=version, folders=folders, names=(*standins.ROCM_LIBRARIES, "libtorch_cpu", "libtorch_hip")
        ),
        "torch/version.py": standins.TORCH_VERSION.format(hip=f"{release}-stand-in"),
        "torch/_C.py": standins.TORCH_C.format(archs=" ".join(standins.ARCHS)),
        "torch/cuda/__init__.py": standins.TORCH_CUDA,
        "torch/cuda/nccl.py": standins.TORCH_NCCL.format(rccl=rccl),
        "torch/distributed/__init__.py": standins.TORCH_DISTRIBUTED,
    }


def kernels(below: str, archs: Sequence[str] = standins.ARCHS) -> dict[str, bytes]:
    pairs = itertools.product(standins.KERNELS, archs)
    return {below + pattern.format(arch=arch): b"stand-in" for pattern, arch in pairs}


def _rocm_wheels(index: Path, release: str, libraries: dict[str, bytes]) -> None:
    """ROCm as Python packages (ROCm/TheRock docs/packaging/python_packaging.md): `rocm` is a source archive
    that names the others, libraries hold no device code, and each architecture has a wheel of its own.
    """
    core = {
        "libamd_comgr.so",
        "libhsa-runtime64.so",
        "libamdhip64.so",
        "librocm_smi64.so",
        "libamd_smi.so.26",
        "librocm_kpack.so.1",
    }
    smi = {f"_rocm_sdk_core/share/amd_smi/{name}": text for name, text in amdsmi(release).items()}
    files = {f"_rocm_sdk_core/lib/{name}": body for name, body in libraries.items() if name in core}
    _rocm_wheel(index, "rocm-sdk-core", release, {**files, **smi})
    files = {f"_rocm_sdk_libraries/lib/{name}": body for name, body in libraries.items() if name not in core}
    _rocm_wheel(index, "rocm-sdk-libraries", release, files)
    split = [f"lib/{name}.so" for name in standins.WITH_CODE if f"{name}.so" in libraries]
    for arch in standins.ARCHS:
        archive = {f"_rocm_sdk_libraries/.kpack/blas_{arch}.kpack": device_code.kpack(arch, split)}
        own = archive | kernels("_rocm_sdk_libraries/", [arch])
        needs = (f"rocm-sdk-libraries=={release}",)
        _rocm_wheel(index, f"rocm-sdk-device-{arch}", release, own, needs)
    devices = {f"device-{arch}": [f"rocm-sdk-device-{arch}=={release}"] for arch in standins.ARCHS}
    extras = {
        "libraries": [f"rocm-sdk-libraries=={release}"],
        **devices,
        "device-all": [need for needs in devices.values() for need in needs],
    }
    setup = (
        f"from setuptools import setup\nsetup(name='rocm', version={release!r}, py_modules=['rocm_sdk'],\n"
        f"      install_requires=['rocm-sdk-core=={release}'], extras_require={extras!r})\n"
    )
    pyproject = "[build-system]\nrequires = ['setuptools']\nbuild-backend = 'setuptools.build_meta'\n"
    small_wheels.source_archive(
        index / "rocm", "rocm", release, {"setup.py": setup, "rocm_sdk.py": "", "pyproject.toml": pyproject}
    )


def _rocm_wheel(
    index: Path, name: str, release: str, files: Mapping[str, bytes | str], needs: Sequence[str] = ()
) -> None:
    tag = "py3-none-manylinux_2_28_x86_64"
    small_wheels.wheel(index / name, name, release, files, needs=needs, tag=tag)


def amdsmi(release: str) -> dict[str, str]:
    year = {"6.2.4": {"year": 24, "major": 6, "minor": 3}}.get(
        release, {"major": 26, "minor": 2, "release": 1}
    )
    return {
        "amdsmi/__init__.py": standins.AMDSMI.format(version=year),
        "amdsmi/amdsmi_wrapper.py": standins.AMDSMI_WRAPPER.format(no_driver=standins.NO_DRIVER),
        "amdsmi/amdsmi_exception.py": standins.AMDSMI_EXCEPTION,
    }


def flash_attn(mirror: Mirror, stacks: Sequence[Stack]) -> None:
    for version in {stack.flash_attn.version for stack in stacks if stack.flash_attn}:
        sets = sorted({stack.archs for stack in stacks})
        standins.flash_attn(mirror.tree / "pypi" / "flash-attn", version, sets, mirror.scratch / "flash")
