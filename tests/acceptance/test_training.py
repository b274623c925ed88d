"""Training end to end: a sharded job learns, its ranks agree, it resumes exactly, and it is as fast as it
should be.
"""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from harness.fixtures import Launch, RecordMetric

RANKS = 2
STEPS, RESUME_AT = 24, 11
TINY = ("--model", "llama", "--size", "tiny", "--data", "text", "--steps", STEPS, "--warmup", 5)
LARGE = (
    *("--size", "8b", "--precision", "bf16", "--parallel", "zero1", "--implementation", "fused"),
    *("--lr", "3e-5", "--warmup", 40, "--steps", 52, "--no-digest"),  # a minute: the power cap decides
)
LEARNED = 0.9  # of the first loss: the tiny model is at 0.7 here, an untrained or truncated curve at 1.0

Records = dict[str, Mapping[str, Any]]


@pytest.fixture(scope="module")
def kept() -> Records:
    """Records of this module's runs: three checks read one run."""
    return {}


@pytest.fixture
def trained(launch: Launch, kept: Records, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """One run of the tiny model on two ranks, with a checkpoint in the middle."""
    if "whole" not in kept:
        folder = tmp_path_factory.mktemp("training") / "whole"
        kept["whole"] = _train(
            launch, folder, *TINY, "--checkpoint-every", RESUME_AT, "--full-every", RESUME_AT
        )
    return kept["whole"]


def _train(launch: Launch, folder: Path, *arguments: object) -> Mapping[str, Any]:
    record = launch("train.py", *arguments, "--checkpoint", folder, nproc=RANKS, timeout_s=180)
    return {**record, "folder": str(folder)}


@pytest.mark.gpus(RANKS)
def test_loss_falls(trained: Mapping[str, Any], record_metric: RecordMetric) -> None:
    """A tiny Llama sharded over two ranks (FSDP2) learns: losses are finite and the last ones lower."""
    losses = trained["losses"]
    record_metric("train_loss_first", losses[0], unit="nats")
    record_metric("train_loss_last", losses[-1], unit="nats", repeats=losses)
    assert trained["problems"] == []
    assert len(losses) == STEPS
    assert all(math.isfinite(value) for value in losses + trained["gradient_norms"])
    assert all(value > 0 for value in trained["gradient_norms"])
    assert max(losses[-3:]) < LEARNED * losses[0]


@pytest.mark.gpus(RANKS)
def test_ranks_agree(trained: Mapping[str, Any]) -> None:
    """Both ranks hold bitwise the same losses, gradient norms and weights after the last step."""
    assert trained["world_size"] == RANKS
    assert len(trained["digest"]) == 64
    assert trained["ranks_agree"] is True


@pytest.mark.gpus(RANKS)
def test_resume_is_bit_equal(trained: Mapping[str, Any], launch: Launch, tmp_path: Path) -> None:
    """A run restarted from a checkpoint repeats the losses, norms and weights of the run that was not
    stopped.
    """
    source = Path(trained["folder"]) / f"step_{RESUME_AT:08}"
    assert json.loads((source / "COMPLETE").read_text())["step"] == RESUME_AT
    shutil.copytree(source, tmp_path / "again" / source.name)
    resumed = _train(launch, tmp_path / "again", *TINY)
    assert resumed["first_step"] == RESUME_AT
    assert resumed["losses"] == trained["losses"][RESUME_AT:]
    assert resumed["gradient_norms"] == trained["gradient_norms"][RESUME_AT:]
    assert resumed["digest"] == trained["digest"]


@pytest.mark.gpus(RANKS, perf=True)
def test_throughput(request: pytest.FixtureRequest, device_model: str, record_metric: RecordMetric) -> None:
    """Tokens per second and GPU reach the device's bound: Llama 3.1 8B on GPUs; the tiny job, unbounded, on
    a CPU.
    """
    if device_model == "CPU":
        record = request.getfixturevalue("trained")
    else:
        record = request.getfixturevalue("launch")("train.py", *LARGE, nproc=RANKS, timeout_s=400)
    assert record["problems"] == []
    value = record["performance"]["tokens_per_s_per_gpu"]
    ran = record["options"]
    conditions = {key: ran[key] for key in ("model", "size", "precision")}
    conditions |= {"seq": record["plan"]["seq_len"], "batch": record["plan"]["global_batch"]}
    unit, repeats = "tokens/s", record["performance"]["tokens_per_s_per_gpu_wall"]
    record_metric(
        "train_tokens_per_s_per_gpu", value, unit=unit, repeats=[repeats], conditions=conditions, gate=True
    )
    assert math.isfinite(value)
    assert value > 0
