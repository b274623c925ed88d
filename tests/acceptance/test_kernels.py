"""The kernels of a training step against float64, and their bits over repeats. In: one device. Out: cases."""

import pytest

from harness.fixtures import Launch, OnDevice
from harness.session import AcceptanceSession, every_device
from workloads import (
    activations,
    arch,
    attention,
    cases,
    compiled_block,
    convolution,
    embedding,
    fp8,
    gemm,
    grouped_gemm,
    large_tensors,
    linear_losses,
    losses,
    norms,
    optimizers,
    project_kernels,
    reductions,
    repeatability,
)

HALVES = ("bf16", "fp16")
FAMILIES = ("fp32", *HALVES)
CPU_RANKS = 2
SCREEN_S = {"smoke": 5, "standard": 10, "soak": 1800}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`ranks` is every device of this run."""
    every_device(metafunc, cpu=CPU_RANKS)


@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", FAMILIES)
def test_gemm(dtype: str, acceptance: AcceptanceSession, on_device: OnDevice) -> None:
    """Matrix products of every layout and edge size are as good as their precision allows, both ways."""
    cases.require(on_device(gemm.check, dtype=dtype, tier=acceptance.tier))


@pytest.mark.gpus(1)
def test_fp8_gemm(acceptance: AcceptanceSession, on_device: OnDevice) -> None:
    """8-bit casts keep every code, and scaled products in the architecture's own format are right."""
    cases.require(on_device(fp8.check, tier=acceptance.tier))


@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", FAMILIES)
def test_attention(dtype: str, acceptance: AcceptanceSession, on_device: OnDevice) -> None:
    """Attention as a trainer calls it, forward and backward, masked, grouped and peaked, loses no key."""
    cases.require(on_device(attention.check, dtype=dtype, tier=acceptance.tier))


@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", FAMILIES)
def test_rms_norm(dtype: str, acceptance: AcceptanceSession, on_device: OnDevice) -> None:
    """RMSNorm and its gradients hold over widths, scales, zero rows and a huge element."""
    cases.require(on_device(norms.check, norm="rms_norm", dtype=dtype, tier=acceptance.tier))


@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", FAMILIES)
def test_layer_norm(dtype: str, acceptance: AcceptanceSession, on_device: OnDevice) -> None:
    """LayerNorm and its gradients hold over widths, scales, constant rows and a huge element."""
    cases.require(on_device(norms.check, norm="layer_norm", dtype=dtype, tier=acceptance.tier))


@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", FAMILIES)
def test_cross_entropy(dtype: str, acceptance: AcceptanceSession, on_device: OnDevice) -> None:
    """Cross entropy and its gradient hold for large vocabularies, peaked logits and ignored rows."""
    cases.require(on_device(losses.check, dtype=dtype, tier=acceptance.tier))


@pytest.mark.tier("standard")
@pytest.mark.gpus(1)
def test_project_triton_kernels(on_device: OnDevice) -> None:
    """The trainers' own Triton kernels compile in this image and are right."""
    if not on_device(project_kernels.available):
        pytest.skip("Triton kernels need a GPU and the triton package")
    cases.require(on_device(project_kernels.check, timeout_s=300))


@pytest.mark.tier("standard")
@pytest.mark.gpus(1)
@pytest.mark.parametrize("way", ["plain", "chunked", "liger"])
def test_linear_cross_entropy(way: str, on_device: OnDevice) -> None:
    """The output layer and its loss in one, plain, in chunks or fused, give the loss and both gradients."""
    if reason := on_device(linear_losses.lacks, way=way):
        pytest.skip(reason)
    cases.require(on_device(linear_losses.check, way=way, dtype="bf16", timeout_s=300))


@pytest.mark.gpus(1)
def test_fp32_is_ieee_by_default(on_device: OnDevice) -> None:
    """A float32 product is one by default: TF32 would cost 3e-4, and nobody asked for it."""
    cases.require(on_device(gemm.default_precision))


@pytest.mark.tier("standard")
@pytest.mark.gpus(1)
def test_tf32_gemm(acceptance: AcceptanceSession, on_device: OnDevice) -> None:
    """Matrix products with TF32 asked for are as good as ten bits allow."""
    if not on_device(arch.has_tf32):
        pytest.skip("the architecture has no TF32 behind PyTorch's switch")
    cases.require(on_device(gemm.check, dtype="tf32", tier=acceptance.tier))


