"""Kernels of a training step against float64, and their determinism. In: one device.
Out: the cases that failed.
"""

import pytest

from harness import skips
from harness.calls import InNewProcesses, Launch, OnDevice, Passes, RecordMetric
from harness.readings import only_with
from harness.session import AcceptanceSession
from workloads import (
    activations,
    arch,
    attention,
    cases,
    compiled_block,
    convolution,
    embedding,
    fp8,
    fp8_recipes,
    gemm,
    graph_processes,
    grouped_gemm,
    large_models,
    large_tensors,
    linear_losses,
    losses,
    margins,
    norms,
    optimizers,
    project_kernels,
    reductions,
    repeatability,
)

HALVES = ("bf16", "fp16")
FAMILIES = ("fp32", *HALVES)
RANKS = {"cpu": 2, "whole": False}  # `ranks` is every device of this run
GRAPH_PROCESSES, GRAPH_REPLAYS = 8, 300
SCREEN_S = {"smoke": 5, "standard": 10, "soak": 1800}


@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", FAMILIES)
def test_gemm(dtype: str, acceptance: AcceptanceSession, passes: Passes) -> None:
    """Matrix products of every layout and edge size are as exact as their precision allows.
    This holds forward and backward.
    """
    passes(gemm.check, dtype=dtype, tier=acceptance.tier)


@pytest.mark.tier("standard")
@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", FAMILIES)
def test_rows_of_a_product(dtype: str, passes: Passes) -> None:
    """NaN and infinity in some rows of a product's operands stay out of the results of the others."""
    passes(gemm.rows, dtype=dtype)


@pytest.mark.gpus(1)
def test_fp8_gemm(acceptance: AcceptanceSession, passes: Passes) -> None:
    """8-bit casts keep every value, and scaled products in the architecture's own format are right."""
    passes(fp8.check, tier=acceptance.tier)


@pytest.mark.gpus(1)
def test_fp8_recipes(on_device: OnDevice, passes: Passes) -> None:
    """8-bit products with a scale for each tensor or each row are right for any number of rows.
    They read only their operands and scales.
    """
    skips.if_lacking(on_device(fp8_recipes.lacks))
    passes(fp8_recipes.check)


@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", FAMILIES)
def test_attention(dtype: str, acceptance: AcceptanceSession, passes: Passes) -> None:
    """Attention as a trainer calls it is right forward and backward: masked, grouped, with peaked scores."""
    passes(attention.check, dtype=dtype, tier=acceptance.tier)


@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", FAMILIES)
def test_rms_norm(dtype: str, acceptance: AcceptanceSession, passes: Passes) -> None:
    """RMSNorm and its gradients are right for many widths and scales, zero rows and a huge element."""
    passes(norms.check, norm="rms_norm", dtype=dtype, tier=acceptance.tier)


@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", FAMILIES)
def test_layer_norm(dtype: str, acceptance: AcceptanceSession, passes: Passes) -> None:
    """LayerNorm and its gradients are right for many widths and scales, constant rows and a huge element."""
    passes(norms.check, norm="layer_norm", dtype=dtype, tier=acceptance.tier)


@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", FAMILIES)
def test_cross_entropy(dtype: str, acceptance: AcceptanceSession, passes: Passes) -> None:
    """Cross entropy and its gradient are right for large vocabularies, peaked logits and ignored rows."""
    passes(losses.check, dtype=dtype, tier=acceptance.tier)


@pytest.mark.tier("standard")
@pytest.mark.gpus(1)
def test_project_triton_kernels(on_device: OnDevice, passes: Passes) -> None:
    """The trainers' own Triton kernels compile in this image and are right."""
    only_with(on_device(project_kernels.available), "gpu", "Triton kernels need a GPU")
    passes(project_kernels.check, timeout_s=300)


@pytest.mark.tier("standard")
@pytest.mark.gpus(1)
@pytest.mark.parametrize("way", ["plain", "chunked", "liger"])
def test_linear_cross_entropy(way: str, on_device: OnDevice, passes: Passes) -> None:
    """Output layer and loss together (plain, in chunks or fused) give the right loss and both gradients."""
    skips.if_lacking(on_device(linear_losses.lacks, way=way))
    passes(linear_losses.check, way=way, dtype="bf16", timeout_s=300)


@pytest.mark.gpus(1)
def test_fp32_is_ieee_by_default(passes: Passes) -> None:
    """A float32 product is computed in float32 by default; TF32, with errors of 3e-4, must be requested."""
    passes(gemm.default_precision)


@pytest.mark.tier("standard")
@pytest.mark.gpus(1)
def test_tf32_gemm(acceptance: AcceptanceSession, on_device: OnDevice, passes: Passes) -> None:
    """With TF32 requested, matrix products are as exact as its ten bits allow."""
    only_with(
        on_device(arch.has_tf32), "tf32", "this architecture has no TF32 that PyTorch's switch could turn on"
    )
    passes(gemm.check, dtype="tf32", tier=acceptance.tier)


@pytest.mark.tier("standard")
@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", FAMILIES)
def test_activations_and_rope(dtype: str, passes: Passes) -> None:
    """SwiGLU, GELU and rotary embedding are right at odd widths, extreme inputs and far positions."""
    passes(activations.check, dtype=dtype)


@pytest.mark.tier("standard")
@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", FAMILIES)
def test_softmax_and_reductions(dtype: str, acceptance: AcceptanceSession, passes: Passes) -> None:
    """Softmax, sums, extremes and prefix sums are right for odd lengths, strides, masked rows and NaN."""
    passes(reductions.check, dtype=dtype, tier=acceptance.tier)


