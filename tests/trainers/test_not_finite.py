"""NaN and Inf pass every kernel of the fused layer as they pass its reference, and go from every kind of
tensor to the gradient norm; a job stops there, or skips the step, and says so.
"""

import itertools
import json
from pathlib import Path

import pytest
import torch
from agree import same_bits, same_sums

from fused import ops
from harness.processes import WorkloadError

pytest.importorskip("triton", reason="triton is not installed")
from fused import triton_ops as kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BAD = (float("nan"), float("inf"), float("-inf"))
ROWS, WIDTH, FFN = 6, 96, 100
DRAWS = range(8)


def drawn(*shape: int, bad: float, random: torch.Generator) -> torch.Tensor:
    """Normal bfloat16 numbers with `bad` at one drawn place."""
    x = torch.randn(*shape, generator=random)
    x.view(-1)[int(torch.randint(x.numel(), (), generator=random))] = bad
    return x.to(DEVICE, torch.bfloat16)


def same_kind(got: torch.Tensor | None, want: torch.Tensor | None) -> None:
    """Both have NaN at the same places, and are finite at the same places."""
    assert (got is None) == (want is None)
    if got is not None and want is not None:
        assert torch.equal(got.float().isnan(), want.float().isnan())
        assert torch.equal(got.float().isfinite(), want.float().isfinite())


@pytest.fixture(params=[(bad, draw) for bad in BAD for draw in DRAWS], ids=str)
def plant(request) -> tuple[float, torch.Generator]:
    bad, draw = request.param
    return bad, torch.Generator().manual_seed(draw)


def top() -> torch.Tensor:
    return torch.zeros((), device=DEVICE)


def test_the_largest_value_and_the_copies_in_8_bits(plant):
    bad, random = plant
    x = drawn(ROWS, WIDTH, bad=bad, random=random)
    largest = kernels.amax(x)
    same_kind(largest, ops.amax(x))
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        row, col, inverse = kernels.cast(x, largest, dtype, row=True, col=True)
        want_row, want_col, want_inverse = ops.cast(x, ops.amax(x), dtype, row=True, col=True)
        same_kind(inverse, want_inverse)
        for g, want in ((row, want_row), (col, want_col)):
            got, wanted = torch.as_tensor(g).float() * inverse, torch.as_tensor(want).float() * want_inverse
            assert torch.equal(got.isfinite(), wanted.isfinite())  # the interpreter's 8 bits have no NaN


@pytest.mark.parametrize("summed", [True, False])
def test_the_norm(plant, summed):
    bad, random = plant
    x, w = drawn(ROWS, WIDTH, bad=bad, random=random), torch.ones(WIDTH, device=DEVICE, dtype=torch.bfloat16)
    y, got_top, want_top = torch.zeros_like(x) if summed else None, top(), top()
    got, want = kernels.add_norm(x, y, w, 1e-5, got_top), ops.add_norm(x, y, w, 1e-5, want_top)
    for g, r in zip((*got, got_top), (*want, want_top), strict=True):
        same_kind(g, r)


@pytest.mark.parametrize("planted", ["input", "gradient"])
def test_swiglu_and_its_backward(plant, planted):
    bad, random = plant
    gu = drawn(ROWS, 2 * FFN, bad=bad if planted == "input" else 0.5, random=random)
    da = drawn(ROWS, FFN, bad=bad if planted == "gradient" else 0.5, random=random)
    got_top, want_top = top(), top()
    same_kind(kernels.swiglu(gu, got_top), ops.swiglu(gu, want_top))
    same_kind(got_top, want_top)
    got_top, want_top = top(), top()
    got = kernels.swiglu_backward_(da, gu.clone(), got_top)
    want = ops.swiglu_backward_(da, gu.clone(), want_top)
    for g, r in zip((*got, got_top), (*want, want_top), strict=True):
        same_kind(g, r)


PLANTED = Path(__file__).with_name("planted.py")
JOB = ("--steps", "4", "--global-batch", "4", "--micro-batch", "2", "--device", "cpu", "--no-backend-check")
FUSED = ("--parallel", "zero1", "--implementation", "fused")
LAYOUTS = {
    "fsdp2": (),
    "fsdp2 bf16": ("--precision", "bf16"),
    "fsdp1": ("--parallel", "full_shard"),
    "zero1 bf16": ("--parallel", "zero1", "--precision", "bf16"),
    "fused bf16": (*FUSED, "--precision", "bf16"),
    "fused fp8": (*FUSED, "--precision", "fp8"),
}
KINDS = ("weight", "attention", "norm", "mlp", "dq", "dk", "dv")
EACH = [
    pytest.param(kind, layout, value, marks=() if number % 6 == 0 else pytest.mark.slow)
    for number, ((kind, layout), value) in enumerate(
        zip(itertools.product(KINDS, LAYOUTS), itertools.cycle(("nan", "inf", "-inf")), strict=False)
    )
    if (kind, layout) != ("weight", "fsdp1")  # its whole weights are not in the parameters
]


@pytest.mark.parametrize(("kind", "layout", "value"), EACH)
def test_it_reaches_the_gradient_norm_from_every_kind_of_tensor(kind, layout, value, program):
    got = program(PLANTED, 1, kind, value, *JOB, *LAYOUTS[layout], "--not-finite", "skip")
    assert got["skipped_steps"] == [1]
    assert [norm is not None for norm in got["gradient_norms"]] == [True, False, True, True]
    assert got["problems"] == []


def test_a_job_stops_at_it_says_so_and_keeps_no_checkpoint_of_it(tmp_path, program):
    kept = ("--checkpoint", str(tmp_path), "--checkpoint-every", "1")
    kept += ("--record", str(tmp_path / "record.json"))
    with pytest.raises(WorkloadError, match="exited with 3"):
        program(PLANTED, 2, "dq", "nan", *JOB, "--micro-batch", "1", *kept)
    found = json.loads((tmp_path / "record.json").read_text())
    assert found["last_step"] == 2
    assert "a gradient norm is not finite" in found["problems"]
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_00000001"]


@pytest.mark.parametrize("parallel", ["fsdp2", "full_shard", "zero1"])
def test_a_skipped_step_leaves_the_weights_as_they_were(parallel, program, record):
    flags = (*JOB, "--parallel", parallel, "--not-finite", "skip")
    before = record(1, *flags, "--until", "1")
    after = program(PLANTED, 1, "mlp", "inf", *flags, "--until", "2")
    assert after["skipped_steps"] == [1]
    same_bits([after["digest"] == before["digest"]], [True])


def test_lines_of_progress_come_every_few_steps_and_as_json(tmp_path, record):
    file = tmp_path / "progress.jsonl"
    got = record(2, *JOB, "--micro-batch", "1", "--log-every", "2", "--progress", str(file))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4]
    for line in lines:
        at = line["step"] - 1
        same_sums([line["gradient_norm"], line["loss"]], [got["gradient_norms"][at], got["losses"][at]])
        assert line["tokens_per_s_per_gpu"] > 0
    assert lines[-1]["left_s"] == 0
