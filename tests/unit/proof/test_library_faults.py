"""The faults of `benchmarks/library_faults/shim.c`, over a stand-in of cuBLAS. In: gcc."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SHIM = Path(__file__).resolve().parents[3] / "benchmarks/library_faults/shim.c"
GCC = ("gcc", "-shared", "-fPIC", "-O1", "-pthread", "-Wall", "-Wextra", "-Werror")
STAND_INS = Path(__file__).resolve().parents[1] / "assets/products.c"
CALLS = 20
PROGRAM = """
import ctypes, json, sys
ctypes.CDLL(sys.argv[1])
call = ctypes.CDLL(None).cublasGemmEx
found = []
for _ in range(int(sys.argv[2])):
    out = (ctypes.c_uint16 * 40)()
    beta, none = ctypes.byref(ctypes.c_float(0)), ctypes.c_void_p()
    answer = call(none, 0, 0, 8, 4, 8, none, none, 14, 8, none, 14, 8, beta, out, 14, 10, 68, 0)
    columns = [out[10 * j : 10 * j + 10] for j in range(4)]
    found.append([answer, [v for c in columns for v in c[:8]], [v for c in columns for v in c[8:]]])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("gcc"):
        pytest.skip("no gcc")
    folder = tmp_path_factory.mktemp("built")
    for name in ("libcublas.so.99", "libcuda.so.1"):
        subprocess.run([*GCC, STAND_INS, "-o", folder / name], check=True)
    subprocess.run([*GCC, SHIM, "-o", folder / "shim.so", "-ldl"], check=True)
    return folder


def changed(folder: Path, **fault: str) -> list[list[int]]:
    """The bits that differ from a healthy product, by call; -1 for each call that failed."""
    variables = {f"FAULT_{name}": value for name, value in {"IN": "products", "KERNEL": "k", **fault}.items()}
    environment = {
        **os.environ,
        **variables,
        "LD_PRELOAD": str(folder / "shim.so"),
        "LD_LIBRARY_PATH": str(folder),
    }
    command = [sys.executable, "-c", PROGRAM, str(folder / "libcublas.so.99"), str(CALLS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    calls = json.loads(done.stdout)
    assert not any(value for _, _, beside in calls for value in beside), "a write outside of the matrix"
    return [[-1] if answer else [value ^ 0x3F80 for value in values] for answer, values, _ in calls]


@pytest.mark.parametrize("bit", range(1, 8))
def test_a_flip_is_one_bit_of_one_element_of_each_product(bit: int, built: Path) -> None:
    found = changed(built, KIND="flip", BIT=str(bit), ELEMENTS="1")
    assert all(sorted(call)[-2:] == [0, 1 << (7 - bit)] for call in found)
    assert len({call.index(1 << (7 - bit)) for call in found}) > 1, "always the same element"


def test_one_call_in_so_many(built: Path) -> None:
    found = changed(built, KIND="flip", BIT="1", ELEMENTS="0", EVERY="5")
    assert [number for number, call in enumerate(found, 1) if any(call)] == [5, 10, 15, 20]
    assert found[4] == [1 << 6] * 32


def test_the_last_element_is_lost_and_calls_fail(built: Path) -> None:
    assert changed(built, KIND="last") == [[0] * 31 + [0x3F80]] * CALLS
    assert changed(built, KIND="fail", EVERY="10") == [
        [-1] if n % 10 == 0 else [0] * 32 for n in range(1, CALLS + 1)
    ]


def test_nothing_changes_without_a_fault_or_with_one_in_the_other_library(built: Path) -> None:
    healthy = [[0] * 32] * CALLS
    assert changed(built) == changed(built, IN="collectives", KIND="flip") == healthy
    assert changed(built, KIND="slow") == changed(built, KIND="short", BIT="3") == healthy
