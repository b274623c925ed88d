"""Faults of device code: silent fp16, spills, narrow loads, too much shared memory, code for another GPU only."""

# ruff: noqa: E501 - a table of faults reads in rows
import base64
import os
import sys
from pathlib import Path

import pytest

import device_code
from planting import SUITE_PYTHON, Fault
from test_image_faults import declaration

S = "test_static.py::"
REPORT = "{'error': None, 'matrix': [%r], 'spills': %d, 'shared_bytes': %d, 'wide_loads': %d, 'warnings': []}"


def fault(
    name: str, check: str, says: str, *, matrix: str = "x", spills: int = 0, shared: int = 8, loads: int = 4
) -> Fault:
    """Replace the compiler's report in the worker; Triton counts as installed."""
    report = REPORT % (matrix, spills, shared, loads)
    stub = f"def backend_names(): return ['amd', 'nvidia']\ndef compiled(kernel, arch, dtype, **tile): return {report}\n"
    compile_in_stub = "lambda self, function, *a, **k: original(self, function.replace('workloads.machine_code', 'stub'), *a, **k)"
    return Fault(
        name,
        S + check,
        says=says,
        files={"stub.py": stub},
        patches={
            "harness.worker:Worker.call": compile_in_stub,
            "harness.unloaded:is_installed": "lambda module: module == 'triton' or original(module)",
        },
    )


FAULTS = (
    fault("silent upcast", "test_matrix_instruction_is_the_expected_one[gfx942-fp8e4b8]", "f16", matrix="v_mfma_f32_32x32x8_f16"),
    fault("fp8 in fp16 of a new GPU", "test_matrix_instruction_is_the_expected_one[sm_120-fp8e4nv]", "f32.f16.f16",
          matrix="mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"),
    fault("wrong fp8 format", "test_foreign_fp8_is_refused_or_known_to_be_upcast[gfx942-fp8e4nv]", "fp8_fp8", matrix="v_mfma_f32_32x32x16_fp8_fp8"),
    fault("spills", "test_registers_and_shared_memory_suffice[gfx90a-matmul]", "405 registers or bytes spilled", spills=405),
    fault("shared memory", "test_registers_and_shared_memory_suffice[gfx942-matmul]", "65536", shared=160 << 10),
    fault("a large tile that spills", "test_other_tiles_of_declared_architectures[gfx942]", "tile of 32 by 4 warps: 20", matrix="v_mfma_f32_32x32x8_bf16", spills=20),
    fault("a tile without matrix units", "test_other_tiles_of_declared_architectures[sm_90]", "expected only those of bf16",
          matrix="mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"),
    fault("narrow loads", "test_registers_and_shared_memory_suffice[sm_90-softmax]", "0 > 0", loads=0),
)  # fmt: skip


@pytest.mark.parametrize("planted", FAULTS, ids=str)
def test_fault_of_the_compiler_is_caught(planted, plant):
    assert SUITE_PYTHON
    plant(planted)


REFUSAL = "def backend_names(): return ['amd', 'nvidia']\ndef compiled(kernel, arch, dtype, **tile): return {'error': 'unknown GPU'}\n"


@pytest.mark.parametrize(
    "planted", {fault.check.partition("[")[0]: fault for fault in FAULTS}.values(), ids=str
)
def test_fault_for_a_gpu_that_the_stack_does_not_declare_is_not_the_stacks(planted, plant, tmp_path):
    skipped = {"vendor": "nvidia", "outcome": "skipped", "says": "does not declare"}
    plant(Fault(**{**vars(planted), **skipped, "env": declared(tmp_path, "nvidia", "sm_75")}))


@pytest.mark.parametrize(("declared_archs", "outcome"), [(["sm_100"], "failed"), (["sm_80"], "skipped")])
def test_triton_that_does_not_know_a_gpu_of_the_stack_is_caught(plant, tmp_path, declared_archs, outcome):
    says = "unknown GPU" if outcome == "failed" else "does not declare sm_100"
    planted = fault("an old Triton", "test_matrix_instruction_is_the_expected_one[sm_100-fp8e4nv]", says)
    env = declared(tmp_path, "nvidia", *declared_archs)
    files = {**planted.files, "stub.py": REFUSAL}
    plant(Fault(**{**vars(planted), "files": files, "vendor": "nvidia", "env": env, "outcome": outcome}))


COMPILES = S + "test_the_vendor_compiler_makes_code_for_every_architecture"
LIBRARIES = S + "test_kernel_libraries_hold_every_architecture"
FLASH = S + "test_flash_attention_holds_every_architecture"
FLASH_4 = S + "test_flash_attention_4_compiles_for_every_architecture"


def declared(folder: Path, vendor: str, *archs: str, **changes: object) -> dict[str, str]:
    """The environment of an image that declares these architectures."""
    path = folder / "stack.json"
    path.write_text(declaration(vendor=vendor, archs=archs, **changes), encoding="utf-8")
    return {"STACKCHECK_STACK_FILE": str(path)}


