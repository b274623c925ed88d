"""Drawn collectives find planted faults, each alone and in the suite, and end what hangs by its name."""

import json

import pytest

import planting
from planting import TESTS, Fault

CASES, LEAST_FOUND = 120, 9  # cases of seed 0; of 20 faults
PROGRAM = TESTS / "acceptance" / "workloads" / "generated_collectives.py"
CHECK = "test_collectives.py::test_generated_collectives"
FEW = {"harness.launch:launch": "lambda program, words, **k: original(program, "
       "[*words[:2], '--least', '60', '--most', '60'], **k)"}  # fmt: skip
FAULTS = (
    Fault(
        "a tail beyond 1024 elements is not reduced",
        CHECK,
        says='--case \'{"calls": [{"op": "all_reduce", "count": 1025,',
        patches=FEW | {
            "torch.distributed:all_reduce": "lambda t, *a, **k: (lambda old: (original(t, *a, **k | "
            "{'async_op': False}), t.view(-1)[1024:].copy_(old), None)[2])"
            "(t.view(-1)[1024:].clone())"
        },
    ),
    Fault(
        "rank 1 never enters a drawn broadcast",
        CHECK,
        says="did not end: case ",
        patches=FEW | {
            "workloads.time_limits:scaled": "lambda limit_s: 3.0 if limit_s == 30.0 else original(limit_s)",
            "torch.distributed:broadcast": "lambda t, *a, **k: "
            "(__import__('time').sleep(300) if get_rank() == 1 else None, original(t, *a, **k))[1]",
        },
    ),
    Fault(
        "every drawn scatter is refused",
        CHECK,
        says="could be judged",
        another=True,
        patches=FEW | {
            "torch.distributed:scatter": "lambda *a, **k: exec('raise RuntimeError(\\'unsupported\\')')"
        },
    ),
    Fault(
        "a drawn scatter breaks",
        CHECK,
        says="raised RuntimeError: a broken link",
        another=True,
        patches=FEW | {
            "torch.distributed:scatter": "lambda *a, **k: exec('raise RuntimeError(\\'a broken link\\')')"
        },
    ),
)  # fmt: skip


@pytest.mark.parametrize(
    "planted",
    [pytest.param(one, marks=pytest.mark.waits if "never" in one.name else ()) for one in FAULTS],
    ids=str,
)
def test_planted_fault_is_caught(planted, plant):
    plant(planted)


# `FAULTS` has one of wrong data and one that hangs for the usual half.
@pytest.mark.slow
def test_drawn_faults_are_found_and_nothing_else(suite_python, request, tmp_path):
    """Named shapes each, and of faults that nobody chose a share; all in one launch of two ranks."""
    asked = ("--faults", "20", "--fault-seed", "311027", "--cases", str(CASES))
    assert suite_python
    report = planting.program("drawn_collective_faults.py", *asked, ranks=2, stacks=tmp_path)
    assert report["hung"] is None
    assert not report["healthy"], "drawn cases fail without a fault"
    for name in report["named"]:
        entry = {"name": name, "check": CHECK, "vendor": "cpu", "expected": "failed"}
        planting.tell(request.node, {**entry, "caught": report["faults"][name]["case"] is not None})
    assert not [name for name in report["named"] if report["faults"][name]["case"] is None], "not found"
    found = [name for name, told in report["faults"].items() if told["case"] and name not in report["named"]]
    assert len(found) >= LEAST_FOUND, found


@pytest.mark.parametrize("group", [[[1]], [[1, 0]]], ids=str)
def test_a_refusal_is_one_if_each_rank_that_takes_part_refuses(suite_python, tmp_path, group):
    """Gloo gathers no complex numbers. A rank that takes no part has nothing to refuse, and hangs nobody."""
    call = {"op": "gather", "dtype": "c128", "count": 10}
    asked = ("--case", json.dumps({"calls": [call], "groups": [["new", group]]}))
    assert suite_python
    report = planting.program(str(PROGRAM), *asked, ranks=2, stacks=tmp_path)
    assert (report["hung"], report["failed"], report["drawn"], report["judged"]) == (None, [], 1, 0)
    assert report["refused"] == ["gather sum c128"]
