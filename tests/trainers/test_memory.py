"""The least memory of a job lies under what H200s measured; what a job holds at once, built or trained."""

import contextlib
import dataclasses
import importlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import one_rank
import pytest
import torch
import torch.distributed as dist
from figures import figure
from held import Held
from torch import nn

import fit
import memory
import options
import options as cli
import plan
import plan as plans
import presets
import record
import world
from errors import RefusedError
from fused import ops
from layouts import flat, flat_unit, fsdp2, prepare, zero1
from layouts import job as layouts
from models import layers, llama

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
def test_the_least_lies_under_what_was_measured(flags, ranks, samples, measured):
    found, fused = need(flags, ranks, samples), flags.startswith("--size") and "zero1" in flags
    assert 0.75 * measured < found.least / memory.GIB < measured
    how = options.parse([*flags.split(), *(["--implementation", "fused"] if fused else [])])
    # What a table plans with: a job that it tries should not run out of memory.
    assert 0.96 * measured < fit.planned(found, how) / memory.GIB < 1.2 * measured


def test_the_record_has_the_peaks_of_the_largest_rank_beside_the_plan():
    parsed = options.parse(FSDP2.split())
    run = SimpleNamespace(options=parsed, world=SimpleNamespace(size=2), plan=SimpleNamespace(micro_batch=2))
    ranks = [{"allocated_gib": 40.0, "reserved_gib": 50.0}, {"allocated_gib": 41.0, "reserved_gib": 42.0}]
    least = need(FSDP2, 2, 2).least / memory.GIB
    assert record.peak_memory(run, ranks) == {**ranks[1], "least_gib": least}  # type: ignore[arg-type]


def test_gradients_left_in_place_take_no_memory_beside_the_activations():
    flags = f"--model flux --size dev-512 {ONE}"
    flat, apart = need(flags, 1, 4), need(f"{flags} --no-flat-gradients", 1, 4)
    assert flat.least - apart.least == figure(min(flat.gradients, flat.activations))


@pytest.mark.parametrize("flags", ["", "--precision bf16", "--precision bf16 --reduce bf16"])
def test_gradients_that_are_reduced_each_time_are_never_whole(flags):
    job = f"--size 8b --no-reshard {flags}"
    whole, each = need(f"{job} --global-batch 4", 2, 1), need(f"{job} --global-batch 4 --reduce-each", 2, 1)
    assert (each.gradients, each.gradients_stay) == (need(job, 2, 1).gradients, False)
    assert (whole.gradients_stay, each.between) == (True, whole.between), "weights stay gathered in both"


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 7, 8])
def test_every_other_block_keeps_its_input_alone_and_is_whole_while_backward_runs_it(layers):
    parsed = options.parse(["--size", "8b", *ONE.split(), "--recompute", "half"])
    preset = presets.find("llama", "8b", layers=layers)
    model = prepare.skeleton(presets.MODELS["llama"], preset.config, loss_chunks=1)
    again = prepare.recomputed(model, parsed)
    block = need(f"--size 8b {ONE} --layers 1", 1, 1).activations
    only_input = 2.0 * preset.config.width * preset.seq_len
    held = [only_input if layer in again else block for layer in model.blocks.values()]
    most = max(sum(held[:layer]) + block for layer in range(layers))
    assert need(f"--size 8b {ONE} --recompute half --layers {layers}", 1, 1).activations == most


def test_a_job_that_fits_once_every_other_block_is_recomputed_runs_and_is_what_the_refusal_names():
    preset = presets.find("llama", "8b")
    none, half = (
        options.parse(["--size", "8b", *ONE.split(), "--recompute", which]) for which in ("none", "half")
    )
    needs = [memory.need(one, preset, ranks=1, micro_batch=4).least for one in (none, half)]
    present = sum(needs) / 2
    memory.require(half, preset, ranks=1, micro_batch=4, present=present)
    with pytest.raises(RefusedError, match=r"this fits: --recompute half --micro-batch 4$"):
        memory.require(none, preset, ranks=1, micro_batch=4, present=present)


def test_the_logits_are_those_of_one_chunk_and_whole_ones_are_counted_whole():
    zaya = f"--model moe --size zaya1-like {ONE}"
    chunk = 2 * 262272 * 8192
    assert [need(zaya, 1, samples).logits for samples in (1, 2, 4)] == [chunk / 2, chunk, chunk]
    assert need(f"{zaya} --loss-chunks 1", 1, 4).logits == 10 * 262272 * 4 * 4096
    assert need(f"--size 8b {ONE} --implementation fused", 1, 2).logits == 2 * 128256 * 4096


