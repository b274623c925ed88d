"""What reaches a block, and how often; names of FSDP2, DTensor and grouped attention in older torch."""

import importlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from agree import different, same_bits, same_sums
from held import Held
from one_rank import job_of

from layouts import sharding
from models import flux, layers, llama

BLOCKS = (llama.Block, flux.Double)


@contextmanager
def one_step(*flags: str) -> Iterator[tuple[Any, Callable[[], float]]]:
    """A job of one rank and a function that runs its microbatch."""
    with job_of("--precision", "bf16", *flags) as run:
        batch = run.batch(0, 0)
        yield run.job, lambda: float(run.job.microbatch(batch, last=True, share=1.0))


@pytest.mark.parametrize("parallel", ["fsdp2", "full_shard", "zero1"])
@pytest.mark.parametrize("model", ["llama", "mistral", "moe", "flux"])
def test_positions_reach_a_block_in_float32(model, parallel):
    seen: list[torch.dtype] = []
    with one_step("--model", model, "--parallel", parallel) as (job, step):
        block = next(module for module in job.model.modules() if isinstance(module, BLOCKS))
        # The block itself, inside FSDP1's wrapper; and after FSDP2's hooks, which come first.
        block.register_forward_pre_hook(lambda _, inputs: seen.extend(part.dtype for part in inputs[-1]))
        step()
    assert seen == [torch.float32] * 2


@pytest.mark.parametrize("model", ["mpt", "gpt"])
def test_a_family_without_a_table_computes_in_half(model):
    seen: list[torch.dtype] = []
    with one_step("--model", model) as (job, step):
        block = job.model.blocks["0"]
        block.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
        step()
    assert seen == [torch.bfloat16]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("parallel", ["fsdp2", "zero1"])
def test_recomputation_happens_inside_a_block(parallel, compiled, monkeypatch):
    calls: Counter[str] = Counter()
    real = torch.compile

    def counted(forward: Callable, **settings: Any) -> Callable:
        inner = real(forward, backend="aot_eager", **settings)  # the default one needs a C++ compiler

        def call(*inputs: Any) -> Any:
            calls["compiled"] += 1
            return inner(*inputs)

        return call

    monkeypatch.setattr(torch, "compile", counted)
    flags = ("--parallel", parallel, "--recompute", "full", "--compile" if compiled else "--no-compile")
    with one_step(*flags) as (job, step):
        block = job.model.blocks["0"]
        block.register_forward_pre_hook(lambda *_: calls.update(hooks=1))
        if not compiled:  # a compiled block calls no module
            block.mlp.register_forward_pre_hook(lambda *_: calls.update(inside=1))
        step()
        layers = len(job.model.blocks)
    assert calls == {"hooks": 1} | ({"compiled": 2 * layers} if compiled else {"inside": 2})


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_the_fused_layer_computes_again_what_it_did_not_keep_and_has_the_same_gradients(precision):
    flags = ("--parallel", "zero1", "--implementation", "fused", "--micro-batch", "8", "--layers", "8")
    peaks, found = {}, {}
    for which in ("none", "half", "full"):
        with one_step(*flags, "--precision", precision, "--recompute", which) as (job, step):
            with Held() as held:
                loss = step()
            fused = job.model
            gradients = [one.gate_up.gradient for one in fused.layers]
            gradients += [one.qkv.gradient for one in fused.layers]
            gradients += [one.norm1.weight.main_grad for one in fused.layers]
        peaks[which] = held.peak
        found[which] = [torch.tensor(loss), fused.embedding.weight.main_grad, *gradients]
    for which in ("half", "full"):
        same_bits(found[which], found["none"])
        assert peaks[which] < 0.8 * peaks["none"], peaks


OLD = {
    "torch.distributed.fsdp": "torch.distributed._composable.fsdp",
    "torch.distributed.tensor": "torch.distributed._tensor",
}
NAMES = {
    "torch.distributed.fsdp": ("MixedPrecisionPolicy", "fully_shard"),
    "torch.distributed.tensor": ("DTensor", "Replicate", "Shard"),
}


@pytest.mark.parametrize("moved", [("torch.distributed.fsdp",), tuple(OLD)], ids=["torch 2.5", "torch 2.4"])
def test_names_come_from_where_an_older_torch_has_them(moved, monkeypatch):
    for public in moved:
        earlier = ModuleType(OLD[public])
        vars(earlier).update({name: f"earlier {name}" for name in NAMES[public]})
        monkeypatch.setitem(sys.modules, public, ModuleType(public))
        monkeypatch.setitem(sys.modules, OLD[public], earlier)
    try:
        found = vars(importlib.reload(sharding))
        got = {name: str(found[name]) == f"earlier {name}" for names in NAMES.values() for name in names}
        assert got == {name: public in moved for public, names in NAMES.items() for name in names}
    finally:
        monkeypatch.undo()
        importlib.reload(sharding)


def test_key_heads_that_an_older_torch_cannot_share_are_repeated(monkeypatch):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 16, 8) for heads in (4, 2, 2))
    grouped = layers.attention(q, k, v)
    assert layers._HAS_GROUPS
    monkeypatch.setattr(layers, "_HAS_GROUPS", False)
    same_sums(layers.attention(q, k, v), grouped, terms=16 + 8)
    swapped = layers.attention(q, k.flip(1), v)  # the order of the heads matters
    assert different(swapped, grouped)


TRAINERS = Path(__file__).resolve().parents[2] / "trainers"
JOB = "--size tiny --data text --steps 2 --global-batch 8 --no-digest --no-backend-check --no-preflight"
LAYOUTS = (
    "--parallel zero1 --precision bf16 --implementation fused",
    "--parallel zero1",
    "--parallel fsdp2 --no-compile",
)
PROGRAM = """
import gc, json, sys
import torch
import options, train
from phases import Phases
from world import joined_ranks

jobs = [options.parse(flags.split()) for flags in json.loads(sys.argv[1])]
phases, left = Phases(300), []
with joined_ranks(jobs[0]) as world:
    for job in jobs:
        assert train.job(job, world, phases, None)["problems"] == []
        gc.collect()
        mine = (torch.Tensor, torch.nn.Parameter)
        left.append(sum(type(o) in mine and o.numel() > 999 for o in gc.get_objects()))
print(json.dumps(left))
"""


@pytest.mark.slow
def test_layout_gives_its_memory_back():
    flags = json.dumps([f"{JOB} {layout}" for layout in LAYOUTS])
    command = [sys.executable, "-c", PROGRAM, flags]
    run = subprocess.run(command, cwd=TRAINERS, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    left = json.loads(run.stdout.strip().splitlines()[-1])
    assert left == [0] * len(LAYOUTS), f"tensors that stayed after each job: {left}"
