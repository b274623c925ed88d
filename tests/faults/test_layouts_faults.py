"""Drawn layouts and checkpoints find planted faults of torch, each alone and in the suite; else all pass."""

import json
import sys

import pytest

import planting
from planting import Fault

CHECK = "test_layouts.py::test_generated_layouts"
FSDP = "torch.distributed.fsdp._fully_shard."
CHECKPOINT = "torch.distributed.checkpoint."


PLAIN = (  # no plainer one has FSDP2
    '{"numbers": 2, "sizes": {"width": 8, "hidden": 10, "vocab": 64, "blocks": 1, "batch": 1, "length": 8}, '
    '"kind": "float32", "chunks": 2, "layouts": [{"parallel": "fsdp2", "options": {"sync": "each", "units": '
    '"blocks", "reduce": "float32", "ignored": false, "replicas": false, "placement": false, '
    '"reshard_after_forward": true, "reshard_after_backward": true, "prefetch": false, "force_sum": false, '
    '"unused": false, "offload": "", "divided": "", "output": "", "cast_forward_inputs": true, "ahead": '
    'false, "in_flight": 1}}], "traits": {}, "steps": 1}'
)
DDP = {
    "sync": "each", "reduce": "float32", "hook": False, "zero": "", "bucket_cap_mb": 25,
    "static_graph": False, "gradient_as_bucket_view": False, "find_unused_parameters": False,
    "forward_sync_buffers": True,
    "batched_grad_copy": False, "skip_all_reduce_unused_params": False, "bucket_cap_mb_list": None,
}  # fmt: skip
PAIR = json.loads(PLAIN) | {  # from DDP to ranks that train by themselves, and back
    "layouts": [{"parallel": "ddp", "options": DDP}, {"parallel": "alone", "options": {}}],
    "steps": 2,
}
THE_PAIR = {
    "harness.launch:launch": f"lambda program, words, **k: original(program, [{json.dumps(PAIR)!r}, *'001', "
    "words[4]], **k)"
}


def planted(name: str, family: str, case: int, patches: dict[str, str], says: str, **more: bool) -> Fault:
    """A fault in one case of seed 0, which the check draws among others."""
    one = f"lambda program, words, **k: original(program, [*words[:2], '{case}', '1', words[4]], **k)"
    return Fault(
        name,
        f"{CHECK}[2-{family}]",
        patches={"harness.launch:launch": one, **patches},
        says=says,
        tier="soak",
        **more,
    )


