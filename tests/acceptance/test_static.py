"""Device code in the image and from its compilers, checked without a device. In: the image.
Out: what is wrong.

Triton's matrix products use the right instructions, without spills and silent upcasts. Libraries and
FlashAttention have code for each architecture, and the vendor's compiler, if the image has one, makes it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from harness import about, installed, processes, skips, unloaded
from harness.asked import of_image
from harness.calls import InChild, RecordMetric
from harness.session import AcceptanceSession
from vendors import Device, software
from workloads import flash_compile

pytestmark = pytest.mark.static

# (arch, dtype) -> the right matrix instruction (ISA manuals of both vendors; as Triton 3.6 compiles it).
EXPECTED: Mapping[tuple[str, str], str] = {
    ("gfx90a", "bf16"): "v_mfma_f32_32x32x8bf16_1k",
    ("gfx90a", "fp16"): "v_mfma_f32_32x32x8f16",
    ("gfx942", "bf16"): "v_mfma_f32_32x32x8_bf16",
    ("gfx942", "fp16"): "v_mfma_f32_32x32x8_f16",
    ("gfx942", "fp8e4b8"): "v_mfma_f32_32x32x16_fp8_fp8",
    ("gfx950", "bf16"): "v_mfma_f32_32x32x16_bf16",
    ("gfx950", "fp16"): "v_mfma_f32_32x32x16_f16",
    ("gfx950", "fp8e4nv"): "v_mfma_f32_32x32x64_f8f6f4",
    ("sm_80", "bf16"): "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    ("sm_80", "fp16"): "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
    ("sm_89", "bf16"): "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    ("sm_89", "fp16"): "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
    ("sm_89", "fp8e4nv"): "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32",
    ("sm_90", "bf16"): "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16",
    ("sm_90", "fp16"): "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16",
    ("sm_90", "fp8e4nv"): "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3",
    ("sm_100", "bf16"): "tcgen05.mma.cta_group::1.kind::f16",
    ("sm_100", "fp16"): "tcgen05.mma.cta_group::1.kind::f16",
    ("sm_100", "fp8e4nv"): "tcgen05.mma.cta_group::1.kind::f8f6f4",
    ("sm_103", "bf16"): "tcgen05.mma.cta_group::1.kind::f16",
    ("sm_103", "fp16"): "tcgen05.mma.cta_group::1.kind::f16",
    ("sm_103", "fp8e4nv"): "tcgen05.mma.cta_group::1.kind::f8f6f4",
    ("sm_120", "bf16"): "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    ("sm_120", "fp16"): "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
    ("sm_120", "fp8e4nv"): "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32",
}
# The fp8 formats for which an arch has no matrix instruction: MI300 has FNUZ, all others have OCP.
FOREIGN_FP8 = (
    *(("gfx90a", "fp8e4nv"), ("gfx90a", "fp8e4b8"), ("gfx942", "fp8e4nv"), ("gfx950", "fp8e4b8")),
    *(("sm_80", "fp8e4nv"), ("sm_89", "fp8e4b8"), ("sm_90", "fp8e4b8")),
    *(("sm_100", "fp8e4b8"), ("sm_103", "fp8e4b8"), ("sm_120", "fp8e4b8")),
)
# Shared memory that one block may use (bytes): LDS of CDNA, shared memory per block of CUDA.
SHARED_BYTES = {
    "gfx90a": 64 << 10,
    "gfx942": 64 << 10,
    "gfx950": 160 << 10,
    "sm_80": 163 << 10,
    "sm_89": 99 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "sm_103": 227 << 10,
    "sm_120": 99 << 10,
}
BLOCK, TILES = 64, ((32, 4), (128, 8))  # the tile of most checks, by 4 warps, and others
# One kind of tcgen05 has both formats of 16 bits.
MATRIX_OF_BF16 = re.compile(r"bf16|^tcgen05\.mma\S*kind::f16")
COMPILE_TIMEOUT_S = 300
FP8_INSTRUCTIONS = ("fp8", "bf8", "f8f6f4", "e4m3", "e5m2")
Compile = Callable[..., Mapping[str, Any]]


@pytest.fixture
def compiled(acceptance: AcceptanceSession, archs: Sequence[str], in_child: InChild) -> Compile:
    """Compile in a child, with a cache of this run only.

    An image is judged for the architectures that it declares and for this machine's; without any, for all.
    Its Triton may be too old for others: test_triton_releases.py has each release from 3.2 on.
    """
    if not of_image(unloaded.is_installed, module="triton"):
        skips.without_package("triton", "Triton is not part of this stack")
    cache = {"TRITON_CACHE_DIR": str(processes.inside(acceptance.result_dir) / "triton")}

    def compile_(
        kernel: str, arch: str, dtype: str, *, block: int = BLOCK, warps: int = 4
    ) -> Mapping[str, Any]:
        if archs and arch not in archs:
            skips.without_arch(arch, f"this stack does not declare {arch}")
        backend = "amd" if arch.startswith("gfx") else "nvidia"
        if backend not in in_child("workloads.machine_code:backend_names", env=cache):
            skips.without_arch(arch, f"this Triton has no {backend} backend")
        found: Mapping[str, Any] = in_child(
            "workloads.machine_code:compiled",
            kernel=kernel,
            arch=arch,
            dtype=dtype,
            env=cache,
            block=block,
            warps=warps,
        )
        return found

    return compile_


@pytest.mark.parametrize(("arch", "dtype"), EXPECTED, ids=[f"{arch}-{dtype}" for arch, dtype in EXPECTED])
def test_matrix_instruction_is_the_expected_one(compiled: Compile, arch: str, dtype: str) -> None:
    """A matrix product compiles to the arch's matrix instruction of that type, and to no other."""
    found = compiled("matmul", arch, dtype)
    assert found["error"] is None, found["error"]
    expected = [EXPECTED[arch, dtype]]
    assert found["matrix"] == expected, f"matrix instructions {found['matrix']}, expected {expected}"