@pytest.mark.tier("standard")
@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", FAMILIES)
def test_embedding(dtype: str, passes: Passes) -> None:
    """Embedding copies rows bit for bit, and adds up the gradients of repeated indices."""
    passes(embedding.check, dtype=dtype)


@pytest.mark.tier("standard")
@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", FAMILIES)
def test_convolution(dtype: str, on_device: OnDevice, passes: Passes) -> None:
    """Convolution and its gradients are right in one to three dimensions and in every memory layout.
    They repeat bit for bit.
    """
    skips.if_lacking(on_device(convolution.lacks, dtype=dtype))
    passes(convolution.check, dtype=dtype, timeout_s=300)


@pytest.mark.tier("standard")
@pytest.mark.gpus(1)
def test_adamw(passes: Passes) -> None:
    """Fused, foreach and plain AdamW follow the formula for a hundred steps."""
    passes(optimizers.check)


@pytest.mark.tier("standard")
@pytest.mark.gpus(1)
def test_grouped_gemm(on_device: OnDevice, passes: Passes) -> None:
    """Grouped products give each expert its own result, also for experts with no row or one."""
    skips.if_lacking(on_device(grouped_gemm.lacks))
    passes(grouped_gemm.check)


@pytest.mark.long
@pytest.mark.tier("standard")
@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_compiled_block(dtype: str, passes: Passes) -> None:
    """A compiled transformer block has no graph break, recompiles at most once, and is as exact as eager."""
    passes(compiled_block.check, dtype=dtype, timeout_s=300)


@pytest.mark.tier("standard")
@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", HALVES)
def test_determinism(dtype: str, on_device: OnDevice, record_metric: RecordMetric) -> None:
    """Operations that PyTorch documents as deterministic give the same bits every time, if that is asked for.

    How often the default differs is recorded and not judged: no document promises its bits.
    """
    report = on_device(repeatability.deterministic, dtype=dtype, repeats=50)
    record_metric("default_repeats_with_other_bits", report["default"], unit="of 50")
    cases.require(report, record_metric)


@pytest.mark.gpus(1)
def test_graph_replay(passes: Passes) -> None:
    """A captured graph gives the same bits as eager mode, forward and backward."""
    passes(repeatability.graph_replay, dtype="bf16")


@pytest.mark.tier("standard")
@pytest.mark.long
@pytest.mark.gpus(1)
def test_graph_in_new_processes(
    acceptance: AcceptanceSession, in_new_processes: InNewProcesses, record_metric: RecordMetric
) -> None:
    """Hundreds of replays of a captured block give the bits of eager mode, in each of several processes."""
    only_with(acceptance.vendor != "cpu", "gpu", "a CPU has no graphs")
    reports = in_new_processes(
        graph_processes.check,
        processes=GRAPH_PROCESSES,
        env=graph_processes.ENVIRONMENT,
        dtype="bf16",
        replays=GRAPH_REPLAYS,
    )
    found = [
        {**case, "name": f"process {number}: {case['name']}"}
        for number, report in enumerate(reports)
        for case in report["cases"]
    ]
    cases.require({"cases": found}, record_metric)


@pytest.mark.tier("standard")
@pytest.mark.gpus(1, whole=True)
def test_beyond_32_bits(on_device: OnDevice, passes: Passes) -> None:
    """Tensors with more than 2^31 elements are indexed right."""
    skips.if_lacking(on_device(large_tensors.lacks))
    passes(large_tensors.check)


@pytest.mark.tier("standard")
@pytest.mark.gpus(1, whole=True)
@pytest.mark.parametrize("limit", sorted(large_models.LIMITS))
@pytest.mark.parametrize("operation", sorted(large_models.OPERATIONS))
def test_sizes_of_models(operation: str, limit: str, on_device: OnDevice, passes: Passes) -> None:
    """Operations of a training step are right with more elements than 31 and 32 bits can count."""
    count = large_models.LIMITS[limit]
    skips.if_lacking(on_device(large_models.lacks, operation=operation, limit=count))
    passes(large_models.check, operation=operation, limit=count, timeout_s=300)


@pytest.mark.long
@pytest.mark.tier("standard")
def test_no_silent_corruption(
    ranks: int, acceptance: AcceptanceSession, launch: Launch, record_metric: RecordMetric
) -> None:
    """Matrix products at full power give the same bits at every repeat and on every device."""
    seconds = SCREEN_S[acceptance.tier] if acceptance.vendor != "cpu" else 0.5
    acceptance.ended.expect(seconds)
    found = launch("corruption_screen.py", seconds, nproc=ranks, timeout_s=seconds + 90)["devices"]
    differing = sum(len(one["differences"]) + (one["golden"] != one["expected"]) for one in found)
    margins.record(record_metric, margins.of(differing, 0), sum(2 * one["repeats"] for one in found))
    assert len(found) == ranks, f"{len(found)} devices were tested, expected {ranks}"
    wrong = [f"rank {rank}: {text}" for rank, one in enumerate(found) for text in one["differences"]]
    assert not wrong, "bits changed between repeats\n" + "\n".join(wrong)
    odd = [
        f"rank {rank}: {one['golden']}" for rank, one in enumerate(found) if one["golden"] != one["expected"]
    ]
    assert not odd, f"wrong product of integers, expected checksum {found[0]['expected']}: {odd}"
    sums = {(one["inputs"], one["checksum"]) for one in found}
    assert len(sums) == 1, f"devices gave different results for the same product: {found}"
