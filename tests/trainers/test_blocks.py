"""What reaches a block, and how often: FSDP2's hooks stand between the model and each of its blocks."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from agree import same_bits
from held import Held
from one_rank import job_of

from models import flux, llama

BLOCKS = (llama.Block, flux.Double)


@contextmanager
def one_step(*flags: str) -> Iterator[tuple[Any, Callable[[], float]]]:
    """A job of one rank and a function that runs its microbatch."""
    with job_of("--precision", "bf16", *flags) as run:
        batch = run.batch(0, 0)
        yield run.job, lambda: float(run.job.microbatch(batch, last=True, share=1.0))


@pytest.mark.parametrize("parallel", ["fsdp2", "full_shard", "zero1"])
@pytest.mark.parametrize("model", ["llama", "mistral", "moe", "flux"])
def test_positions_reach_a_block_in_float32(model: str, parallel: str) -> None:
    seen: list[torch.dtype] = []
    with one_step("--model", model, "--parallel", parallel) as (job, step):
        block = next(module for module in job.model.modules() if isinstance(module, BLOCKS))
        # The block itself, inside FSDP1's wrapper; and after FSDP2's hooks, which come first.
        block.register_forward_pre_hook(lambda _, inputs: seen.extend(part.dtype for part in inputs[-1]))
        step()
    assert seen == [torch.float32] * 2


@pytest.mark.parametrize("model", ["mpt", "gpt"])
def test_a_family_without_a_table_computes_in_half(model: str) -> None:
    seen: list[torch.dtype] = []
    with one_step("--model", model) as (job, step):
        block = job.model.blocks["0"]
        block.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
        step()
    assert seen == [torch.bfloat16]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("parallel", ["fsdp2", "zero1"])
def test_recomputation_happens_inside_a_block(
    parallel: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_the_fused_layer_computes_again_what_it_did_not_keep_and_has_the_same_gradients(
    precision: str,
) -> None:
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