FAULTS = (
    Fault(
        "FSDP2 sums and takes no mean",
        f"{CHECK}[2-layouts]",
        patches={
            "harness.launch:launch": f"lambda program, words, **k: original(program, [{PLAIN!r}, *'001', "
            "words[4]], **k)",
            FSDP + "_fsdp_collectives:_get_gradient_divide_factors": "lambda *a, **k: (None, None, "
            "ReduceOp.SUM, ReduceOp.SUM)",
        },
        says="the smallest case: '{\"numbers\": 2, ",
        tier="soak",
    ),
    planted(
        "a case that stops its ranks",
        "layouts",
        2,
        {FSDP + "_fsdp_param_group:FSDPParamGroup._init_mp_dtypes": "lambda self: __import__('os')._exit(3)"},
        "at layouts 0 2",
    ),
    planted(
        "gradients that are parts of a sum are not clipped, as before torch 2.12",
        "layouts",
        17,
        {"torch:_foreach_mul_": "lambda grads, by: original([one for one in grads if 'Partial' not in "
         "str(getattr(one, 'placements', ''))], by)"},
        "norm.weight after step 0",
        another=True,
    ),
    planted(
        "a pipeline's last backward pass adds nothing to its weights",
        "layouts",
        5,
        {"torch.distributed.pipelining.stage:_PipelineStageBase.backward_weight_one_chunk": "lambda self, "
         "number, last_backward=False: None if last_backward else original(self, number, last_backward)"},
        "gradient 0 of",
        another=True,
    ),
    # Chosen only after the check was done.
    planted(
        "a rank that never gathers its sharded state",
        "checkpoints",
        0,
        {CHECKPOINT + "state_dict_saver:save": "lambda *a, **k: __import__('time').sleep(3600) "
         "if dist.get_rank() else original(*a, **k)",
         CHECKPOINT + "state_dict_saver:async_save": "lambda *a, **k: __import__('time').sleep(3600) "
         "if dist.get_rank() else original(*a, **k)",
         "workloads.time_limits:scaled": "lambda limit_s: 20.0 if limit_s == 120.0 else original(limit_s)"},
        "did not end in 20 s",
        another=True,
    ),
    Fault(
        "a checkpoint comes back with another weight on one rank",
        f"{CHECK}[2-checkpoints]",
        patches=THE_PAIR | {
            "workloads.layout_jobs:Job.load_state_dict": "lambda self, state: (original(self, state), [one."
            "data.mul_(1 + 2**-20) for one in self.model.parameters() if self.layout.parallel == 'ddp' "
            "and self.ranks.rank])[0]"
        },
        says="other bits than saved",
        tier="soak",
    ),
    Fault(
        "nothing: ranks that train by themselves are some units apart",
        f"{CHECK}[2-checkpoints]",
        outcome="passed",
        patches=THE_PAIR | {
            "workloads.layout_jobs:Job.step": "lambda self, *a: (original(self, *a), [one['exp_avg'].mul_(1 "
            "+ 2**-20) for one in self.optimizer.state.values() if self.layout.parallel == 'alone' "
            "and self.ranks.rank])[0]"
        },
        tier="soak",
    ),
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_fault_is_caught(fault, plant):
    plant(fault)


def test_named_shapes_are_found(suite_python, request, tmp_path):
    """Shapes of public incidents, and what training must not lose, in one launch of two ranks."""
    assert suite_python
    report = planting.program("drawn_layout_faults.py", ranks=2, stacks=tmp_path)
    assert report["hung"] is None
    assert not report["healthy"], "drawn cases fail without a fault"
    for name, told in report["faults"].items():
        entry = {"name": name, "check": CHECK, "vendor": "cpu", "expected": "failed"}
        planting.tell(request.node, {**entry, "caught": told["case"] is not None})
    assert not [name for name, told in report["faults"].items() if told["case"] is None], "not found"


def test_a_gain_is_off_by_the_roundings_of_its_terms_and_not_of_its_gradient():
    """A norm behind a gain makes its gradient a small sum of large terms."""
    torch = pytest.importorskip("torch")
    sys.path.insert(0, str(planting.TESTS / "acceptance"))
    from workloads import gates, generated_layout_cases, layout_models

    def gradient(case, kind):
        alone = layout_models.Alone(case, torch.device("cpu"), kind)
        weights = dict(layout_models.Model(case, case.numbers).named_parameters())
        parts = [part for _, part in alone.chunk_by_chunk(weights, 0, case.layouts[0], 1)]
        return sum(float(part["gain"]) for part in parts), alone.terms

    drawn = (generated_layout_cases.draw("layouts", 4242, number, 2) for number in range(300))
    cases = [one for one in drawn if one["gain"] and not one["mixed"] and not one["frozen"]]
    errors = []
    for case in [one for one in cases if one.kind == "float32"][:8]:
        (right, terms), (got, _) = gradient(case, torch.float64), gradient(case, None)
        assert terms >= abs(right)
        unit = gates.unit_roundoff(torch.float32)
        errors.append((abs(got - right) / (unit * abs(right)), abs(got - right) / (unit * terms)))
    assert len(errors) == 8
    assert max(of for of, _ in errors) > 8
    assert max(of for _, of in errors) < 4


@pytest.mark.slow
def test_healthy_layouts_pass(plant):
    plant(Fault("nothing", CHECK, outcome="passed", tier="soak"))
