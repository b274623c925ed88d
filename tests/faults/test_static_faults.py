"""Faults of a compiler: an fp8 product silently computed in fp16, spills, narrow loads, too much shared
memory.
"""

# ruff: noqa: E501 - a table of faults reads in rows
import pytest

from planting import SUITE_PYTHON, Fault

S = "test_static.py::"
REPORT = "{'error': None, 'matrix': [%r], 'spills': %d, 'shared_bytes': %d, 'wide_loads': %d, 'warnings': []}"


def fault(
    name: str, check: str, says: str, *, matrix: str = "x", spills: int = 0, shared: int = 8, loads: int = 4
) -> Fault:
    """The compiler's report is replaced in the worker; a stub stands for Triton where it is not installed."""
    report = REPORT % (matrix, spills, shared, loads)
    stub = (
        f"def backend_names(): return ['amd', 'nvidia']\ndef compiled(kernel, arch, dtype): return {report}\n"
    )
    compile_in_stub = "lambda self, function, *a, **k: original(self, function.replace('workloads.machine_code', 'stub'), *a, **k)"
    return Fault(
        name,
        S + check,
        says=says,
        files={"stub.py": stub, "triton.py": ""},
        patches={"harness.worker:Worker.call": compile_in_stub},
    )


FAULTS = (
    fault("silent upcast", "test_matrix_instruction_is_the_expected_one[gfx942-fp8e4b8]", "f16", matrix="v_mfma_f32_32x32x8_f16"),
    fault("wrong fp8 format", "test_foreign_fp8_is_refused_or_known_to_be_upcast[gfx942-fp8e4nv]", "fp8_fp8",
          matrix="v_mfma_f32_32x32x16_fp8_fp8"),
    fault("spills", "test_registers_and_shared_memory_suffice[gfx90a-matmul]", "405 spilled", spills=405),
    fault("shared memory", "test_registers_and_shared_memory_suffice[gfx942-matmul]", "65536", shared=160 << 10),
    fault("narrow loads", "test_registers_and_shared_memory_suffice[sm_90-softmax]", "0 > 0", loads=0),
)  # fmt: skip


@pytest.mark.parametrize("planted", FAULTS, ids=str)
def test_fault_of_the_compiler_is_caught(planted, plant) -> None:
    assert SUITE_PYTHON
    plant(planted)
