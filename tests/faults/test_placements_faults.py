"""Drawn placements find planted faults of torch, each alone and in the suite; a hang is named."""

import pytest

import planting
from planting import Fault

CHECK = "test_placements.py::test_generated_placements"
FEW = {"harness.launch:launch": "lambda program, words, **k: original(program, "
       "[*words[:2], '--least', '40', '--most', '40'], **k)"}  # fmt: skip
PARTIAL = "torch.distributed.tensor.placement_types:Partial._reduce_value"
FAULTS = (
    Fault(
        "a part is taken for the sum",
        CHECK,
        patches=FEW | {PARTIAL: "lambda self, tensor, *a: tensor.clone()"},
        says="ranks have other bits of the whole result",
        tier="soak",
    ),
    Fault(
        "a rank never joins the sum of parts",
        CHECK,
        patches={
            "harness.launch:launch": FEW["harness.launch:launch"].replace("'40'", "'8'"),
            "workloads.time_limits:scaled": "lambda limit_s: 2.0 if limit_s == 8.0 else "
            "original(limit_s)",
            PARTIAL: "lambda self, tensor, *a: (__import__('time').sleep(30) if "
            "__import__('os').environ['RANK'] == '1' else None, original(self, tensor, *a))[1]",
        },
        says="ranks wait for each other",
        tier="soak",
    ),
)  # fmt: skip


@pytest.mark.parametrize(
    "planted",
    [pytest.param(one, marks=pytest.mark.waits if "never" in one.name else ()) for one in FAULTS],
    ids=str,
)
def test_planted_fault_is_caught(planted, plant):
    plant(planted)


def test_named_shapes_are_found(suite_python, request, tmp_path):
    """What tensors must not lose on their way, in one launch of two ranks."""
    assert suite_python
    report = planting.program("drawn_placement_faults.py", ranks=2, stacks=tmp_path)
    assert report["hung"] is None
    assert not report["healthy"], "drawn cases fail without a fault"
    for name in report["named"]:
        entry = {"name": name, "check": CHECK, "vendor": "cpu", "expected": "failed"}
        planting.tell(request.node, {**entry, "caught": report["faults"][name]["case"] is not None})
    assert not [name for name in report["named"] if report["faults"][name]["case"] is None], "not found"


@pytest.mark.slow
def test_healthy_placements_pass(plant):
    plant(Fault("nothing", CHECK, outcome="passed", tier="soak"))
