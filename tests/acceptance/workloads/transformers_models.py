"""Small models of transformers, and what the code of an architecture says that it takes.

In: the name of an architecture, and sizes. Out: a model.

A configuration is made small by the names of its numbers alone, so no architecture has code of its own here;
nothing is downloaded. What the names do not make small is refused.
"""

import contextlib
import copy
import functools
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from workloads import device, generated_left

Sizes = tuple[tuple[str, int], ...]
WINDOW = 6  # places, where an architecture has one
# What numbers of a configuration become, by the name: the first row that fits. A letter is a drawn size.
NAMES = (
    (r"(bos|eos|sep|cls|mask|image|audio|video|decoder_start)_token_(id|index)$", 1),
    (r"pad_token_id$|^padding_idx$", 0),
    (r"vocab_size$|^n_vocab$|vocab_size_per_layer_input", "vocabulary"),
    (r"(^|_)(lora|low)_?rank$|lowrank$|_rank$", 8),
    (r"(ro|no)pe_head_dim$|rotary_dim$|^kv_channels$|^v_head_dim$|^(linear_)?(key|value)_head_dim$", 8),
    (r"head_dim$|^d_kv$|^d_head$|head_size$", "head"),
    (r"num_kv_shared_layers$", 1),
    (r"(key_value|kv)_heads$|num_kv", "few"),
    (r"head(s)?$|heads_(per|num)|_heads?_", "heads"),
    (r"moe_intermediate|ffn_dim|intermediate_size|^d_ff$|^d_inner$|^n_inner$|^dff$|dim_ff|mlp_dim", "inner"),
    (r"(hidden_size|hidden_dim|d_model|n_embd|embed_dim|embedding_size|lru_width|^dim|^emb_dim)$", "width"),
    # All: of scores that are zero by their definition each may be the largest, and packed ones are more.
    (r"index_topk$|keep_window", 64),
    (r"per_tok$|top_?k(_experts)?$|num_selected", 2),
    (r"group(s)?$|n_group", 2),
    (r"expert", 4),
    (r"(max_position|n_positions|n_ctx|max_seq|max_target|seq_length|mem_len|max_length|rel_extent)", 64),
    (r"window|^(attention_)?chunk_size$|block_size$|local_attention", WINDOW),
    (r"(^|_)(hidden_|decoder_|encoder_)?layers?$", "layers"),
)  # fmt: skip
STILL = re.compile(r"drop|jitter")  # what draws numbers while it trains
CHOOSES = re.compile(r"expert(?!s_implementation)|moe|topk")
RECURS = re.compile(
    r"(?i)_causal_conv|causal_conv1d|conv_state|recurrent_state|lightning|ShortConv|state_cache"
)
HIDES = "mask_to_padding"
MASKS = re.compile(r"mask\w*\([^)]*position_ids|\"position_ids\": position_ids")
SMALLEST: Sizes = (
    ("vocabulary", 61), ("width", 32), ("heads", 4), ("few", 2), ("head", 8), ("layers", 2), ("inner", 40),
)  # fmt: skip
MOST_NUMBERS = 600_000  # of a model's weights
EAGER, SDPA, FLEX, FLASH = "eager", "sdpa", "flex_attention", "flash_attention_2"


