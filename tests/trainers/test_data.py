"""Samples depend on their number alone, and the order of rows has each once in a pass, drawn by chance."""

import itertools
import random
import tracemalloc
from types import SimpleNamespace

import mosaic
import numpy as np
import pytest
import torch
from figures import figure

import data
import metrics
import options
import order
import plan
import presets
from layouts.prepare import initial_value
from options import parse


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_step_has_the_same_samples_on_any_number_of_ranks(ranks):
    source = data.Synthetic(vocab=64, seq_len=16, seed=9)
    per_rank = 8 // ranks
    numbers = [range(8 + r * per_rank, 8 + (r + 1) * per_rank) for r in range(ranks)]
    rows = torch.cat([data.batch(source, part, torch.device("cpu"))["tokens"] for part in numbers])
    assert torch.equal(rows, data.batch(source, range(8, 16), torch.device("cpu"))["tokens"])


def test_labels_are_the_next_tokens_and_not_the_inputs():
    batch = data.batch(data.Synthetic(vocab=64, seq_len=16, seed=9), range(2), torch.device("cpu"))
    assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
    assert not torch.equal(batch["tokens"], batch["labels"])


def test_each_pass_reads_every_sample_once_in_its_own_order(tmp_path):
    pieces = np.frombuffer(data.TEXT.read_bytes()[:2300], np.uint8).reshape(-1, 100)
    mosaic.write(tmp_path, "ndarray:uint8", list(pieces), size_limit=900)
    assert len(list(tmp_path.glob("shard.*"))) > 2
    source = data.open_source(options.parse(["--data", str(tmp_path)]), vocab=256, seq_len=99)
    passes = [[bytes(source.sample(e * 23 + i).tolist()) for i in range(23)] for e in range(2)]
    assert sorted(passes[0]) == sorted(passes[1]) == sorted(bytes(piece) for piece in pieces)
    assert passes[0] != passes[1]


def test_what_is_read_ahead_is_what_would_be_read():
    parsed = options.parse(["--data", "text", "--global-batch", "4"])
    preset, cpu = presets.find("llama", "tiny"), torch.device("cpu")
    plan = SimpleNamespace(seq_len=16)
    feeds = [data.Feed(parsed, preset, plan) for _ in range(2)]
    for begin in (0, 4, 8, 40):  # the last one is not what was read ahead
        numbers = range(begin, begin + 4)
        with_thread = feeds[0].batch(numbers, cpu, then=range(begin + 4, begin + 8))
        without = feeds[1].batch(numbers, cpu)
        assert torch.equal(with_thread["tokens"], without["tokens"])


def test_cost_of_a_trillion_tokens_is_the_guides():
    assert metrics.cost(2750, 5.01)["dollars_per_1t_tokens"] == figure(506e3, rel=2e-3)
    assert metrics.cost(2500, 2.05)["dollars_per_1t_tokens"] == figure(228e3, rel=2e-3)


SIZES = (1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 255, 257, 1000, 4096, 4097)


@pytest.mark.parametrize("rows", SIZES)
def test_each_pass_has_every_row_once(rows):
    for epoch in range(3):
        passed = [order.row(epoch * rows + place, rows, 7) for place in range(rows)]
        assert sorted(passed) == list(range(rows))


@pytest.mark.parametrize("rows", [size for size in SIZES if 60 < size < 4096])
def test_passes_and_seeds_have_orders_of_their_own(rows):
    def passed(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(order.row(epoch * rows + place, rows, seed) for place in range(rows))

    found = [passed(seed, epoch) for seed in (0, 1, 2, 1 << 40) for epoch in range(3)]
    assert len(set(found)) == len(found)
    assert found[0] == passed(0, 0)


@pytest.mark.parametrize("rows", [1000, 1024, 1500])
def test_an_order_has_as_many_neighbours_and_fixed_rows_as_one_of_chance(rows):
    neighbours = fixed = 0
    for seed in range(20):
        passed = [order.row(place, rows, seed) for place in range(rows)]
        neighbours += sum(b == a + 1 for a, b in itertools.pairwise(passed))
        fixed += sum(place == at for place, at in enumerate(passed))
        # Rows of the lower half in the first half of a pass: by chance within 6 of its standard deviations.
        low = sum(at < rows // 2 for at in passed[: rows // 2])
        assert (4 * low - rows) ** 2 < 36 * rows
    # Each is 1 an order by chance, so 20 in all with a standard deviation of 4.5.
    assert 2 < neighbours < 50
    assert 2 < fixed < 50


def test_memory_does_not_depend_on_the_rows():
    drawn = random.Random(1)
    tracemalloc.start()
    try:
        for rows in (10**3, 10**9, 10**15):
            numbers = [drawn.randrange(5 * rows) for _ in range(200)]
            assert all(0 <= order.row(number, rows, 3) < rows for number in numbers)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("source", "said"), [("text", None), ("synthetic", None), ("rows", order.VERSION)])
def test_a_checkpoint_says_which_order_its_rows_had(source, said):
    made = plan.Plan(**dict.fromkeys(plan.Plan.__dataclass_fields__, 0))
    assert made.identity(options.parse(["--data", source]), None).get("order of rows") == said


SHAPE = torch.Size((4, 16))
SEEDS = (0, 1, 2, 3, 17, 1 << 20, (1 << 31) + 5)


def value(seed: int, *more: str, name: str = "layers.0.q.weight") -> torch.Tensor:
    options = parse(["--model", "llama", "--size", "tiny", "--seed", str(seed), *more])
    return initial_value(name, SHAPE, 2, options, torch.device("cpu"))


@pytest.mark.parametrize("portable", [(), ("--portable",)], ids=["own device", "portable"])
def test_two_seeds_make_two_sets_of_weights(portable):
    for one, other in itertools.combinations(SEEDS, 2):
        assert not torch.equal(value(one, *portable), value(other, *portable)), (one, other)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_makes_the_same_weights_again_and_others_for_another_name(seed):
    assert torch.equal(value(seed), value(seed))
    assert not torch.equal(value(seed), value(seed, name="layers.1.q.weight"))
