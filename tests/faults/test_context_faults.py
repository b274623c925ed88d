"""Attention over shards of a sequence: planted faults of its ring are found, each by the suite."""

import sys
from dataclasses import replace

import pytest

from planting import TESTS, Fault

pytest.importorskip("torch", reason="the suites need torch")
sys.path.insert(0, str(TESTS / "acceptance"))

import torch
from torch.nn import functional

from workloads import generated_context

CHECK = "test_placements.py::test_generated_context_parallel"
RING = "torch.distributed.tensor.experimental._context_parallel._attention"
FEW = {
    "harness.launch:launch": "lambda program, words, **k: original(program, "
    "[*words[:2], '--least', '24', '--most', '24'], **k)"
}


def fault(name: str, place: str, change: str) -> Fault:
    """A fault of torch's ring, in a run of a few cases."""
    return Fault(name, CHECK, patches=FEW | {f"{RING}:{place}": change}, says="from float64", tier="soak")


FAULTS = (
    fault("parts are added, not merged", "_SDPAMerger.step",
          "lambda self, out, sums, partial: original(self, out, sums.zero_(), partial)"),
    fault("the last part is forgotten", "_SDPAMerger.step",
          "lambda self, *a: None if self._out is not None else original(self, *a)"),
    fault("each rank gets its own keys back", "_AllToAllRotater.exchange_buffers",
          "lambda self, one: setattr(self, '_buffer', one.contiguous())"),
    fault("rows come back in the order of shards", "context_parallel_unshard",
          "lambda mesh, buffers, dims, *a: [__import__('torch').distributed.tensor.DTensor.from_local("
          "one, mesh, [__import__('torch').distributed.tensor.Shard(2)]).full_tensor() for one in buffers]"),
)  # fmt: skip


@pytest.mark.parametrize("planted", FAULTS, ids=str)
def test_planted_fault_is_caught(planted, plant):
    plant(planted)


@pytest.mark.slow
def test_healthy_rings_pass(plant):
    plant(Fault("nothing", CHECK, outcome="passed", tier="soak"))


def test_only_what_was_seen_on_a_device_is_passed_over():
    """The efficient kernel in halves and a balanced order: its gradients of queries and keys."""
    drawn = generated_context.draw(0, 0, 2, "cuda")
    seen = replace(drawn, backend="efficient", balanced=True, dtype="bfloat16")
    assert generated_context.is_known(seen, "dq is nan of its largest number")
    assert not generated_context.is_known(seen, "out is nan of its largest number")
    for other in ({"backend": "flash"}, {"balanced": False}, {"dtype": "float32"}):
        assert not generated_context.is_known(replace(seen, **other), "dq is nan of its largest number")


@pytest.mark.parametrize("size", [1.0, 0.8])
def test_attention_that_is_wrong_on_one_rank_too_is_no_measure(size, monkeypatch):
    """Whatever a ring and one rank have in common."""
    case = replace(generated_context.draw(0, 0, 2, "cpu"), dtype="float32", layers=1)
    healthy, here = functional.scaled_dot_product_attention, torch.device("cpu")
    monkeypatch.setattr(functional, "scaled_dot_product_attention", lambda *a, **k: size * healthy(*a, **k))
    got = generated_context.gradients(
        *generated_context.program(case, generated_context.operands(case, here))
    )
    share, _ = generated_context.judged(case, got, here)
    assert (share <= 1) == (size == 1)