@pytest.mark.tier("standard")
@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", FAMILIES)
def test_activations_and_rope(dtype: str, on_device: OnDevice) -> None:
    """SwiGLU, GELU and rotary embedding hold at odd widths, extreme inputs and far positions."""
    cases.require(on_device(activations.check, dtype=dtype))


@pytest.mark.tier("standard")
@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", FAMILIES)
def test_softmax_and_reductions(dtype: str, acceptance: AcceptanceSession, on_device: OnDevice) -> None:
    """Softmax, sums, extremes and prefix sums hold for odd lengths, strides, masked rows and NaN."""
    cases.require(on_device(reductions.check, dtype=dtype, tier=acceptance.tier))


@pytest.mark.tier("standard")
@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", FAMILIES)
def test_embedding(dtype: str, on_device: OnDevice) -> None:
    """Embedding copies rows bit for bit, and sums the gradients of repeated indices."""
    cases.require(on_device(embedding.check, dtype=dtype))


@pytest.mark.tier("standard")
@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", FAMILIES)
def test_convolution(dtype: str, on_device: OnDevice) -> None:
    """Convolution and its gradients hold for strides, groups and both memory layouts."""
    cases.require(on_device(convolution.check, dtype=dtype))


@pytest.mark.tier("standard")
@pytest.mark.gpus(1)
def test_adamw(on_device: OnDevice) -> None:
    """AdamW, fused, foreach and plain, follows its formula for a hundred steps."""
    cases.require(on_device(optimizers.check))


@pytest.mark.tier("standard")
@pytest.mark.gpus(1)
def test_grouped_gemm(on_device: OnDevice) -> None:
    """Grouped products give each expert its own result, also with no rows or one."""
    if reason := on_device(grouped_gemm.lacks):
        pytest.skip(reason)
    cases.require(on_device(grouped_gemm.check))


@pytest.mark.tier("standard")
@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_compiled_block(dtype: str, on_device: OnDevice) -> None:
    """A compiled transformer block has no graph break, recompiles once, and is as good as eager."""
    cases.require(on_device(compiled_block.check, dtype=dtype, timeout_s=300))


@pytest.mark.tier("standard")
@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", HALVES)
def test_determinism(dtype: str, on_device: OnDevice) -> None:
    """Operations that promise it give the same bits every time."""
    cases.require(on_device(repeatability.deterministic, dtype=dtype, repeats=50))


@pytest.mark.gpus(1)
def test_graph_replay(on_device: OnDevice) -> None:
    """A captured graph, forward and backward, replays to the bits of eager mode."""
    cases.require(on_device(repeatability.graph_replay, dtype="bf16"))


@pytest.mark.tier("standard")
@pytest.mark.gpus(1)
def test_beyond_32_bits(acceptance: AcceptanceSession, on_device: OnDevice) -> None:
    """Tensors of more than 2^31 elements are indexed right."""
    if acceptance.vendor == "cpu":
        pytest.skip("needs a device with 40 GiB of memory")
    cases.require(on_device(large_tensors.check))


@pytest.mark.tier("standard")
def test_no_silent_corruption(ranks: int, acceptance: AcceptanceSession, launch: Launch) -> None:
    """Products at full power give the same bits on every repeat and on every device."""
    seconds = SCREEN_S[acceptance.tier] if acceptance.vendor != "cpu" else 0.5
    acceptance.ended.expect(seconds)
    found = launch("corruption_screen.py", seconds, nproc=ranks, timeout_s=seconds + 90)["devices"]
    assert len(found) == ranks
    wrong = [f"rank {rank}: {text}" for rank, one in enumerate(found) for text in one["differences"]]
    assert not wrong, "bits changed between repeats\n" + "\n".join(wrong)
    odd = [
        f"rank {rank}: {one['golden']}" for rank, one in enumerate(found) if one["golden"] != one["expected"]
    ]
    assert not odd, f"a product of integers has the checksum {found[0]['expected']}, but on {odd}"
    sums = {(one["inputs"], one["checksum"]) for one in found}
    assert len(sums) == 1, f"devices disagree on the same product: {found}"
