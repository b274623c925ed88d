"""--seed reaches the initial weights, on every device."""

import itertools

import pytest
import torch

from layouts.prepare import initial_value
from options import parse

SHAPE = torch.Size((4, 16))
SEEDS = (0, 1, 2, 3, 17, 1 << 20, (1 << 31) + 5)


def value(seed: int, *more: str, name: str = "layers.0.q.weight") -> torch.Tensor:
    options = parse(["--model", "llama", "--size", "tiny", "--seed", str(seed), *more])
    return initial_value(name, SHAPE, 2, options, torch.device("cpu"))


@pytest.mark.parametrize("portable", [(), ("--portable",)], ids=["own device", "portable"])
def test_two_seeds_make_two_sets_of_weights(portable: tuple[str, ...]) -> None:
    for one, other in itertools.combinations(SEEDS, 2):
        assert not torch.equal(value(one, *portable), value(other, *portable)), (one, other)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_makes_the_same_weights_again_and_others_for_another_name(seed: int) -> None:
    assert torch.equal(value(seed), value(seed))
    assert not torch.equal(value(seed), value(seed, name="layers.1.q.weight"))
