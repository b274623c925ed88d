"""A job starts from the model that a user brings, with the logits that it has in transformers; what its
config.json says is used, changes nothing, or is refused.
"""

import copy
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from agree import different, same_bits, same_sums

import initial
import options
import presets
import pretrained
from errors import RefusedError
from layouts import prepare
from models import hf_llama
from tools import export

transformers = pytest.importorskip("transformers")
from huggingface_hub.errors import StrictDataclassError  # noqa: E402 - it comes with transformers

CPU = torch.device("cpu")
TOKENS = torch.arange(96).view(2, 48) * 7 % 128

# The files of meta-llama/Llama-3.2-1B, mistralai/Mistral-7B-v0.3, mistralai/Mixtral-8x7B-v0.1, a Llama 2 and
# mosaicml/mpt-7b with all of their fields, made small. Positions are stretched from 24 on: 48 feel it.
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}
SAVED = {"bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.02, "use_cache": True}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu", "attention_dropout": 0.0}
DECODER = SMALL | SAVED | HEADS | {"rms_norm_eps": 1e-05, "torch_dtype": "bfloat16"}
LLAMA3 = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 24,
    "rope_type": "llama3",
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 3.2 1b": (
        "llama",
        DECODER
        | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False}
        | {"head_dim": 16}
        | {"max_position_embeddings": 131072, "mlp_bias": False, "pretraining_tp": 1, "rope_theta": 500000.0}
        | {"rope_scaling": LLAMA3, "tie_word_embeddings": True, "transformers_version": "4.45.0.dev0"},
    ),
    "llama 2, longer": (
        "llama",
        DECODER
        | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 4096}
        | {"pretraining_tp": 1, "rope_scaling": {"type": "linear", "factor": 4.0}, "num_key_value_heads": 4}
        | {"tie_word_embeddings": False, "transformers_version": "4.31.0"},
    ),
    "mistral 0.3": (
        "mistral",
        DECODER
        | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "rope_theta": 1000000.0}
        | {"max_position_embeddings": 32768, "sliding_window": None, "tie_word_embeddings": False}
        | {"transformers_version": "4.42.0.dev0"},
    ),
    "mixtral": (
        "moe",
        DECODER
        | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "rope_theta": 1000000.0}
        | {"max_position_embeddings": 32768, "num_experts_per_tok": 2, "num_local_experts": 4}
        | {"output_router_logits": False, "router_aux_loss_coef": 0.02, "sliding_window": None}
        | {"tie_word_embeddings": False, "transformers_version": "4.36.0.dev0"},
    ),
    "mpt": (
        "mpt",
        {"architectures": ["MPTForCausalLM"], "model_type": "mpt", "d_model": 64, "n_heads": 4, "n_layers": 2}
        | {"attn_config": {"alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0}}
        | {"emb_pdrop": 0, "embedding_fraction": 1.0, "expansion_ratio": 4, "init_device": "cpu"}
        | {"learned_pos_emb": True, "logit_scale": None, "max_seq_len": 2048, "no_bias": True, "verbose": 0}
        | {"norm_type": "low_precision_layernorm", "resid_pdrop": 0, "use_cache": False, "vocab_size": 128},
    ),
}


@pytest.fixture(params=CONFIGS)
def brought(request, tmp_path) -> tuple[Path, str]:
    """A folder as a user downloads it, and the family that takes it."""
    family, config = CONFIGS[request.param]
    return save(tmp_path / "brought", config), family


def save(folder: Path, config: dict[str, Any]) -> Path:
    """Random weights that transformers saves for this config.json, which is left as it was downloaded.

    They are drawn in float32 whatever type the library makes, and each holds a zero. A draw in bfloat16 on
    a processor has many in older versions of torch, whose uniform numbers there have 8 bits.
    """
    torch.manual_seed(4)
    kind = transformers.CONFIG_MAPPING[config["model_type"]]
    made = transformers.AutoModelForCausalLM.from_config(kind.from_dict(copy.deepcopy(config))).float()
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(torch.randn_like(weight) * 0.2 + (weight.ndim == 1))
            weight.view(-1)[0] = 0.0
    made.save_pretrained(folder)
    (folder / "saved.json").write_text((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def started(folder: Path, family: str, size: str = initial.BROUGHT) -> Any:
    """Our model as a job starts it."""
    parsed = options.parse(["--model", family, "--size", size, "--weights", str(folder)])
    initial._loaded.cache_clear()
    config = initial.preset(parsed).config
    model = prepare.skeleton(presets.MODELS[family], config, loss_chunks=1)
    prepare.give_weights(model, model, "", parsed, CPU)
    return model


def theirs_of(folder: Path) -> Any:
    """The model of transformers."""
    found = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return found.eval()


@torch.inference_mode()
def test_every_family_has_the_logits_of_transformers(brought):
    folder, family = brought
    ours = started(folder, family)
    same_sums(ours.logits(TOKENS), theirs_of(folder)(TOKENS).logits)
    (folder / "config.json").write_text((folder / "saved.json").read_text())  # in the words of version 5
    assert started(folder, family).config == ours.config


def test_every_family_has_the_gradients_of_transformers(brought):
    folder, family = brought
    if family == "mistral":
        config = json.loads((folder / "config.json").read_text()) | {"sliding_window": 16}
        (folder / "config.json").write_text(json.dumps(config))
    ours, theirs = started(folder, family), theirs_of(folder)
    for logits in (ours.logits(TOKENS), theirs(TOKENS).logits):
        logits.square().mean().backward()
    # Tied weights have one gradient, seen under both of our names.
    every = {"remove_duplicate": False}
    want = {name: weight.grad for name, weight in theirs.named_parameters(**every)}
    want = initial.untied(ours.config, presets.MODELS[family].from_transformers(want))
    same_sums({name: weight.grad for name, weight in ours.named_parameters(**every)}, want)


@torch.inference_mode()
def test_positions_are_stretched_in_the_librarys_own_model_too(tmp_path):
    folder = save(tmp_path, CONFIGS["llama 3.2 1b"][1])
    config = started(folder, "llama").config
    want = transformers.AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb.inv_freq
    same_sums(hf_llama.causal_lm(config).model.rotary_emb.inv_freq, want)
    ours, plain = started(folder, "llama"), started(folder, "llama")
    plain.config = dataclasses.replace(config, scaling=None)
    assert different(plain.logits(TOKENS), ours.logits(TOKENS)), "the control: 48 positions feel the scaling"


def mutants(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The configuration with another value of one field, or with a field more; by the field's path."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{path}", config | {name: inner}) for path, inner in mutants(value))
            continue
        for other in others(value):
            yield name, config | {name: other}
    yield "a_new_field", config | {"a_new_field": 1}


def others(value: Any) -> tuple[Any, ...]:
    """Other values of the same type; for nothing a small number."""
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int | float):
        return (value * 2 if value else type(value)(1),)
    named = {"silu": ("gelu",), "float32": ("float16",), "bfloat16": ("float16",)}
    return named.get(value, ("other",)) if isinstance(value, str) else (8,)


@torch.inference_mode()
def test_each_field_is_used_or_changes_nothing_or_is_refused(brought):
    folder, family = brought
    whole = json.loads((folder / "saved.json").read_text())
    weights = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    refused, compared = set(), set()
    for form in (json.loads((folder / "config.json").read_text()), whole):
        for field, changed in mutants(form):
            (folder / "config.json").write_text(json.dumps(changed))
            try:
                ours = started(folder, family)
            except RefusedError:
                refused.add(field)
                continue
            theirs = read(changed, weights)
            if theirs is not None:
                same_sums({field: ours.logits(TOKENS)}, {field: theirs(TOKENS).logits})
                compared.add(field)
    assert {"model_type", "a_new_field"} <= refused
    assert len(compared) >= 6, compared


def read(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Any:
    """The library's model; None of what it refuses too."""
    kind = transformers.CONFIG_MAPPING[config["model_type"]]
    try:
        parsed = kind.from_dict(copy.deepcopy(config) | {"dtype": "float32"})
        made = transformers.AutoModelForCausalLM.from_config(parsed, attn_implementation="eager")
        made.load_state_dict(weights)
    except (ValueError, TypeError, RuntimeError, StrictDataclassError):
        return None
    return made.eval()


@torch.inference_mode()
@pytest.mark.parametrize("parallel", ["fsdp2", "zero1"])
def test_a_checkpoint_goes_to_transformers_and_back(brought, parallel, tmp_path, record):
    folder, family = brought
    job = ("--model", family, "--size", "config", "--weights", str(folder), "--seq-len", "16", "--steps", "1")
    record(1, *job, "--device", "cpu", "--parallel", parallel, "--checkpoint", str(tmp_path / "ours"))
    trained = tmp_path / "ours/step_00000001"
    assert export.main([str(trained), str(tmp_path / "out")]) == 0
    ours, back = started(trained, family), started(tmp_path / "out", family)
    assert back.config == ours.config
    same_bits(back.state_dict(), ours.state_dict())
    same_sums(ours.logits(TOKENS), theirs_of(tmp_path / "out")(TOKENS).logits)


@pytest.mark.parametrize("size", ["tiny", "8b"])
def test_a_size_of_another_shape_is_refused_with_what_differs(size, tmp_path):
    folder = save(tmp_path, CONFIGS["llama 3.2 1b"][1])
    with pytest.raises(RefusedError, match=r"vocab 128, not \d+.* as --size .*or --size config"):
        started(folder, "llama", size)
    with pytest.raises(RefusedError, match="is of a llama, --model mistral takes mistral"):
        started(folder, "mistral")


def test_a_folder_with_weights_that_the_model_lacks_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = save(tmp_path, CONFIGS["mistral 0.3"][1])
    path = folder / "model.safetensors"
    save_file({"layers.0.attention.wq.weight": torch.ones(2)}, folder / "consolidated.safetensors")
    started(folder, "mistral")  # the maker's own form of the same weights lies beside it
    more = load_file(path) | {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}
    save_file(more, path)
    with pytest.raises(
        RefusedError, match=r"weights blocks.0.attention.q.bias \(1 in all\) are not in mistral"
    ):
        started(folder, "mistral")
    with pytest.raises(RefusedError, match=r"no weights.safetensors and no \*.safetensors"):
        started(tmp_path.parent, "mistral")


@torch.inference_mode()
def test_a_checkpoint_of_ours_keeps_the_configuration_that_it_was_started_with(tmp_path, record):
    folder = save(tmp_path / "theirs", CONFIGS["llama 3.2 1b"][1])
    job = ("--size", "config", "--weights", str(folder), "--steps", "1", "--seq-len", "48", "--device", "cpu")
    record(1, *job, "--lr", "0", "--checkpoint", str(tmp_path / "ours"))
    again = started(tmp_path / "ours/step_00000001", "llama")
    first = started(folder, "llama")
    assert again.config == first.config
    same_bits(again.state_dict(), first.state_dict())


@pytest.mark.parametrize("name", presets.PRESETS, ids="/".join)
def test_a_configuration_is_read_back_as_it_was_written(name, tmp_path):
    family, config = name[0], presets.PRESETS[name].config
    (tmp_path / initial.SHAPE).write_text(initial.shape(family, config))
    assert initial.kept(tmp_path, family) == config


def test_what_is_ignored_is_not_used():
    source = Path(pretrained.__file__).read_text()
    assert not [name for name in pretrained.IGNORED if f'take("{name}"' in source or f"{name}=" in source]