@pytest.mark.parametrize(
    ("arch", "dtype"), FOREIGN_FP8, ids=[f"{arch}-{dtype}" for arch, dtype in FOREIGN_FP8]
)
def test_foreign_fp8_is_refused_or_known_to_be_upcast(compiled: Compile, arch: str, dtype: str) -> None:
    """An fp8 format that the arch lacks is refused or computed in a wider type.
    It never becomes another fp8 format.
    """
    found = compiled("matmul", arch, dtype)
    refused = found["error"] is not None and "not supported" in found["error"]
    assert refused or found["error"] is None, found["error"]
    wrong = not refused and any(mark in name for name in found["matrix"] for mark in FP8_INSTRUCTIONS)
    assert not wrong, f"computed in another fp8 format: {found}"


@pytest.mark.parametrize("kernel", ["matmul", "softmax"])
@pytest.mark.parametrize("arch", SHARED_BYTES)
def test_registers_and_shared_memory_suffice(compiled: Compile, arch: str, kernel: str) -> None:
    """No register spills to memory, shared memory suffices, and global loads are 16 bytes wide."""
    found = compiled(kernel, arch, "bf16")
    assert found["error"] is None, found["error"]
    assert found["spills"] in (0, None), f"{found['spills']} registers or bytes spilled, expected none"
    limit = SHARED_BYTES[arch]
    assert found["shared_bytes"] <= limit, f"{found['shared_bytes']} bytes of shared memory, at most {limit}"
    assert found["wide_loads"] > 0, "no global load is 16 bytes wide"


@pytest.mark.parametrize("arch", SHARED_BYTES)
def test_other_tiles_of_declared_architectures(compiled: Compile, arch: str) -> None:
    """Smaller and larger tiles of a matrix product also use matrix instructions of their type.
    They do not spill, and fit in the shared memory of the architecture.
    """
    for block, warps in TILES:
        found = compiled("matmul", arch, "bf16", block=block, warps=warps)
        where = f"tile of {block} by {warps} warps"
        assert found["error"] is None, f"{where}: {found['error']}"
        other = [name for name in found["matrix"] if not MATRIX_OF_BF16.search(name)]
        assert found["matrix"], f"{where}: no matrix instruction"
        assert not other, f"{where}: matrix instructions {other}, expected only those of bf16"
        assert found["spills"] in (0, None), f"{where}: {found['spills']} registers or bytes spilled"
        limit = SHARED_BYTES[arch]
        assert found["shared_bytes"] <= limit, f"{where}: {found['shared_bytes']} bytes, at most {limit}"


