"""Faults of compiled training, 8 bits, gradients, optimizers: a wrong job is found, a slow or large one too."""

# ruff: noqa: E501 - a table of faults reads in rows

import json
from typing import Any

import pytest

from planting import Fault

SUITE = "test_training_variants.py::"
FAULTS = (
    Fault(
        "compiled code that is two per cent off",
        SUITE + "test_compiled_job_follows_the_reference",
        patches={"torch:compile": "lambda f, **k: lambda *x, **y: f(*x, **y) * 1.02"},
        says="outside the band",
    ),
    Fault(
        "an 8-bit product that is a half too small",
        SUITE + "test_fp8_job_follows_the_reference[2-own]",
        patches={"fused.products:_fp8_product": "lambda *a, **k: original(*a, **k).mul_(0.5)"},
        says="outside the band",
    ),
    Fault(
        "a job of 8 bits that does not compile",
        SUITE + "test_fp8_job_follows_the_reference",
        patches={"layouts.prepare:use_fp8_linears": "lambda *a: 1 / 0"},
        says="ZeroDivisionError",
        another=True,
    ),
)
# What a launch of the wide jobs would say on an H200, when all is well.
RECORD: dict[str, Any] = {
    "problems": [],
    "performance": {"tokens_per_s_per_gpu": 20_000.0},
    "memory": {"allocated_gib": 40.0, "least_gib": 44.0},
}


def wide(**changes: float) -> dict[str, str]:
    """A launch of jobs of real width, and a device that is no CPU."""
    fast = {"tokens_per_s_per_gpu": changes.get("rate", 25_000.0)}
    fp8 = {
        **RECORD,
        "performance": fast,
        "memory": {**RECORD["memory"], "allocated_gib": changes.get("gib", 40.0)},
    }
    ran = json.dumps({"records": {"fp8": fp8, "bf16": RECORD}, "curves": {}})
    return {
        "harness.launch:launch": f"lambda *a, **k: json.loads({ran!r})",
        "harness.skips:without_feature": "lambda *a: None",
        "harness.skips:if_lacking": "lambda *a: None",
        "harness.skips:without_memory": "lambda *a: None",
    }


WIDE = (
    Fault("8 bits in half of the layers", SUITE + "test_fp8_is_worth_it[own]", says="21600 tokens/s in 8", patches=wide(rate=21_600.0)),
    Fault("8 bits larger than 16", SUITE + "test_fp8_is_worth_it[own]", says="48.0 GiB in 8 bits", patches=wide(gib=48.0)),
    Fault("nothing", SUITE + "test_fp8_is_worth_it[own]", outcome="passed", patches=wide(rate=23_300.0)),
)  # fmt: skip


def gradients(name: str, layout: str, says: str, patches: dict[str, str], *, another: bool = False) -> Fault:
    """A fault in the step of one layout, and the weight whose gradient shows it."""
    check = f"{SUITE}test_gradients_at_full_width[2-{layout}]"
    return Fault(name, check, patches=patches, says=says, another=another)


# What only one of two layers does: forward runs them in turn.
ONE_LAYER = "(original.__dict__.update(n=original.__dict__.get('n', 0) + 1) or original.n % 2)"
ON_RANK_1 = "torch.distributed.get_rank() == 1"
NORM = "layouts.flat_unit:FlatUnit.norm"
GRADIENTS = (
    gradients(
        "half of a rank's shard is dropped", "zero1", "blocks.0.mlp.down.weight",
        {NORM: f"lambda self, **k: ({ON_RANK_1} and self.slice[len(self.slice) // 2 :].zero_(), "
               "original(self, **k))[1]"},
    ),
    gradients(
        "a rank's shard is counted twice", "zero1", "blocks.1.attention.o.weight",
        {NORM: f"lambda self, **k: ({ON_RANK_1} and self.slice.mul_(2), original(self, **k))[1]"},
        another=True,
    ),
    gradients(
        "AdamW gets half of each gradient", "zero1", "embedding.weight: 0.5",
        {"layouts.flat_unit:FlatUnit.update": "lambda self, scale, *a: original(self, scale * 0.5, *a)"},
    ),
    gradients(
        "AdamW gets half of each shard", "fsdp2", "embedding.weight: 0.5",
        {"layouts.optimizer:update": "lambda optimizer, lr: ([weight.grad.mul_(0.5) "
         "for group in optimizer.param_groups for weight in group['params']], original(optimizer, lr))[1]"},
        another=True,
    ),
    gradients(
        "a layer loses its dK", "fsdp2", "blocks.0.attention.k.weight: 1",
        {"models.llama:document_attention": "lambda q, k, v, mask: "
         f"original(q, k.detach() if {ONE_LAYER} else k, v, mask)"},
    ),
    gradients(
        "a layer of float32 rounds to bfloat16", "fp32", "blocks.1.mlp.down.weight: 0.00",
        {"models.llama:SwiGLU.forward": "lambda self, x: original(self, x.bfloat16().float() "
         f"if not {ONE_LAYER} else x)"},
    ),
    gradients(
        "a layer of bfloat16 runs in 8 bits", "fsdp2", "blocks.1.mlp_norm.weight: 0.",
        {"models.llama:SwiGLU.forward": "lambda self, x: original(self, "
         f"x.to(__import__('torch').float8_e5m2).to(x.dtype) if not {ONE_LAYER} else x)"},
    ),
    gradients(
        "scales of 8 bits that are twice too large", "fp8", "blocks.0.mlp.gate.weight",
        {"fused.products:_fp8_product": "lambda *a, **k: original(*a, **k).mul_(0.5)"},
    ),
    gradients("a microbatch is counted twice", "compiled", "norm: 1", {"train:accumulate": "lambda run, step: (original(run, step), original(run, step))[1]"}),
)  # fmt: skip