def test_a_job_whose_largest_weight_does_not_fit_beside_its_state_is_refused_with_that_sum():
    found = need(f"--model moe --size zaya1-like {ONE}", 1, 1)
    small = dataclasses.replace(found, activations=0.0, logits=0.0)
    assert small.least == found.state + found.gradients + 8 * 262272 * 2048
    assert str(small).endswith("+ weights being drawn 4.3 = 92.3 GB")


def test_the_70b_job_that_does_not_fit_is_refused_with_arithmetic_and_with_the_one_that_fits():
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


def test_fsdp1_needs_all_weights_on_each_device_before_it_shards_them():
    flags = "--size 70b --precision bf16 --recompute full --parallel"
    assert need(f"{flags} fsdp2", 8, 1).least < MI300X
    whole = need(f"{flags} full_shard", 8, 1)
    assert str(whole) == "weights before sharding 282.2 = 282.2 GB"
    assert whole.least > MI300X


@pytest.mark.parametrize("ranks", [1, 4])
def test_on_processors_a_rank_has_its_share_of_the_host(ranks, monkeypatch):
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
def test_the_limit_of_a_control_group_is_the_memory_of_its_host(name, tmp_path):
    files, groups, limit = GROUPS[name]
    written = {f"sys/fs/cgroup/{at}": said for at, said in files.items()} | {"proc/self/cgroup": groups}
    for path, text in written.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{text}\n")
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert world.host_memory(tmp_path) == (limit or whole)


# ZAYA1-like and GPT, made small: most weights lie in the blocks, the largest one is the tied embedding.
MOE = dataclasses.replace(
    presets.find("moe", "tiny").config, layers=6, width=128, ffn=256, vocab=8192, tied=True
)
GPT = dataclasses.replace(presets.find("gpt", "tiny").config, layers=6, width=128, vocab=8192)
ZERO1_JOB = ("--parallel", "zero1", "--device", "cpu", "--precision", "bf16", "--reduce", "bf16")


@pytest.mark.parametrize(("model", "config"), [("moe", MOE), ("gpt", GPT)], ids=["moe", "gpt"])
def test_zero1_holds_one_weight_beside_its_state_while_it_is_built(model, config, monkeypatch):
    monkeypatch.setattr(flat_unit, "PIECE", 4096)
    options = cli.parse(["--model", model, "--size", "tiny", *ZERO1_JOB, "--moments", "bf16"])
    preset = dataclasses.replace(presets.find(model, "tiny"), config=config)
    need = memory.need(options, preset, ranks=1, micro_batch=1)
    assert need.making == memory.DRAWN * config.vocab * config.width
    with one_rank.joined(options) as ranks:
        plan, held = plans.settle(options, preset, ranks), Held()
        with held:
            job = layouts.create(options, preset, plan, ranks)
        built = dict(job.weights())
    # The state is there with its padding, and on a CPU with a second buffer of gradients.
    assert need.state + need.gradients < held.now < 1.2 * (need.state + 2 * need.gradients)
    # Of all weights in float32 it was more than twice as much.
    assert need.making / 2 < held.peak - held.now < 1.1 * need.making
    for name, value in built.items():
        drawn = prepare.initial_value(name, value.shape, config.layers, options, torch.device("cpu"))
        assert torch.equal(value, drawn), name


def test_pieces_fill_the_slice_of_a_rank_as_the_whole_does():
    exact = torch.randn(100)
    high, low = torch.empty(100, dtype=torch.bfloat16), torch.empty(100, dtype=torch.int16)
    ops.split(exact, high, low)
    for mine in (slice(0, 50), slice(50, 100)):
        unit = SimpleNamespace(
            mine=mine, weights=torch.zeros(100, dtype=torch.bfloat16), low=torch.zeros(50, dtype=torch.int16)
        )
        for at in range(0, 100, 30):
            flat_unit.FlatUnit.hold(unit, exact[at : at + 30], at)  # type: ignore[arg-type]
        assert torch.equal(unit.weights, high)
        assert torch.equal(unit.low, low[mine])


def test_a_tied_models_checkpoint_says_that_its_blocks_lie_apart():
    tied, plain = cli.parse(["--model", "gpt", "--size", "tiny", *ZERO1_JOB]), cli.parse([*ZERO1_JOB])
    assert layouts.kept_as(tied, presets.find("gpt", "tiny")) == "zero1 --tp 1 --pp 1, in rows, blocks apart"
    assert layouts.kept_as(plain, presets.find("llama", "tiny")) == "zero1 --tp 1 --pp 1, in rows"