def test_the_vendor_compiler_makes_code_for_every_architecture(
    acceptance: AcceptanceSession, archs: Sequence[str], record_metric: RecordMetric
) -> None:
    """hipcc or nvcc, if the image has it, compiles one line into machine code for each architecture."""
    stack = software.of(acceptance.vendor)
    program = of_image(about.compiler, vendor=acceptance.vendor)
    if stack.COMPILER is None or program is None:
        wanted = stack.COMPILER.program if stack.COMPILER else "compiler for devices"
        skips.without_package("compiler", f"this image has no {wanted}: training images carry no toolchain")
    tried = sorted({*archs, *stack.COMPILER.archs})
    told = {"vendor": acceptance.vendor, "program": program}
    problems = {arch: of_image(about.compile_problem, **told, arch=arch) for arch in tried}
    made = [arch for arch, problem in problems.items() if problem is None]
    record_metric(
        "architectures_compiled", len(made), unit="architectures", conditions={"archs": " ".join(made)}
    )
    failed = [problem for arch, problem in problems.items() if problem and arch in archs]
    assert not failed, "\n".join(failed)
    assert made, "\n".join(filter(None, problems.values()))


def test_kernel_libraries_hold_every_architecture(
    acceptance: AcceptanceSession, archs: Sequence[str], record_metric: RecordMetric
) -> None:
    """BLAS, convolution, collectives and torch are complete and have kernels for each architecture.

    Without them a library falls back to slow kernels or fails on the node.
    """
    found = of_image(about.kernel_libraries, vendor=acceptance.vendor, archs=list(archs))
    held, present, problems = found["held"], found["present"], found["problems"]
    if not held:
        skips.without_feature("gpu", f"vendor {acceptance.vendor} has no libraries with device code")
    record_metric(
        "kernel_libraries", len(present), unit="libraries", conditions={"names": ", ".join(present)}
    )
    assert present, f"this image has none of {', '.join(held)}"
    assert not problems, "\n".join(problems)


def test_flash_attention_holds_every_architecture(
    acceptance: AcceptanceSession, archs: Sequence[str]
) -> None:
    """The compiled extensions of FlashAttention have machine code for each architecture."""
    stack = software.of(acceptance.vendor)
    names = ["flash-attn", "flash-attn-*"]
    if not of_image(about.releases, patterns=names):
        assert not (of_image(installed.declaration) or {}).get("flash_attn"), (
            "the image declares flash_attn, but it is not installed"
        )
        skips.without_package("flash-attn", "FlashAttention is not part of this stack")
    compiled = of_image(about.compiled_files, vendor=acceptance.vendor, patterns=names)
    if not compiled:
        skips.without_package(
            "flash-attn extension", "this FlashAttention is Triton's backend: it has no compiled extension"
        )
    held = frozenset[str]().union(*compiled.values())
    missing = [arch for arch in archs if not stack.covers(arch, held)]
    assert not missing, f"no code for {missing} in {list(compiled)}, only for {sorted(held)}"


@pytest.mark.tier("standard")
@pytest.mark.long
def test_flash_attention_4_compiles_for_every_architecture(
    archs: Sequence[str], in_child: InChild, record_metric: RecordMetric
) -> None:
    """FlashAttention 4 turns its attention into code for each architecture, forward and backward.

    It is Python, and compiles a kernel when it is first called: an image that cannot fails in the first step
    of a job. Nothing here needs a GPU.
    """
    if not of_image(about.releases, patterns=["flash-attn-4"]):
        skips.without_package("flash-attn-4", "FlashAttention 4 is not part of this stack")
    for arch in archs:
        env = flash_compile.environment(arch)
        seconds = in_child(flash_compile.compile_kernels, timeout_s=600, env=env, fresh=True)
        record_metric("flash_attention_4_compile_s", seconds, unit="s", conditions={"arch": arch})


@pytest.fixture
def archs(acceptance: AcceptanceSession, devices: tuple[Device, ...]) -> list[str]:
    """The architectures that the image declares, and those of this machine."""
    found = installed.architectures(acceptance.vendor, devices, of_image(installed.declaration))
    if not found and acceptance.vendor != "cpu":
        pytest.fail(
            "the image declares no architecture, and this machine has no device to take one from",
            pytrace=False,
        )
    return found
