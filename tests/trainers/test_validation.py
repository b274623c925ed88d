"""--validate-every: the loss of held-out samples, and not one bit of the training changed by it."""

import dataclasses
import json
from pathlib import Path

import layout_flags
import pytest
import torch
from agree import same_bits, same_sums

import data
import initial
import options
import plan
import validation
import whole
from models import llama

TEXT = Path(__file__).resolve().parents[2] / "trainers" / "text.txt"
JOB = ("--steps", "5", "--global-batch", "8", "--seed", "3")
EACH = ("--validate-every", "2", "--validation-batches", "2", "--validation-data")
NAMES = ("fsdp2-accumulated", "fsdp2-kept-gathered", "hsdp", "full-shard", "shard-grad-op")
LAYOUTS = {name: layout_flags.LAYOUTS[name] for name in (*NAMES, "zero1-accumulated", "tensor")} | {
    "own-gradients": (1, "--parallel", "zero1", "--no-flat-gradients", "--micro-batch", "4"),
    "fused": (2, "--parallel", "zero1", "--implementation", "fused", "--precision", "bf16"),
    "fused-fp8": (2, "--parallel", "zero1", "--implementation", "fused", "--precision", "fp8"),
    "fp8": (2, "--precision", "fp8"),
    "recompute": (2, "--recompute", "full", "--loss-chunks", "4"),
    "moe": (2, "--model", "moe"),
    "flux": (1, "--model", "flux"),
}


@layout_flags.each(LAYOUTS, quick={"fsdp2-accumulated", "fused-fp8"})
def test_validation_changes_no_bit_of_the_training(layout, tmp_path, record):
    ranks, *flags = LAYOUTS[layout]
    flags += ["--checkpoint-every", "2", "--full-every", "2", "--checkpoint"]
    without = record(ranks, *JOB, *flags, str(tmp_path / "without"))
    got = record(ranks, *JOB, *flags, str(tmp_path / "with"), *EACH, "synthetic")
    assert [entry["step"] for entry in got["validation"]] == [2, 4, 5]
    assert all(entry["loss"] > 0 for entry in got["validation"])
    assert got["digest"] == without["digest"]
    for name in ("losses", "gradient_norms"):
        same_bits(got[name], without[name])
    for step in (2, 4):
        of = [tmp_path / job / f"step_{step:08}" / "weights.safetensors" for job in ("without", "with")]
        assert of[0].read_bytes() == of[1].read_bytes()


def by_hand(folder: Path, given: options.Options, numbers: range) -> torch.Tensor:
    """The loss of whole weights by a plain model, over samples that are read here."""
    config = initial.preset(given).config
    model = llama.Model(config)
    model.load_state_dict(whole.read(folder / "weights.safetensors"))
    held = dataclasses.replace(given, data=given.validation_data, seed=validation.SEED)
    source = data.open_source(held, vocab=config.vocab, seq_len=initial.preset(given).seq_len)
    with torch.no_grad():
        loss: torch.Tensor = model(**data.batch(source, numbers, torch.device("cpu")))
    return loss


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(1,), (2, "--micro-batch", "2"), (2, "--parallel", "zero1")], ids=str)
def test_the_figure_is_the_loss_of_the_weights_of_that_step(flags, tmp_path, record):
    ranks, *more = flags
    lines = tmp_path / "lines"
    kept = ("--checkpoint-every", "2", "--full-every", "2", "--checkpoint", str(tmp_path / "kept"))
    words = [*JOB, *more, *kept, *EACH, str(TEXT), "--progress", str(lines)]
    got = record(ranks, *words)
    for entry in got["validation"]:
        folder = tmp_path / "kept" / f"step_{entry['step']:08}"
        same_sums(torch.tensor(entry["loss"]), by_hand(folder, options.parse(words), range(16)))
    said = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [x["validation_loss"] for x in said if "validation_loss" in x] == [
        entry["loss"] for entry in got["validation"]
    ]


def test_validation_samples_are_those_of_no_seed_of_the_job_and_equal_for_all():
    def sample(seed: str) -> torch.Tensor:
        parsed = options.parse(["--seed", seed, *EACH, "synthetic"])
        preset = initial.preset(parsed)
        sizes = plan.Plan.__dataclass_fields__
        made = plan.Plan(**dict.fromkeys(sizes, 0) | {"seq_len": 16})
        held = validation.Validation(parsed, preset, made, None)  # type: ignore[arg-type]
        assert held.feed.source is not None
        return held.feed.source.sample(0)

    same_bits(sample("1"), sample("2"))
    source = data.open_source(options.parse([]), vocab=128, seq_len=16)
    assert all(not torch.equal(sample("1"), source.sample(number)) for number in range(64))
