"""The faults of `benchmarks/library_faults/shim.c`, over stand-ins of cuBLAS and MKL. In: gcc."""

import dataclasses
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks/library_faults"
SHIM = FOLDER / "shim.c"
sys.path.append(str(FOLDER))
planned, smallest = importlib.import_module("planned"), importlib.import_module("smallest")
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
def built(tmp_path_factory) -> Path:
    if not shutil.which("gcc"):
        pytest.skip("no gcc")
    folder = tmp_path_factory.mktemp("built")
    for name in ("libcublas.so.99", "libcuda.so.1"):
        subprocess.run([*GCC, STAND_INS, "-o", folder / name], check=True)
    subprocess.run([*GCC, SHIM, "-o", folder / "shim.so", "-ldl"], check=True)
    return folder


def changed(folder: Path, **fault: str | int) -> list[list[int]]:
    """The bits that differ from a healthy product, by call; -1 for each call that failed."""
    table = folder / "table"
    planned.written(table, planned.Setting(**fault))
    environment = {
        **os.environ,
        "FAULT_TABLE": str(table),
        "FAULT_KERNEL": "k",
        "LD_PRELOAD": str(folder / "shim.so"),
        "LD_LIBRARY_PATH": str(folder),
    }
    command = [sys.executable, "-c", PROGRAM, str(folder / "libcublas.so.99"), str(CALLS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    calls = json.loads(done.stdout)
    assert not any(value for _, _, beside in calls for value in beside), "a write outside of the matrix"
    found = [[-1] if answer else [value ^ 0x3F80 for value in values] for answer, values, _ in calls]
    if fault.get("library") != "collectives" and fault.get("kind") in ("flip", "last", "fail"):
        assert planned.counted(table) == {
            "products": CALLS,
            "collectives": 0,
            "halves": 0,
            "changed": sum(any(call) for call in found),
        }
    return found


@pytest.mark.parametrize("bit", range(1, 8))
def test_a_flip_is_one_bit_of_one_element_of_each_product(bit, built):
    found = changed(built, kind="flip", size=bit)
    assert all(sorted(call)[-2:] == [0, 1 << (7 - bit)] for call in found)
    assert len({call.index(1 << (7 - bit)) for call in found}) > 1, "always the same element"


def test_one_call_in_so_many(built):
    found = changed(built, kind="flip", step=1, every=5)
    assert [number for number, call in enumerate(found, 1) if any(call)] == [5, 10, 15, 20]
    assert found[4] == [1 << 6] * 32


def test_the_last_element_is_lost_and_calls_fail(built):
    assert changed(built, kind="last") == [[0] * 31 + [0x3F80]] * CALLS
    assert changed(built, kind="fail", every=10) == [
        [-1] if n % 10 == 0 else [0] * 32 for n in range(1, CALLS + 1)
    ]


def test_nothing_changes_without_a_fault_or_with_one_in_the_other_library(built):
    healthy = [[0] * 32] * CALLS
    assert changed(built) == changed(built, library="collectives", kind="flip") == healthy
    assert changed(built, kind="slow", size=2) == changed(built, kind="short", size=3) == healthy


@given(
    st.dictionaries(
        st.sampled_from(
            ["test_a.py::one", "test_a.py::two", "test_training.py::one", "test_training.py::two"]
        ),
        st.tuples(st.integers(0, len(smallest.ELEMENTS)), st.integers(0, len(smallest.KEPT)), st.booleans()),
        min_size=1,
    ),
    st.booleans(),
)
def test_the_search_finds_what_each_check_sees_in_the_fewest_rounds(able, costly):
    """Each check has the smallest size that it sees on each ladder, and sees rare faults or not."""
    sizes = smallest.COARSE if costly else smallest.ELEMENTS
    ladders = (list(sizes.values()), list(smallest.KEPT.values()))
    seeds, libraries = [], []

    def run(checks: list[str], settings: dict[str, planned.Setting]) -> tuple[dict, dict]:
        seeds.append({setting.seed for setting in settings.values()})
        outcomes = {check: "failed" if sees(check, settings[check]) else "passed" for check in checks}
        return outcomes, {check: {setting.library: 1} for check, setting in settings.items()}

    def sees(check: str, setting: planned.Setting) -> bool:
        libraries.append(setting.library)
        fault = dataclasses.replace(setting, seed=0, library="products")
        for ladder, least in zip(ladders, able[check], strict=False):
            if fault in ladder and fault.every == 1:
                return ladder.index(fault) >= least
        return able[check][2]

    outcomes = dict.fromkeys(able, "passed") | {"test_b.py::none": "passed", "test_b.py::red": "failed"}
    counts = {check: {"halves": 3, "products": 2} for check in [*able, "test_b.py::red"]}
    seconds = dict.fromkeys(able, 60.0 if costly else 1.0)
    halves, products = (smallest.units(name, outcomes, counts, seconds) for name in ("halves", "products"))
    rounds = sum(1 for _ in smallest.search([*halves, *products], run))
    told = {check: of for unit in halves for check, of in unit.found.items()}
    assert told == {check: of for unit in products for check, of in unit.found.items()}
    assert set(libraries) == {"halves", "products"}
    assert told.keys() == able.keys(), "a check that calls nothing says nothing"
    for check, (element, kept, rare) in able.items():
        assert told[check]["elements"] == [*sizes, None][min(element, len(sizes))]
        assert told[check]["last"] == [int(rare), 1]
        if costly:
            runs, from_, then = smallest.COSTLY_RUNS, "1/1000", not rare
        else:
            assert told[check]["kept"] == [*smallest.KEPT, None][kept]
            runs, from_, then = smallest.RUNS, "1/10", rare
        constant = str(told[check]["elements"]).endswith("of one")
        assert told[check].get(from_) == ([runs * rare, runs] if constant else None)
        assert ("1/100" in told[check]) == (constant and then)
    assert seeds == [{number} for number in range(1, rounds + 1)]
    assert rounds <= 2 * (2 * 2 * 5 + 2 + 3 * smallest.RUNS)


@pytest.mark.parametrize(("outcome", "calls"), [("invalid", 1), ("passed", 0)])
def test_a_check_without_a_verdict_or_a_call_ends_its_search(outcome, calls):
    (unit,) = smallest.units(
        "products", {"test_a.py::one": "passed"}, {"test_a.py::one": {"products": 1}}, {}
    )
    told = {"test_a.py::one": outcome}, {"test_a.py::one": {"products": calls}}
    list(smallest.search([unit], lambda *_: told))
    assert unit.found == {"test_a.py::one": {}}


def test_the_table_has_what_is_known_and_the_chance_of_seven_nights():
    known = {"elements": "bit 9 of one", "kept": None, "last": [0, 1], "1/10": [1, 4]}
    alone = smallest.Unit("products", 3, 1.0, {"test_a.py::one": known})
    shared = smallest.Unit("halves", 8, 1.0, {"test_b.py::two": known, "test_b.py::none": {"elements": None}})
    row = "| 3 | bit 9 of one | none |  | 0 of 1 |  | 1 of 4, 0.87 |  |  |"
    assert list(smallest.table([alone, shared]))[2:] == [
        f"| products | `test_a.py::one` {row}",
        f"| halves | `test_b.py::two` {row.replace('3', '8', 1)}",
    ]