@pytest.mark.parametrize("parallel", ["fsdp2", "zero1"])
def test_a_checkpoint_of_a_pipeline_that_untied_the_embedding_is_not_taken_for_one_of_its_copies(parallel):
    job = ("--size", "tiny", "--parallel", parallel, "--pp", "2")
    tied, plain = (
        layouts.kept_as(cli.parse(["--model", model, *job]), presets.find(model, "tiny"))
        for model in ("gpt", "llama")
    )
    assert tied != plain
    assert "copies of the tied embedding" in (tied or "")


def peak_of_loss(tokens: int) -> int:
    vocab, width = 262272 // 64, 16
    head = layers.LossHead(nn.RMSNorm(width), nn.Linear(width, vocab, bias=False), layers.BY_ROWS)
    x, labels = torch.randn(1, tokens, width, requires_grad=True), torch.randint(vocab, (1, tokens))
    with Held() as held:
        head(x, labels).backward()
    return held.peak


def test_the_loss_holds_one_chunk_of_logits_whatever_the_number_of_tokens(monkeypatch):
    monkeypatch.setattr(layers, "ROWS", 64)
    chunk = 64 * (262272 // 64) * 4
    two, sixteen = peak_of_loss(128), peak_of_loss(1024)
    assert sixteen - two < chunk / 2, "what grows with the tokens is as wide as the model"
    assert sixteen > chunk


@contextlib.contextmanager
def one_of(size: int, rank: int = 0) -> Iterator[world.World]:
    """One of so many ranks of which the others do not exist: what they send is not awaited."""
    store = importlib.import_module("torch.testing._internal.distributed.fake_pg").FakeStore()
    dist.init_process_group("fake", store=store, rank=rank, world_size=size)
    with mock.patch("signal.signal"):
        yield world.World(rank=rank, size=size, device=torch.device("cpu"), stop=world.Stop())
    dist.destroy_process_group()


@pytest.fixture
def one_of_eight() -> Iterator[world.World]:
    with one_of(8) as ranks:
        yield ranks


RANKS = (1, 2, 3, 5, 7, 8, 12, 24, 56, 72, 100, 256, 512, 1000, 1024, 2048, 16384)


@pytest.mark.parametrize(("model", "size"), [("llama", "8b"), ("llama", "70b"), ("mpt", "125m")])
def test_any_number_of_ranks_shares_a_buffer_in_rows_and_wastes_less_than_a_row_of_each(model, size):
    skeleton = prepare.skeleton(presets.MODELS[model], presets.find(model, size).config, loss_chunks=1)
    for name, unit in (*prepare.units(skeleton), ("", skeleton)):
        _, _, length = flat.offsets(unit, name)
        for ranks in RANKS:
            part = flat_unit.share(length, ranks)
            assert part % flat.ALIGN == 0
            assert length <= part * ranks < length + flat.ALIGN * ranks


@pytest.mark.parametrize(("ranks", "rank"), [(3, 2), (512, 0), (512, 511), (16384, 7000), (16384, 16383)])
def test_a_rank_of_many_keeps_the_rows_that_torch_expects_of_it(ranks, rank):
    options = cli.parse(["--size", "tiny", *ZERO1_JOB])
    with one_of(ranks, rank) as here:
        preset = presets.find("llama", "tiny")
        job = zero1.Zero1(prepare.skeleton(llama, preset.config, loss_chunks=1), options, here)
        for unit in job.units:
            kept = job.state()[f"{job.units.index(unit)}.mean"]
            whole = torch.empty(unit.length // flat.ALIGN, flat.ALIGN)
            chunks = whole.chunk(ranks)
            want = chunks[rank].shape[0] if rank < len(chunks) else 0
            assert kept.shape == whole.shape
            assert kept.to_local().shape == (want, flat.ALIGN)


def test_fsdp2_holds_one_unit_beside_its_shards_while_it_is_built(one_of_eight):
    options = cli.parse(["--size", "tiny", "--device", "cpu"])
    config = dataclasses.replace(presets.find("llama", "tiny").config, layers=16, width=128, ffn=512)
    model = prepare.skeleton(llama, config, loss_chunks=1)
    sizes = [4 * sum(x.numel() for x in unit.parameters()) for _, unit in prepare.units(model)]
    every = 4 * sum(parameter.numel() for parameter in model.parameters())
    with Held() as held:
        job = fsdp2.Fsdp2(model, options, one_of_eight)
    assert all(parameter.numel() and not parameter.is_meta for parameter in job.model.parameters())
    assert every / 8 <= held.now < 1.1 * every / 8
    # Drawing a weight needs it twice, and a shard is padded. All weights at once were eight times the shards.
    assert held.peak - held.now < 2 * max(sizes) < every / 4