@functools.cache
def table() -> tuple[str, ...]:
    """The architectures that can be trained to say the next token, by the package's own list."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def small(kind: type, sizes: Mapping[str, int]) -> dict[str, Any]:
    """What makes this configuration small, by the names of its fields."""
    with making():
        given = kind().to_dict()
    found = dict[str, Any]()
    for name, one in given.items():
        if isinstance(one, bool):
            found |= {name: True} if name == "is_decoder" else {}
            continue
        if isinstance(one, float) and STILL.search(name):
            found[name] = 0.0
        elif isinstance(one, int) or (one is None and name.endswith("_token_id")):
            new = next((new for pattern, new in NAMES if re.search(pattern, name)), None)
            if new == "few" and "kv_lora_rank" in given:  # heads share one projection, so each has its own
                new = "heads"
            if new is not None:
                found[name] = sizes[new] if isinstance(new, str) else new
        elif isinstance(one, list) and name in ("layer_types", "layers_block_type", "mlp_layer_types"):
            several = list(dict.fromkeys(one))
            found[name] = [several[n % len(several)] for n in range(sizes["layers"])]
    return found


class Promises(NamedTuple):
    """What the code of an architecture says that it takes."""

    places: bool  # position_ids
    padding: bool  # an attention mask
    left: bool  # of tokens before the first one too
    packed: bool
    loss: bool  # that of the next token, by the package's one function
    checkpoints: bool
    recurs: bool
    caches: bool
    attention: tuple[str, ...]
    experts: bool  # their implementation
    chooses: bool  # experts, or what it attends to: a rounding may change what is chosen


@functools.cache
def promises(name: str) -> Promises:
    """What the code of this architecture says that it takes.

    Without position_ids what stands before a sequence moves it. A recurrence goes on from padding, but where
    the code hides that; it goes through packed sequences too. Masks separate these where they get the places.
    """
    from transformers import AutoModelForCausalLM

    its = config(name, SMALLEST)
    with making():
        kind = AutoModelForCausalLM._model_mapping[type(its)]
    takes = set(inspect.signature(kind.forward).parameters)
    text = inspect.getsource(sys.modules[kind.__module__])
    places, recurs = (
        "position_ids" in takes,
        bool(getattr(kind, "_is_stateful", False) or RECURS.search(text)),
    )
    attention = [SDPA] if getattr(kind, "_supports_sdpa", False) else []
    if device().type == "cuda":  # flex_attention has no gradient on a processor
        attention += [FLEX] if getattr(kind, "_supports_flex_attn", False) else []
        flash = importlib.util.find_spec("flash_attn") and getattr(kind, "_supports_flash_attn", False)
        attention += [FLASH] if flash else []
    return Promises(
        places,
        "attention_mask" in takes,
        places and not (recurs and HIDES not in text),
        places and not recurs and bool(MASKS.search(text)),
        "self.loss_function" in inspect.getsource(kind.forward),
        bool(kind.supports_gradient_checkpointing),
        recurs,
        places and not recurs and "past_key_values" in takes,
        tuple(attention),
        hasattr(kind, "_can_set_experts_implementation") and kind._can_set_experts_implementation(),
        any(CHOOSES.search(one) for one in its.to_dict()),
    )


@functools.lru_cache(maxsize=8)
def config(name: str, sizes: Sizes) -> Any:
    """A small configuration. Raises `RefusedError` if the package does not make it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    with making():
        kind = CONFIG_MAPPING[name]
    given = small(kind, dict(sizes))
    with making():
        return kind(**given)


@functools.lru_cache(maxsize=4)
def model(name: str, sizes: Sizes, attention: str, experts: str, dtype: torch.dtype) -> nn.Module:
    """A small model of this architecture, which trains.

    Raises `RefusedError` if its names do not make it small, or the package makes none.
    """
    from transformers import AutoModelForCausalLM

    its = config(name, sizes)
    with torch.device("meta"), making():
        if sum(one.numel() for one in AutoModelForCausalLM.from_config(its).parameters()) > MOST_NUMBERS:
            raise ValueError("its configuration is not small")
    kept = copy.deepcopy(its)  # a model keeps what it is asked for in it
    if hasattr(kept, "_experts_implementation"):
        kept._experts_implementation = experts
    torch.manual_seed(0)
    with making():
        made = AutoModelForCausalLM.from_config(kept, attn_implementation=attention, dtype=dtype)
    return made.to(device()).train()


@functools.lru_cache(maxsize=2)
def begun(name: str, sizes: Sizes) -> list[torch.Tensor]:
    """The weights that this architecture begins with."""
    return [
        one.detach().cpu().clone() for one in model(name, sizes, EAGER, EAGER, torch.float32).parameters()
    ]


def making() -> contextlib.AbstractContextManager[None]:
    """What the package makes: a configuration that its names do not fit, or a module that lacks a package.

    Raises `RefusedError` if it makes none.
    """
    errors = importlib.import_module("huggingface_hub.errors")
    own = getattr(errors, "StrictDataclassError", ValueError)  # older releases validate nothing
    return generated_left.witnessing((*generated_left.REFUSED, ImportError, AttributeError, KeyError, own))
