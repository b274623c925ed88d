"""Operations per token and parameter counts are those that the sources publish."""

import pytest
from figures import figure

import flops
import presets
from models import mpt

# llm-foundry scripts/train/yamls/pretrain; vocabulary 50368, sequence 2048
FOUNDRY = {
    "125m": 125_311_488,
    "350m": 355_985_408,
    "760m": 760_470_528,
    "1b": 1_315_950_592,
    "3b": 2_651_837_440,
    "7b": 6_658_859_008,
    "13b": 12_853_954_560,
    "30b": 29_975_214_080,
    "70b": 64_862_437_376,
}
# GFLOP per token: (noncausal, causal)
PUBLISHED = {
    ("llama", "8b", 8192): (57.91, 51.47),
    ("llama", "8b", 4096): (51.47, 48.25),
    ("llama", "70b", 8192): (481.4, 449.2),
    ("mistral", "7b", 8192): (49.10, 47.49),
}
MPT_GFLOP = {"1b": 9.10, "3b": 17.92, "7b": 43.17, "13b": 82.14, "30b": 188.3, "70b": 405.2}


def per_token(model: str, size: str, seq_len: int) -> flops.Flops:
    return presets.flops_per_unit(presets.find(model, size), seq_len, recompute=0.0)


@pytest.mark.parametrize("size", FOUNDRY)
def test_mpt_has_exactly_the_parameters_of_llm_foundry(size: str) -> None:
    assert presets.find("mpt", size).config.parameters(2048) == FOUNDRY[size]


@pytest.mark.parametrize("alibi", [True, False], ids=["released", "benchmark"])
def test_the_formula_counts_what_the_model_holds(alibi: bool) -> None:
    config = mpt.Config(layers=2, width=64, heads=4, vocab=256, positions=32, alibi=alibi, bias=not alibi)
    assert sum(p.numel() for p in mpt.Model(config).parameters()) == config.parameters(32)


@pytest.mark.parametrize("shape", PUBLISHED, ids=lambda s: "-".join(map(str, s)))
def test_both_conventions_match_the_published_counts(shape: tuple[str, str, int]) -> None:
    got = per_token(*shape)
    noncausal, causal = PUBLISHED[shape]
    assert round(got.noncausal / 1e9, 1) == figure(noncausal, abs=0.06)
    assert got.causal / 1e9 == figure(causal, rel=5e-4)


def test_amd_counts_a_window_of_1024_for_mistral() -> None:
    assert per_token("mistral", "7b-window1024", 8192).noncausal / 1e9 == figure(44.27, abs=0.01)


@pytest.mark.parametrize("size", MPT_GFLOP)
def test_mpt_counts_as_llm_foundry_does(size: str) -> None:
    assert per_token("mpt", size, 2048).noncausal / 1e9 == figure(MPT_GFLOP[size], rel=1e-3)


def test_flux_costs_64_5_tflop_per_512_image() -> None:
    assert per_token("flux", "dev-512", 0).noncausal / 1e12 == figure(64.5, rel=5e-3)
    assert per_token("flux", "dev-1024", 0).noncausal / 1e12 == figure(223, rel=1e-2)


def test_hardware_flops_add_a_third_when_activations_are_recomputed() -> None:
    plain = per_token("gpt", "22b", 2048)
    again = presets.flops_per_unit(presets.find("gpt", "22b"), 2048, recompute=1.0)
    assert again.hardware == figure(plain.noncausal * 4 / 3)
    half = presets.flops_per_unit(presets.find("flux", "dev-512"), 0, recompute=0.5)
    assert half.hardware == figure(half.noncausal * 7 / 6)
    assert again.noncausal == plain.noncausal == plain.hardware


@pytest.mark.parametrize(("size", "billions"), [("22b", 21.7), ("175b", 173.9), ("1t", 1007)])
def test_frontiers_shapes_have_their_sizes(size: str, billions: float) -> None:
    config = presets.find("gpt", size).config
    assert 12 * config.layers * config.width**2 / 1e9 == figure(billions, rel=2e-3)
