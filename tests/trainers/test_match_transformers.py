"""Our models compute what transformers computes from the same weights: logits and gradients, in both
directions.
"""

import dataclasses

import pytest
import torch
from agree import same_bits, same_sums

import presets

transformers = pytest.importorskip("transformers")
TOKENS = torch.randint(256, (2, 48), generator=torch.Generator().manual_seed(3))


def pair(name: str):
    family, _, size = name.partition("/")
    config = presets.find(family, size).config
    if family != "mpt":
        config = dataclasses.replace(config, window=16 if family == "mistral" else None)
    module = presets.MODELS[family]
    torch.manual_seed(5)
    theirs = THEIRS[family](config).eval()
    ours = module.Model(config)
    ours.load_state_dict(module.from_transformers(theirs.state_dict()))
    return module, ours, theirs


def decoder(config, kind, **other):
    return kind(
        vocab_size=config.vocab,
        hidden_size=config.width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        intermediate_size=config.ffn,
        head_dim=config.head_dim,
        rms_norm_eps=config.eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.theta},
        tie_word_embeddings=False,
        attn_implementation="eager",
        **other,
    )


def llama(config):
    return transformers.LlamaForCausalLM(decoder(config, transformers.LlamaConfig))


def mistral(config):
    shape = decoder(config, transformers.MistralConfig, sliding_window=config.window)
    return transformers.MistralForCausalLM(shape)


def mixtral(config):
    other = {"num_local_experts": config.experts, "num_experts_per_tok": config.active_experts}
    return transformers.MixtralForCausalLM(
        decoder(config, transformers.MixtralConfig, sliding_window=None, **other)
    )


def mpt(config):
    shape = transformers.MptConfig(
        d_model=config.width,
        n_heads=config.heads,
        n_layers=config.layers,
        vocab_size=config.vocab,
        max_seq_len=64,
        no_bias=True,
        attn_implementation="eager",
    )
    model = transformers.MptForCausalLM(shape)
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.bias = None
    return model


THEIRS = {"llama": llama, "mistral": mistral, "moe": mixtral, "mpt": mpt}
NAMES = ["llama/tiny", "mistral/tiny", "moe/tiny", "mpt/tiny-released"]


@pytest.mark.parametrize("name", NAMES)
def test_logits_agree(name: str) -> None:
    _, ours, theirs = pair(name)
    same_sums(ours.logits(TOKENS), theirs(TOKENS).logits)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_agree(name: str) -> None:
    module, ours, theirs = pair(name)
    ours.logits(TOKENS).square().mean().backward()
    theirs(TOKENS).logits.square().mean().backward()
    # Tied weights have one gradient, seen under both of our names.
    named = dict(ours.named_parameters(remove_duplicate=False))
    want = module.from_transformers({n: p.grad for n, p in theirs.named_parameters(remove_duplicate=False)})
    same_sums({path: weight.grad for path, weight in named.items()}, want)


@pytest.mark.parametrize("name", NAMES)
def test_weights_convert_back_to_the_same_names_and_values(name: str) -> None:
    module, ours, theirs = pair(name)
    back, want = module.to_transformers(ours.state_dict()), theirs.state_dict()
    same_bits(back, want)