def curve(name: str, layout: str, says: str, patches: dict[str, str], *, another: bool = True) -> Fault:
    """A fault that one step's gradients and a falling loss do not show."""
    check = f"{SUITE}test_curve_at_full_width[2-{layout}]"
    return Fault(name, check, patches=patches, says=says, another=another, tier="soak")


ADAMW, UPDATE, RATE = "fused.ops:adamw_", "layouts.optimizer:update", "train:learning_rate"
BETAS = "[group.update(betas={}) for group in optimizer.param_groups]"
DONE = "optimizer.state.get(weight, {}).get('step', 0)"
COURSES = (
    curve("decay counts twice", "zero1", "decay, at most", {ADAMW: "lambda *a, decay, **k: original(*a, decay=2 * decay, **k)"}, another=False),
    curve("the lower halves of weights are lost", "zero1", "blocks.0.attention_norm.weight 1", {ADAMW: "lambda high, low, *a, **k: (original(high, low, *a, **k), low.zero_())[0]"}),
    curve("bias is not corrected", "zero1", "step 2 ", {ADAMW: "lambda *a, step, **k: original(*a, step=10**6, **k)"}),
    curve("the rate is three per cent too high", "zero1", "loss, at most", {RATE: "lambda step, peak, options: original(step, 1.03 * peak, options)"}),
    curve("a warm-up without the cosine", "fsdp2", "way, at most", {RATE: "lambda step, peak, options: original(min(step, options.lr_warmup), peak, options)"}),
    curve("beta 1 is 0.8", "fsdp2", "way, at most", {UPDATE: f"lambda optimizer, lr: ({BETAS.format((0.8, 0.95))}, original(optimizer, lr))[1]"}),
    curve("beta 2 is 0.99", "fsdp2", "way, at most", {UPDATE: f"lambda optimizer, lr: ({BETAS.format((0.9, 0.99))}, original(optimizer, lr))[1]"}),
    curve(
        "the second moment stays as the first step made it", "fsdp2", "step 4 ",
        {UPDATE: "lambda optimizer, lr: (kept := {weight: held['exp_avg_sq'].clone() for weight, held in optimizer.state.items()}, original(optimizer, lr), "
         "[optimizer.state[weight]['exp_avg_sq'].copy_(held) for weight, held in kept.items()])[1]"},
    ),
    curve(
        "a weight stays after five steps", "fsdp2", "blocks.0.attention.v.weight 0.7",
        {UPDATE: "lambda optimizer, lr: (weight := optimizer.param_groups[0]['params'][3], old := weight.detach().clone(), "
         f"done := {DONE}, original(optimizer, lr), done < 5 or weight.detach().copy_(old))[3]"},
        another=False,
    ),
    curve(
        "the first moment is lost after ten steps", "fsdp2", "step 12",
        {UPDATE: "lambda optimizer, lr: ([held['exp_avg'].zero_() for held in optimizer.state.values() if held['step'] == 10], original(optimizer, lr))[1]"},
    ),
)  # fmt: skip


@pytest.mark.parametrize("fault", [*FAULTS, *WIDE, *GRADIENTS, *COURSES], ids=str)
def test_planted_fault_is_caught(fault, plant):
    plant(fault)


@pytest.mark.slow
def test_healthy_jobs_pass(plant):
    arguments = ("-k", "reference or curve")
    plant(Fault("nothing", "test_training_variants.py", outcome="passed", arguments=arguments))
