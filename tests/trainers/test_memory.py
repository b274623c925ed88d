"""The least memory of a job lies under what H200s measured, and a job above a device's memory is refused."""

import dataclasses
import os
from pathlib import Path

import pytest
import torch
from figures import figure

import fit
import memory
import options
import plan
import presets
import world
from errors import RefusedError
from layouts import prepare

ZERO1 = "--parallel zero1 --reduce bf16 --precision bf16"
ONE = f"{ZERO1} --moments bf16"
FSDP2 = "--size 8b --layers 8 --precision bf16 --reduce bf16"
# flags, ranks, samples a rank, GiB allocated: docs/results/training-h200.md
MEASURED = [
    (f"--size 8b {ONE}", 1, 2, 123.4),
    (f"--size 8b {ZERO1}", 2, 2, 115.9),
    (f"--size 8b {ZERO1}", 4, 2, 97.2),
    (f"--model mpt --size 7b {ONE}", 1, 4, 96.1),
    (f"--model mistral --size 7b-window1024 {ONE}", 1, 1, 106.9),
    (f"--size 70b --layers 8 {ONE}", 1, 1, 104.9),
    (f"--model flux --size dev-512 --recompute full {ONE}", 1, 4, 113.9),
    (f"--model gpt --size 22b --layers 4 {ONE}", 1, 4, 28.5),
    (f"--model moe --size zaya1-like {ONE}", 1, 2, 104.1),
    (f"{FSDP2} --no-reshard", 1, 2, 62.0),
    (FSDP2, 1, 2, 57.8),
    (f"{FSDP2} --no-reshard --recompute full", 1, 2, 45.0),
    ("--size 8b --precision bf16 --reduce bf16 --no-reshard --global-batch 4", 2, 1, 112.0),
    ("--size 8b --precision bf16 --reduce fp32 --no-reshard --global-batch 4", 2, 1, 129.0),
]
MI300X = 206158430208


def need(flags: str, ranks: int, samples: int) -> memory.Need:
    parsed = options.parse(flags.split())
    preset = presets.find(parsed.model, parsed.size, layers=parsed.layers)
    return memory.need(parsed, preset, ranks=ranks, micro_batch=samples)


@pytest.mark.parametrize(("flags", "ranks", "samples", "measured"), MEASURED)
def test_the_least_lies_under_what_was_measured(
    flags: str, ranks: int, samples: int, measured: float
) -> None:
    found, fused = need(flags, ranks, samples), flags.startswith("--size") and "zero1" in flags
    assert 0.75 * measured < found.least / memory.GIB < measured
    how = options.parse([*flags.split(), *(["--implementation", "fused"] if fused else [])])
    # What a table plans with: a job that it tries should not run out of memory.
    assert 0.96 * measured < fit.planned(found, how) / memory.GIB < 1.2 * measured


def test_gradients_left_in_place_take_no_memory_beside_the_activations() -> None:
    flags = f"--model flux --size dev-512 {ONE}"
    flat, apart = need(flags, 1, 4), need(f"{flags} --no-flat-gradients", 1, 4)
    assert flat.least - apart.least == figure(min(flat.gradients, flat.activations))


@pytest.mark.parametrize("flags", ["", "--precision bf16", "--precision bf16 --reduce bf16"])
def test_gradients_that_are_reduced_each_time_are_never_whole(flags: str) -> None:
    job = f"--size 8b --no-reshard {flags}"
    whole, each = need(f"{job} --global-batch 4", 2, 1), need(f"{job} --global-batch 4 --reduce-each", 2, 1)
    assert (each.gradients, each.gradients_stay) == (need(job, 2, 1).gradients, False)
    assert (whole.gradients_stay, each.between) == (True, whole.between), "weights stay gathered in both"


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 7, 8])
def test_every_other_block_keeps_its_input_alone_and_is_whole_while_backward_runs_it(layers: int) -> None:
    parsed = options.parse(["--size", "8b", *ONE.split(), "--recompute", "half"])
    preset = presets.find("llama", "8b", layers=layers)
    model = prepare.skeleton(presets.MODELS["llama"], preset.config, loss_chunks=1)
    again = prepare.recomputed(model, parsed)
    block = need(f"--size 8b {ONE} --layers 1", 1, 1).activations
    only_input = 2.0 * preset.config.width * preset.seq_len
    held = [only_input if layer in again else block for layer in model.blocks.values()]
    most = max(sum(held[:layer]) + block for layer in range(layers))
    assert need(f"--size 8b {ONE} --recompute half --layers {layers}", 1, 1).activations == most


