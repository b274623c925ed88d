"""Our FLUX computes what diffusers computes from the same weights: velocities and gradients, both ways."""

import dataclasses

import pytest
import torch
from agree import same_bits, same_sums

import presets
from models import flux
from tools import flux_weights

diffusers = pytest.importorskip("diffusers")


@pytest.fixture(scope="module")
def pair():
    """The tiny preset with two blocks of each kind, and theirs with the same weights."""
    config = dataclasses.replace(presets.find("flux", "tiny").config, double_blocks=2, single_blocks=2)
    torch.manual_seed(5)
    theirs = diffusers.FluxTransformer2DModel(
        in_channels=config.channels,
        num_layers=config.double_blocks,
        num_single_layers=config.single_blocks,
        attention_head_dim=config.width // config.heads,
        num_attention_heads=config.heads,
        joint_attention_dim=config.text_width,
        pooled_projection_dim=config.pooled_width,
        guidance_embeds=config.guidance,
        axes_dims_rope=config.axes,
    )
    with torch.no_grad():
        for parameter in theirs.parameters():  # zeros and ones would hide a swap
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    ours = flux.Model(config)
    ours.load_state_dict(flux_weights.from_diffusers(theirs.state_dict()))
    return ours, theirs


def velocities(ours, theirs):
    config = ours.config
    inputs = flux.batch(config, range(2), 1, torch.device("cpu"))
    place = torch.arange(config.side**2)
    rows = (torch.zeros_like(place), place // config.side, place % config.side)
    got = ours.velocity(inputs["noise"], inputs["text"], inputs["pooled"], inputs["times"])
    want = theirs(
        hidden_states=inputs["noise"],
        encoder_hidden_states=inputs["text"],
        pooled_projections=inputs["pooled"],
        timestep=inputs["times"],
        guidance=torch.full((2,), flux.GUIDANCE),
        img_ids=torch.stack(rows, 1).float(),
        txt_ids=torch.zeros(config.text_tokens, 3),
    ).sample
    return got, want


def test_velocities_agree(pair):
    got, want = velocities(*pair)
    assert want.std() > 0.1
    same_sums(got, want)


def test_gradients_agree(pair):
    ours, theirs = pair
    for model in pair:
        model.zero_grad()
    got, want = velocities(ours, theirs)
    got.square().mean().backward()
    want.square().mean().backward()
    expected = flux_weights.from_diffusers({name: p.grad for name, p in theirs.named_parameters()})
    same_sums({name: weight.grad for name, weight in ours.named_parameters()}, expected)


def test_weights_convert_back_to_the_same_names_and_values(pair):
    ours, theirs = pair
    back, want = flux_weights.to_diffusers(ours.state_dict()), theirs.state_dict()
    same_bits(back, want)
