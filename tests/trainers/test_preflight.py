"""An unfit machine is told from slow software, and the attention that ran from the one that was asked for."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import attention_backend
import peaks
import preflight
import record

TRAINERS = Path(preflight.__file__).parent
H200 = peaks.of_model("H200")


def found(rates: list[float], copy: float = 4200.0, busbw: float = 300.0) -> dict:
    return {
        "gemm": [{"dtype": "bf16", "m": 8192, "n": 8192, "k": 8192, "tflops": min(rates), "per_rank": rates}],
        "copy": {"bytes": 1, "gb_per_s": copy, "per_rank": [copy]},
        "collectives": [{"op": "all_gather", "bytes": 1, "busbw_gb_per_s": busbw}],
    }


def test_a_healthy_machine_is_fit():
    assert preflight.problems(found([790.0, 801.0]), H200) == []


@pytest.mark.parametrize(
    ("figures", "says"),
    [
        (found([300.0, 310.0]), "under 40% of 989"),
        (found([600.0, 800.0]), "rank 0 reaches 600.0"),
        (found([float("nan"), 800.0]), "nan"),
        (found([0.0, 0.0]), "0.0"),
        (found([800.0], copy=float("inf")), "inf"),
        (found([800.0], busbw=0.0), "0.0"),
    ],
    ids=["slow", "straggler", "nan", "zero", "copy", "collective"],
)
def test_an_unfit_machine_is_named(figures, says):
    assert says in "; ".join(preflight.problems(figures, H200))


def test_the_ceiling_is_of_the_jobs_own_precision():
    two = found([800.0])
    two["gemm"].append({"dtype": "fp8", "m": 1, "n": 1, "k": 1, "tflops": 1450.0, "per_rank": [1450.0]})
    assert preflight.ceiling(two, "bf16") == 800.0
    assert preflight.ceiling(two, "fp8-rowwise") == 1450.0
    assert preflight.ceiling(found([800.0]), "fp8") is None
    assert preflight.ceiling(None, "bf16") is None


CUDNN = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128"
FLASH = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64>>"
CUTLASS = "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel)"
GEMM = "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT"


@pytest.mark.parametrize(
    ("kernels", "operators", "ran"),
    [
        ({CUDNN, GEMM}, {"aten::_scaled_dot_product_cudnn_attention"}, "cudnn"),
        ({FLASH}, {"aten::_scaled_dot_product_flash_attention"}, "flash"),
        ({"attn_fwd.kd"}, {"aten::_scaled_dot_product_flash_attention"}, "flash"),
        ({CUTLASS}, {"aten::_scaled_dot_product_efficient_attention"}, "efficient"),
        ({GEMM}, {"aten::_scaled_dot_product_attention_math"}, "math"),
        ({GEMM}, {"aten::_scaled_dot_product_flash_attention"}, "flash"),
        ({CUDNN, FLASH}, set(), "cudnn+flash"),
        ({GEMM}, set(), None),
    ],
)
def test_the_kernels_name_the_backend_that_ran(kernels, operators, ran):
    assert attention_backend.chosen(operators, kernels, gpu=True)["backend"] == ran


def test_where_stored_graphs_cannot_be_told_apart_none_is_used(monkeypatch):
    from torch._inductor import config

    monkeypatch.delattr(torch.compiler, "config")
    asked, gpu = Asked("flash"), SimpleNamespace(gpu=True)
    with attention_backend.order(asked, gpu):
        assert not config.fx_graph_cache
    monkeypatch.undo()
    with attention_backend.order(asked, gpu):
        assert torch.compiler.config.cache_key_tag == "attention=FLASH_ATTENTION"
    assert torch.compiler.config.cache_key_tag == ""


class Asked:
    def __init__(self, attention: str, precision: str = "bf16") -> None:
        self.attention, self.precision = attention, precision


def test_a_silent_fallback_is_a_problem_of_the_record():
    seen = attention_backend.chosen({"aten::_scaled_dot_product_flash_attention"}, {FLASH}, gpu=True)
    slow = attention_backend.chosen({"aten::_scaled_dot_product_attention_math"}, {GEMM}, gpu=True)
    assert record.fallback(Asked("auto"), seen, gpu=True) == []
    assert record.fallback(Asked("flash"), seen, gpu=True) == []
    assert "cudnn was asked for and flash ran" in record.fallback(Asked("cudnn"), seen, gpu=True)[0]
    compiled = attention_backend.chosen({"aten::bmm"}, {GEMM}, gpu=True)
    assert record.fallback(Asked("math"), compiled, gpu=True) == [], "products and no name of attention"
    assert "math was asked for and flash ran" in record.fallback(Asked("math"), seen, gpu=True)[0]
    assert "no fused attention" in record.fallback(Asked("auto"), slow, gpu=True)[0]
    assert record.fallback(Asked("auto", "fp32"), slow, gpu=True) == []


def test_a_run_with_a_preflight_keeps_its_figures_and_phases():
    done = subprocess.run(
        [sys.executable, TRAINERS / "train.py", "--steps", "6", "--preflight", "--no-digest"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    kept = json.loads(lines[-1])
    assert kept["extra"]["preflight"]["gemm"][0]["tflops"] > 0
    assert kept["extra"]["attention"]["backend"] == "flash"
    names = ["import", "connect", "preflight", "build", "compile", "warm-up", "timed", "check"]
    assert list(kept["phases_s"]) == names
    assert [line.split("] ")[1] for line in lines[1:-1]] == [*names[1:], "record"]


HANG = """
import sys, time
sys.path.insert(0, {trainers!r})
from phases import Phases
phases = Phases(1.0)
phases.enter("compile")
def stuck_in_a_collective():
    time.sleep(60)
stuck_in_a_collective()
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_phase_that_hangs_ends_with_the_stacks_of_this_rank(rank):
    done = subprocess.run(
        [sys.executable, "-c", HANG.format(trainers=str(TRAINERS))],
        capture_output=True, text=True, check=False, env={**os.environ, "RANK": str(rank)},
    )  # fmt: skip
    assert done.returncode == 6
    assert f"rank {rank}: compile lasted more than 1 s" in done.stderr
    assert "stuck_in_a_collective" in done.stderr
    assert ("compile" in done.stdout) == (rank == 0)