def test_a_job_that_fits_once_every_other_block_is_recomputed_runs_and_is_what_the_refusal_names() -> None:
    preset = presets.find("llama", "8b")
    none, half = (
        options.parse(["--size", "8b", *ONE.split(), "--recompute", which]) for which in ("none", "half")
    )
    needs = [memory.need(one, preset, ranks=1, micro_batch=4).least for one in (none, half)]
    present = sum(needs) / 2
    memory.require(half, preset, ranks=1, micro_batch=4, present=present)
    with pytest.raises(RefusedError, match=r"this fits: --recompute half --micro-batch 4$"):
        memory.require(none, preset, ranks=1, micro_batch=4, present=present)


def test_the_logits_are_those_of_one_chunk_and_whole_ones_are_counted_whole() -> None:
    zaya = f"--model moe --size zaya1-like {ONE}"
    chunk = 2 * 262272 * 8192
    assert [need(zaya, 1, samples).logits for samples in (1, 2, 4)] == [chunk / 2, chunk, chunk]
    assert need(f"{zaya} --loss-chunks 1", 1, 4).logits == 10 * 262272 * 4 * 4096
    assert need(f"--size 8b {ONE} --implementation fused", 1, 2).logits == 2 * 128256 * 4096


def test_a_job_whose_largest_weight_does_not_fit_beside_its_state_is_refused_with_that_sum() -> None:
    found = need(f"--model moe --size zaya1-like {ONE}", 1, 1)
    small = dataclasses.replace(found, activations=0.0, logits=0.0)
    assert small.least == found.state + found.gradients + 8 * 262272 * 2048
    assert str(small).endswith("+ weights being drawn 4.3 = 92.3 GB")


def test_the_70b_job_that_does_not_fit_is_refused_with_arithmetic_and_with_the_one_that_fits() -> None:
    parsed, preset = (
        options.parse(["--size", "70b", "--precision", "bf16", "--no-reshard"]),
        presets.find("llama", "70b"),
    )
    said = (
        r"each of 8 ranks needs at least state 105\.8 \+ gathered 141\.1 \+ .* GB, a device has 206\.2 GB; "
        r"this fits: --reshard --recompute full --micro-batch 4"
    )
    with pytest.raises(RefusedError, match=said):
        memory.require(parsed, preset, ranks=8, micro_batch=4, present=MI300X)
    with pytest.raises(RefusedError, match="no flag makes it fit: take more GPUs, or --layers"):
        memory.require(parsed, preset, ranks=2, micro_batch=1, present=MI300X)
    fits = options.parse(["--size", "70b", "--precision", "bf16", "--recompute", "full"])
    memory.require(fits, preset, ranks=8, micro_batch=4, present=MI300X)


def test_fsdp1_needs_all_weights_on_each_device_before_it_shards_them() -> None:
    flags = "--size 70b --precision bf16 --recompute full --parallel"
    assert need(f"{flags} fsdp2", 8, 1).least < MI300X
    whole = need(f"{flags} full_shard", 8, 1)
    assert str(whole) == "weights before sharding 282.2 = 282.2 GB"
    assert whole.least > MI300X


@pytest.mark.parametrize("ranks", [1, 4])
def test_on_processors_a_rank_has_its_share_of_the_host(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(world, "host_memory", lambda: 8 * 10**9)
    here = world.World(0, ranks, torch.device("cpu"), None)  # type: ignore[arg-type]
    assert here.memory() == 8 * 10**9 // ranks
    parsed = options.parse(["--size", "8b"])
    with pytest.raises(RefusedError, match=rf"its share of the host is {8 / ranks:.1f} GB"):
        plan.settle(parsed, presets.find("llama", "8b"), here)
    plan.settle(options.parse([]), presets.find("llama", "tiny"), here)


GROUPS = {
    "version 2": ({"memory.max": "5000"}, "0::/", 5000),
    "version 2, a group inside": ({"memory.max": "max", "a/b/memory.max": "3000"}, "0::/a/b", 3000),
    "the smaller of two": ({"memory.max": "2000", "a/memory.max": "3000"}, "0::/a", 2000),
    "a group above": ({"a/memory.max": "900", "a/b/memory.max": "max"}, "0::/a/b", 900),
    "version 1": ({"memory/a/memory.limit_in_bytes": "700"}, "4:memory:/a\n3:cpu:/b", 700),
    "no limit": ({"memory.max": "max"}, "0::/", None),
    "none at all": ({}, "0::/", None),
}


@pytest.mark.parametrize("name", GROUPS)
def test_the_limit_of_a_control_group_is_the_memory_of_its_host(name: str, tmp_path: Path) -> None:
    files, groups, limit = GROUPS[name]
    written = {f"sys/fs/cgroup/{at}": said for at, said in files.items()} | {"proc/self/cgroup": groups}
    for path, text in written.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{text}\n")
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert world.host_memory(tmp_path) == (limit or whole)
