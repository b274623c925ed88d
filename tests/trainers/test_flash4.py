"""FlashAttention 4 in the trainers, with the package's interface replaced by plain torch: no GPU is here."""

import argparse
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from agree import same_sums
from torch import Tensor

import attention_backend
import flash4
from errors import RefusedError
from models import flux, llama, mpt
from models.layers import Rotary, attention, window_attention


def _scores(q: Tensor, k: Tensor, causal: bool, left: int | None) -> Tensor:
    """Scaled scores [batch, heads, sequence, sequence] in float32, with what is hidden at -inf."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * q.shape[-1] ** -0.5
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
    hidden = (distance < 0) if causal else torch.zeros_like(distance, dtype=torch.bool)
    return scores.masked_fill(hidden | (distance > left if left is not None else False), -torch.inf)


class Interface:
    """What the trainers call of flash_attn.cute.interface, with its arguments and results."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def _flash_attn_fwd(
        self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, causal: bool, **window: Any
    ) -> Any:
        assert return_lse
        self.calls.append({"causal": causal, **window})
        scores = _scores(q, k, causal, window.get("window_size_left"))
        v = v.repeat_interleave(q.shape[2] // v.shape[2], 2).float()
        out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).to(q.dtype)
        return out, scores.logsumexp(-1), None, None, None

    def _flash_attn_bwd(self, *tensors: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, **options: Any) -> None:
        """By hand from the saved output and log-sum-exp: autograd records nothing inside an operator."""
        q, k, v, out, grad, lse = tensors
        assert options.pop("deterministic") is False
        groups = q.shape[2] // k.shape[2]
        keys, values = (x.repeat_interleave(groups, 2).float() for x in (k, v))
        weights = (_scores(q, k, options["causal"], options.get("window_size_left")) - lse[..., None]).exp()
        grad, scale = grad.float(), q.shape[-1] ** -0.5
        ds = torch.einsum("bqhd,bkhd->bhqk", grad, values)
        ds = weights * (ds - (grad * out.float()).sum(-1).transpose(1, 2)[..., None]) * scale
        dq.copy_(torch.einsum("bhqk,bkhd->bqhd", ds, keys))
        for into, part, rows in ((dk, ds, q.float()), (dv, weights, grad)):
            made = torch.einsum("bhqk,bqhd->bkhd", part, rows)
            into.copy_(made.unflatten(2, (-1, groups)).sum(3))


@pytest.fixture
def package(monkeypatch) -> Interface:
    found = Interface()
    monkeypatch.setattr(flash4, "_interface", lambda: found)
    return found


def _inputs(heads: int = 4, kv: int = 2, length: int = 24, dim: int = 16) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, length, n, dim, generator=random).bfloat16().transpose(1, 2).requires_grad_()
        for n in (heads, kv, kv)
    ]


def _with_gradients(call: Any, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    out = call(*leaves)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return (out.detach(), *torch.autograd.grad((out * weight).sum(), leaves))


@pytest.mark.parametrize(
    "call",
    [
        attention,
        lambda q, k, v: attention(q, k, v, causal=False),
        lambda q, k, v: window_attention(q, k, v, 7),
        lambda q, k, v: window_attention(q, k, v, 99),
    ],
    ids=["causal", "full", "window", "window beyond the sequence"],
)
def test_values_and_gradients_are_those_of_torchs_attention(call, package):
    leaves = _inputs()
    expected = _with_gradients(call, leaves)
    assert not package.calls
    with flash4.chosen():
        found = _with_gradients(call, leaves)
    assert package.calls
    same_sums(found, expected, dtype=torch.bfloat16, terms=1)  # rounded at the end


def test_a_bias_and_float32_stay_with_torch(package):
    q, k, v = _inputs(kv=4)
    with flash4.chosen():
        attention(q, k, v, bias=torch.zeros(24, 24, dtype=torch.bfloat16))
        attention(q.float(), k.float(), v.float())
    assert not package.calls


def test_the_choice_ends_with_its_block(package):
    with flash4.chosen():
        pass
    attention(*_inputs())
    assert not package.calls


def _block_and_input(model: str) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    x = torch.randn(1, 24, 64).bfloat16()
    if model == "mpt":
        return mpt.Block(mpt.Config(layers=1, width=64, heads=4, vocab=16)).bfloat16(), (x, None)
    if model == "flux":
        config = flux.Config(
            double_blocks=1, single_blocks=1, width=64, heads=2, axes=(4, 14, 14), side=4, text_tokens=8
        )
        table = flux.rotary(config, torch.device("cpu"))
        return flux.Double(config).bfloat16(), (x, torch.randn(1, 64).bfloat16(), table)
    config_of_llama = llama.Config(
        layers=1,
        width=64,
        heads=4,
        kv_heads=2,
        ffn=96,
        vocab=16,
        head_dim=16,
        window=7 if model == "mistral" else None,
    )
    return llama.Block(config_of_llama).bfloat16(), (x, Rotary.table(24, 16, 1e4, torch.device("cpu")))


@pytest.mark.parametrize(
    "model", ["llama", "mpt", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mistral", "flux"))]
)
def test_blocks_of_every_family_compile_whole_and_learn_the_same(model, package):
    block, inputs = _block_and_input(model)

    def gradients(forward: Any) -> list[Tensor]:
        out = forward(*inputs)
        return [
            out.detach(),
            *torch.autograd.grad(out.float().square().mean(), list(block.parameters()), allow_unused=True),
        ]

    expected = gradients(block)
    with flash4.chosen():
        found = gradients(torch.compile(block, backend="aot_eager", fullgraph=True))
    assert package.calls
    assert package.calls[0]["causal"] is (model != "flux")
    assert package.calls[0].get("window_size_left") == (6 if model == "mistral" else None)
    same_sums(found, expected, dtype=torch.bfloat16, terms=4)  # rounded after attention and each product


def _options(**more: Any) -> Any:
    return argparse.Namespace(attention="fa4", **more)


def test_it_is_refused_where_its_package_is_missing(monkeypatch):
    monkeypatch.setattr(flash4, "installed", lambda: False)
    with (
        pytest.raises(RefusedError, match="flash-attn-4 and nvidia-cutlass-dsl"),
        attention_backend.order(_options(), SimpleNamespace(gpu=True)),
    ):
        pass


def test_its_kernels_name_it_and_no_other_backend():
    kernels = {
        "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at__tensorptrbf16",
        "kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90_object_at__tensorptrbf16",
    }
    found = attention_backend.chosen({"trainers::fa4", "aten::mm"}, kernels, gpu=True)
    assert (found["backend"], found["by"]) == ("fa4", "kernels")
    assert len(found["kernels"]) == len(kernels)


def test_a_job_with_fa4_on_a_cpu_has_torchs_attention():
    with attention_backend.order(_options(), SimpleNamespace(gpu=False)):
        assert not flash4.takes(_inputs()[0], None)