def compiler(folder: Path, name: str, output: bytes, *, code: int = 0) -> dict[str, str]:
    """A compiler that always writes the same output."""
    folder.mkdir()
    text = (
        f"#!{sys.executable}\nimport base64, sys\n"
        f"open(sys.argv[sys.argv.index('-o') + 1], 'wb').write(base64.b64decode({base64.b64encode(output)!r}))\n"
        f"sys.stderr.write('error: cannot find ROCm device library\\n' * {code})\nsys.exit({code})\n"
    )
    (folder / name).write_text(text, encoding="utf-8")
    (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.mark.parametrize(
    ("archs", "code", "says"),
    [
        (["gfx90a"], 0, "gfx942: "),
        ([], 0, "made code for []"),
        (["gfx942"], 1, "cannot find ROCm device library"),
        (["gfx942"], 0, None),
    ],
)
def test_compiler_that_makes_no_code_for_an_architecture_is_caught(plant, tmp_path, archs, code, says):
    made = compiler(tmp_path / "bin", "hipcc", device_code.bundle(archs), code=code)
    env = {**made, **declared(tmp_path, "amd", "gfx942")}
    plant(Fault("a compiler", COMPILES, "failed" if says else "passed", says or "", vendor="amd", env=env))


def test_nvcc_that_makes_only_ptx_is_caught(plant, tmp_path):
    output = device_code.fatbin([], ptx=["sm_90"])
    env = {**compiler(tmp_path / "bin", "nvcc", output), **declared(tmp_path, "nvidia", "sm_90")}
    plant(Fault("no machine code", COMPILES, says="made code for []", vendor="nvidia", env=env))


def test_absent_compiler_is_said(plant, tmp_path):
    (tmp_path / "bin").mkdir()
    env = {"PATH": str(tmp_path / "bin"), **declared(tmp_path, "amd", "gfx942")}
    plant(Fault("no hipcc", COMPILES, "skipped", "this image has no hipcc", vendor="amd", env=env))


def write(folder: Path, files: dict[str, bytes | None]) -> Path:
    for name, data in files.items():
        if data is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
    return folder


def rocm(folder: Path, **changes: object) -> Path:
    """The libraries of a ROCm image for gfx90a and gfx942; a change to None removes a file."""
    both = device_code.amd_library(["gfx90a", "gfx942"])
    files = {
        "librccl.so.1": both,
        "librocblas.so.4": both,
        "libhipblaslt.so.0": b"",
        "libMIOpen.so.1": b"",
        "libtorch_hip.so": both,
        **{f"rocblas/library/Kernels.so-000-{arch}.hsaco": b"" for arch in ("gfx90a", "gfx942")},
        **{f"hipblaslt/library/TensileLibrary_{arch}.co": b"" for arch in ("gfx90a", "gfx942")},
        **{f"../share/miopen/db/{arch}.db.txt": b"" for arch in ("gfx90a68", "gfx942130")},
    }
    return write(folder / "lib", {**files, **changes})


def cuda(folder: Path, **changes: object) -> Path:
    """The libraries of a CUDA image for sm_80 and sm_90."""
    both = device_code.nvidia_library(["sm_80", "sm_90"])
    parts = ("adv", "cnn", "engines_precompiled", "engines_runtime_compiled", "graph", "heuristic", "ops")
    names = ("nccl", "cublas", "cublasLt", "cudnn_adv", "cudnn_ops", "torch_cuda")
    files = {
        **{f"libcudnn_{part}.so.9": device_code.elf({}) for part in parts},
        "libcudnn.so.9": device_code.elf({}),
        **{f"lib{name}.so.9": both for name in names},
    }
    return write(folder / "lib", {**files, **changes})


AMD, NVIDIA = ("gfx90a", "gfx942"), ("sm_80", "sm_90")


def split(*archs: str) -> dict[str, bytes]:
    """RCCL without code, and its archives for these architectures."""
    name = "lib/librccl.so.1"
    archives = {f"../.kpack/blas_{arch}.kpack": device_code.kpack(arch, [name]) for arch in archs}
    return {"librccl.so.1": device_code.split_library(name), **archives}


@pytest.mark.parametrize(
    ("make", "changes", "says"),
    [
        (rocm, {"librccl.so.1": device_code.amd_library(["gfx90a", "gfx950"])}, "librccl.so.1: no code for gfx942"),
        (rocm, {"rocblas/library/Kernels.so-000-gfx942.hsaco": None}, "librocblas.so.4: no kernel files for gfx942"),
        (rocm, {"hipblaslt/library/TensileLibrary_gfx90a.co": None}, "libhipblaslt.so.0: no kernel files for gfx90a"),
        (rocm, {"../share/miopen/db/gfx942130.db.txt": None}, "libMIOpen.so.1: no kernel files for gfx942"),
        (rocm, {"libhipblaslt.so.0": None}, "hipBLASLt: libhipblaslt.so is not in this image"),
        (rocm, {"libtorch_hip.so": device_code.elf({})}, "libtorch_hip.so: it holds no device code"),
        (rocm, {"librccl.so.1": device_code.split_library("lib/librccl.so.1")}, "librccl.so.1: it holds no device code, and no file"),
        (rocm, split("gfx90a"), "librccl.so.1: no code for gfx942; it has gfx90a"),
        (rocm, split("gfx90a", "gfx942"), None),
        (cuda, {"libcudnn_heuristic.so.9": None}, "libcudnn_heuristic.so is not beside it"),
        (cuda, {"libcudnn_ops.so.9": device_code.nvidia_library(["sm_75", "sm_90"])}, "libcudnn_ops.so.9: no code for sm_80"),
        (cuda, {"libcublasLt.so.9": device_code.nvidia_library(["sm_80"])}, "libcublasLt.so.9: no code for sm_90"),
        (cuda, {"libnccl.so.9": None}, "NCCL: libnccl.so is not in this image"),
        (cuda, {}, None),
        (rocm, {}, None),
    ],
)  # fmt: skip
def test_library_without_kernels_for_an_architecture_is_caught(plant, tmp_path, make, changes, says):
    vendor, archs = ("amd", AMD) if make is rocm else ("nvidia", NVIDIA)
    folder = make(tmp_path, **changes)
    env = declared(tmp_path, vendor, *archs, packages={"torch": "2.15.0"})
    found = {f"vendors.{vendor}_software:FOLDERS": repr((str(folder),))}
    outcome = "failed" if says else "passed"
    plant(Fault("a library", LIBRARIES, outcome, says or "", vendor=vendor, env=env, patches=found))


@pytest.mark.parametrize(
    ("held", "outcome", "says"),
    [(["sm_80", "sm_120"], "failed", "no code for ['sm_90']"), (["sm_80", "sm_90"], "passed", "")],
)
def test_flash_attention_without_an_architecture_is_caught(plant, tmp_path, held, outcome, says):
    info = tmp_path / "site" / "flash_attn-2.8.3.dist-info"
    info.mkdir(parents=True)
    name = "flash_attn_2_cuda.cpython-312-x86_64-linux-gnu.so"
    (info.parent / name).write_bytes(device_code.nvidia_library(held))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash_attn\nVersion: 2.8.3\n")
    (info / "RECORD").write_text(f"{name},,\n")
    env = declared(tmp_path, "nvidia", "sm_80", "sm_90", flash_attn={"version": "2.8.3"})
    plant(Fault("FlashAttention", FLASH, outcome, says, vendor="nvidia", env=env, paths=(str(info.parent),)))


def test_declared_flash_attention_that_is_not_there_is_caught(plant, tmp_path):
    env = declared(tmp_path, "nvidia", "sm_80", flash_attn={"version": "2.8.3"})
    plant(
        Fault(
            "no FlashAttention",
            FLASH,
            says="declares flash_attn, but it is not installed",
            vendor="nvidia",
            env=env,
        )
    )


# FlashAttention 4 as far as its check calls it: shapes alone, and no code for the architectures that are named.
FLASH_4_CALLS = """
import os, torch

def _flash_attn_fwd(q, k, v, *, causal, return_lse):
    if os.environ["CUTE_DSL_ARCH"] in {without}:
        raise RuntimeError("no code for " + os.environ["CUTE_DSL_ARCH"])
    return torch.empty_like(q), None

def _flash_attn_bwd(q, k, v, out, gradient, lse, *, causal):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
"""


@pytest.mark.parametrize(
    ("without", "outcome", "says"),
    [
        ("('sm_100a',)", "failed", "no code for sm_100a"),
        pytest.param("()", "passed", "", marks=pytest.mark.slow),
    ],
)
def test_flash_attention_4_that_cannot_compile_for_an_architecture_is_caught(
    plant, tmp_path, without, outcome, says
):
    site = tmp_path / "site"
    for folder in ("flash_attn/cute", "flash_attn_4-4.0.0b36.dist-info"):
        (site / folder).mkdir(parents=True)
    (site / "flash_attn/cute/__init__.py").write_text("")
    (site / "flash_attn/cute/interface.py").write_text(FLASH_4_CALLS.format(without=without))
    (site / "flash_attn_4-4.0.0b36.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: flash-attn-4\nVersion: 4.0.0b36\n"
    )
    env = declared(tmp_path, "nvidia", "sm_90", "sm_100", packages={"flash-attn-4": "4.0.0b36"})
    plant(Fault("FlashAttention 4", FLASH_4, outcome, says, vendor="nvidia", env=env, paths=(str(site),)))


def test_image_that_names_no_architecture_is_caught(plant, tmp_path):
    env = declared(tmp_path, "nvidia")
    plant(Fault("no architecture", LIBRARIES, says="declares no architecture", vendor="nvidia", env=env))
