"""What a job holds at once: while it is built, one weight beside ZeRO-1's state and one unit beside FSDP2's
shards; in the loss, one chunk of logits.
"""

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import one_rank
import pytest
import torch
import torch.distributed as dist
from held import Held
from torch import nn

import memory
import options as cli
import plan as plans
import presets
import world
from fused import ops
from layouts import flat, flat_unit, fsdp2, prepare, zero1
from layouts import job as layouts
from models import layers, llama, mpt

# ZAYA1-like and GPT, made small: most weights lie in the blocks, the largest one is the tied embedding.
MOE = dataclasses.replace(
    presets.find("moe", "tiny").config, layers=6, width=128, ffn=256, vocab=8192, tied=True
)
GPT = dataclasses.replace(presets.find("gpt", "tiny").config, layers=6, width=128, vocab=8192)
ZERO1 = ("--parallel", "zero1", "--device", "cpu", "--precision", "bf16", "--reduce", "bf16")


@pytest.mark.parametrize(("model", "config"), [("moe", MOE), ("gpt", GPT)], ids=["moe", "gpt"])
def test_zero1_holds_one_weight_beside_its_state_while_it_is_built(
    model: str, config: llama.Config | mpt.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flat_unit, "PIECE", 4096)
    options = cli.parse(["--model", model, "--size", "tiny", *ZERO1, "--moments", "bf16"])
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


def test_pieces_fill_the_slice_of_a_rank_as_the_whole_does() -> None:
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


def test_a_tied_models_checkpoint_says_that_its_blocks_lie_apart() -> None:
    tied, plain = cli.parse(["--model", "gpt", "--size", "tiny", *ZERO1]), cli.parse([*ZERO1])
    assert layouts.kept_as(tied, presets.find("gpt", "tiny")) == "zero1 --tp 1 --pp 1, in rows, blocks apart"
    assert layouts.kept_as(plain, presets.find("llama", "tiny")) == "zero1 --tp 1 --pp 1, in rows"


@pytest.mark.parametrize("parallel", ["fsdp2", "zero1"])
def test_a_checkpoint_of_a_pipeline_that_untied_the_embedding_is_not_taken_for_one_of_its_copies(
    parallel: str,
) -> None:
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


def test_the_loss_holds_one_chunk_of_logits_whatever_the_number_of_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
def test_any_number_of_ranks_shares_a_buffer_in_rows_and_wastes_less_than_a_row_of_each(
    model: str, size: str
) -> None:
    skeleton = prepare.skeleton(presets.MODELS[model], presets.find(model, size).config, loss_chunks=1)
    for name, unit in (*prepare.units(skeleton), ("", skeleton)):
        _, _, length = flat.offsets(unit, name)
        for ranks in RANKS:
            part = flat_unit.share(length, ranks)
            assert part % flat.ALIGN == 0
            assert length <= part * ranks < length + flat.ALIGN * ranks


@pytest.mark.parametrize(("ranks", "rank"), [(3, 2), (512, 0), (512, 511), (16384, 7000), (16384, 16383)])
def test_a_rank_of_many_keeps_the_rows_that_torch_expects_of_it(ranks: int, rank: int) -> None:
    options = cli.parse(["--size", "tiny", *ZERO1])
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


def test_fsdp2_holds_one_unit_beside_its_shards_while_it_is_built(one_of_eight: world.World) -> None:
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
