"""The packages of a stack that no index has as a wheel: each has one stage and one lock.

In: a stack. Out: its `Extension`s, what the stage that compiles them asks for, and the values that the
templates take. Pure. Versions are the matrix's; how a package is built is a fact of its own setup.py.
"""

import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence  # a named tuple's annotations are read at run time
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.version import Version

from stackcheck.errors import ConfigurationError
from stackcheck.matrix.stack import FlashAttention, Stack

FLASH_ATTN, TRANSFORMER_ENGINE = "flash-attn", "transformer-engine-torch"
RELEASES = "https://github.com/Dao-AILab/flash-attention/releases/download/v{version}"
_CUDA_OF_THE_EXTRA = 13
# What setup.py and torch.utils.cpp_extension import: without build isolation pip does not install it.
_TOOLS = ("ninja", "packaging", "psutil", "setuptools", "wheel")
# NVIDIA's compiler as Python packages: nvcc and its parts work together only if all have one minor version.
_NVCC = ("nvidia-cuda-cccl", "nvidia-cuda-crt", "nvidia-cuda-nvcc", "nvidia-cuda-runtime", "nvidia-nvvm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extension:
    """A package whose wheel is made in a stage of its own.

    Attributes:
        form: `source`: made from the source archive; `wheel`: downloaded from the project's releases.
        env: Variables of the stage that makes it: architectures are always among them, where it has any.
    """

    name: str  # its name in the index, in its stage's and in its lock's name
    version: str
    form: Literal["wheel", "source"]
    because: str  # why it is made in this way: a comment of the Dockerfile
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    wheel: str | None = None  # the official wheel's file name, for `wheel`
    needs: tuple[str, ...] = ()  # what it imports at run time, beyond torch: part of the image's own lock
    compiled: bool = True  # whether it is more than Python, so that a compiler is needed

    @property
    def pin(self) -> str:
        """The requirement for pip; the version of an official wheel has a local part."""
        return f"{self.name}=={self.wheel.split('-')[1].lower() if self.wheel else self.version}"

    @property
    def releases(self) -> str:
        """The page of the project's own releases that has the official wheel."""
        return RELEASES.format(version=self.version)

    @property
    def pip_wants(self) -> str:
        """What `pip download` takes to get it: the address of the official wheel, or the source archive."""
        if self.wheel:
            return shlex.quote(f"{self.releases}/{self.wheel}")
        return f"--no-binary {self.name} {self.pin}"


def extensions(stack: Stack) -> tuple[Extension, ...]:
    """The packages of the image that no index has as a wheel."""
    flash = stack.flash_attn
    own = (_flash_attn(stack, flash),) if flash and flash.form != "index" else ()
    return (*own, *(_MAKERS[package.name](stack, package.version) for package in stack.extensions))


def needs(stack: Stack) -> tuple[str, ...]:
    """What the extensions import beside the image's own packages, and what builds a wheel of ROCm's selector.

    From 7.14 on `rocm`, which torch requires, is a source archive (ROCm/TheRock docs/packaging/
    python_packaging.md), so pip builds a wheel of it: without an index it finds its tools among the wheels.
    """
    builds = ("setuptools", "wheel") if stack.layout == "amdrocm" and stack.torch else ()
    own = (need for extension in extensions(stack) for need in extension.needs)
    return (*own, *_needs_of_flash_attn_4(stack), *builds)


def overrides(stack: Stack, wanted: Sequence[str]) -> tuple[str, ...]:
    """What replaces every requirement on ROCm's selector: device code of the stack's architectures alone.

    torch's wheel asks for `rocm[device-all]`, 25 wheels of 6.8 GB (pytorch/pytorch#191688); each has the code
    of one architecture (ROCm/TheRock docs/packaging/python_packaging.md). Rule R11-one-device.
    """
    if stack.values.get("device_wheels") != "one" or not stack.torch:
        return ()
    asked = (Requirement(one) for one in wanted)
    own = {extra for one in asked if one.name == "rocm" for extra in one.extras}
    extras = {"libraries", *(f"device-{arch}" for arch in stack.archs), *own}
    return (f"rocm[{','.join(sorted(extras))}]=={stack.runtime_version}",)


def _needs_of_flash_attn_4(stack: Stack) -> tuple[str, ...]:
    """The extra with FlashAttention 4's compiler for CUDA 13; the one for CUDA 12 is a normal dependency."""
    flash = stack.flash_attn
    major = int((stack.runtime_version or "0").split(".", maxsplit=1)[0])
    if flash is None or flash.form != "index" or major < _CUDA_OF_THE_EXTRA:
        return ()
    return (f"{flash.package}[cu{major}]",)


def toolchain(stack: Stack) -> tuple[str, ...]:
    """What the stage that compiles asks for: torch, the tools, and a compiler where no image has one.

    Raises:
        ConfigurationError: The matrix names no image with a compiler, and no package has one.
    """
    sources = [extension for extension in extensions(stack) if extension.form == "source"]
    if not sources:
        return ()
    compiler: tuple[str, ...] = ()
    if stack.builder is None and any(extension.compiled for extension in sources):
        compiler = _compiler(stack)
    return (stack.requirements[0], *_TOOLS, *compiler)


def _compiler(stack: Stack) -> tuple[str, ...]:
    version = stack.runtime_version or "0"
    if stack.layout == "amdrocm":
        return (f"rocm[devel]=={version}",)
    if stack.runtime == "cuda" and Version(version).major >= 13:
        return tuple(f"{name}=={version}.*" for name in _NVCC)
    raise ConfigurationError(
        f"no package index has a compiler for {stack.runtime} {version}",
        where=stack.id,
        next_step="set `builder` in matrix.yaml to an image that has one",
    )


def template_values(stack: Stack) -> Mapping[str, Any]:
    """What the templates ask for about the stages that compile."""
    found = extensions(stack)
    sources = [extension for extension in found if extension.form == "source"]
    compiled = any(extension.compiled for extension in sources)
    python = f"python{stack.python}"
    packages = ["g++", f"{python}-dev"] if compiled else []
    # A builder's image lacks the stack's Python; a stage that starts from the base lacks only a compiler.
    packages += [f"{python}-venv"] if stack.builder and sources else []
    from_index = compiled and stack.builder is None and stack.runtime == "cuda"
    site = f"/opt/venv/lib/{python}/site-packages"
    major = (stack.runtime_version or "").split(".", maxsplit=1)[0]
    return {
        "extensions": found,
        "toolchain": bool(sources),
        "toolchain_packages": " ".join(packages),
        "cuda_home": f"{site}/nvidia/cu{major}" if from_index else None,
        "releases": RELEASES,
    }


def _flash_attn(stack: Stack, flash: FlashAttention) -> Extension:
    assert flash.form != "index"  # it is installed from the index, not compiled
    build, because = _flash_attn_build(stack, flash)
    return Extension(
        name=FLASH_ATTN,
        version=flash.version,
        form=flash.form,
        because=because,
        env=build,
        wheel=official_wheel(stack, flash) if flash.form == "wheel" else None,
        needs=("einops",),
        compiled=flash.backend != "triton",
    )


def _flash_attn_build(stack: Stack, flash: FlashAttention) -> tuple[Mapping[str, str], str]:
    """Variables of the stage, and why."""
    if flash.form == "wheel":
        return {}, "An official wheel fits this torch, CUDA major, C++ ABI and Python; no index has it."
    force = {"FLASH_ATTENTION_FORCE_BUILD": "TRUE"}
    if stack.vendor == "nvidia":
        because = "No official wheel fits this torch, CUDA major, C++ ABI and Python: compiled."
        archs = {"FLASH_ATTN_CUDA_ARCHS": ";".join(arch.removeprefix("sm_") for arch in stack.archs)}
        return {**force, "BUILD_TARGET": "cuda", "NVCC_THREADS": "2", **archs, **_torch_archs(stack)}, because
    archs = {"GPU_ARCHS": ";".join(stack.archs), "PYTORCH_ROCM_ARCH": ";".join(stack.archs)}
    if flash.backend == "ck":
        because = "No wheel is published for any ROCm. GPU_ARCHS is `native` by default, and no GPU is here."
        return {**force, "BUILD_TARGET": "rocm", **archs}, because
    # The same variable is ENV of the image, or flash-attn would look for CK.
    triton = {"FLASH_ATTENTION_TRITON_AMD_ENABLE": "TRUE"}
    because = "The Triton backend is Python alone: no compiler and no ROCm is needed to make its wheel."
    return {**force, "BUILD_TARGET": "rocm", **triton, **archs}, because


def _torch_archs(stack: Stack) -> Mapping[str, str]:
    numbers = [arch.removeprefix("sm_") for arch in stack.archs]
    return {"TORCH_CUDA_ARCH_LIST": ";".join(f"{number[:-1]}.{number[-1]}" for number in numbers)}


def official_wheel(stack: Stack, flash: FlashAttention) -> str:
    """The wheel's name among the project's releases, as `get_wheel_url` of its setup.py builds it."""
    assert stack.torch
    assert stack.runtime_version
    cuda = stack.runtime_version.split(".", maxsplit=1)[0]
    # Releases up to 2.6.3 also name the minor version of CUDA 12 (`cu123`).
    cuda = f"{cuda}3" if cuda == "12" and Version(flash.version) < Version("2.7") else cuda
    torch = ".".join(stack.torch.split(".")[:2])
    python = f"cp{stack.python.replace('.', '')}"
    local = f"cu{cuda}torch{torch}cxx11abi{(stack.cxx11abi or '').upper()}"
    return f"flash_attn-{flash.version}+{local}-{python}-{python}-linux_x86_64.whl"


def _transformer_engine(stack: Stack, version: str) -> Extension:
    """PyTorch's side of Transformer Engine; its kernels come as a wheel of the index, one a CUDA major."""
    major = (stack.runtime_version or "").split(".", maxsplit=1)[0]
    core = (f"transformer-engine=={version}", f"transformer-engine-cu{major}=={version}")
    site = f"/opt/venv/lib/python{stack.python}/site-packages/nvidia"
    return Extension(
        name=TRANSFORMER_ENGINE,
        version=version,
        form="source",
        because="compiled against this torch; NVIDIA's wheels are for other ones.",
        env={
            "NVTE_PYTORCH_FORCE_BUILD": "TRUE",
            "NVTE_CUDA_ARCHS": ";".join(arch.removeprefix("sm_") for arch in stack.archs),
            **_torch_archs(stack),
            # Headers of the libraries that torch brings as packages of their own.
            "CPLUS_INCLUDE_PATH": f"{site}/cudnn/include:{site}/nccl/include",
        },
        # `install_requirements` of build_tools/pytorch.py.
        needs=(*core, "einops", "onnxscript", "onnx", "nvdlfw-inspect", "nvidia-cudnn-frontend>=1.29.0"),
    )


_MAKERS: Mapping[str, Callable[[Stack, str], Extension]] = {TRANSFORMER_ENGINE: _transformer_engine}
# What a block of the matrix may ask for under `extensions`, beside FlashAttention.
OPTIONAL = tuple(_MAKERS)
