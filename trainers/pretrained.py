"""What config.json says of a model that transformers saved.

In: the file, a family. Out: the family's Config; and back.

Every field is used, or must have the value that our model computes, or is known to change no logit (IGNORED).
Any other field is refused: a field that nobody reads can be another model, whose losses look plausible.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from errors import RefusedError
from models.layers import Scaling

if TYPE_CHECKING:
    from pathlib import Path

# What generation, training, saving or the library's own outputs need. Rotary positions and ALiBi have no
# table of positions, so the longest sequence changes nothing. Training has a balance loss of its own.
IGNORED = frozenset(
    {
        "_attn_implementation_autoset", "_name_or_path", "architectures", "bos_token_id",
        "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label", "init_config", "init_device",
        "initializer_range", "is_encoder_decoder", "label2id", "learned_pos_emb",
        "max_position_embeddings", "max_seq_len", "norm_type", "output_attentions",
        "output_hidden_states", "output_router_logits", "pad_token_id", "pretraining_tp",
        "problem_type", "return_dict", "router_aux_loss_coef", "tokenizer_name", "torch_dtype",
        "transformers_version", "unsloth_version", "use_cache", "verbose",
    }
)  # fmt: skip
FILE = "config.json"
CLASSES = {"llama": "Llama", "mistral": "Mistral", "moe": "Mixtral", "mpt": "Mpt"}
TYPES = {"llama": "llama", "mistral": "mistral", "moe": "mixtral", "mpt": "mpt"}
THETA = {"llama": 1e4, "mistral": 1e4, "moe": 1e6}  # the library's, where the file names none
KV_HEADS = {"mistral": 8, "moe": 8}  # likewise; Llama has as many as query heads
WINDOW = {"mistral": 4096}  # likewise
_REQUIRED = object()


class _Fields:
    """The fields of one object of the file; what is taken is gone from it."""

    def __init__(self, path: Path, left: dict[str, Any]) -> None:
        self.path, self.left = path, dict(left)

    def take(self, name: str, default: Any = _REQUIRED) -> Any:
        """The value of a field, which may be null; `default` where it is absent."""
        value = self.left.pop(name, default)
        if value is _REQUIRED:
            raise self.refusal(f"no {name}, expected one")
        return value

    def only(self, **computed: Any) -> None:
        """Refuse another value of a field than the one that our model computes; null means that one too."""
        for name, want in computed.items():
            if (got := self.left.pop(name, want)) not in (want, None):
                raise self.refusal(f"{name} is {got!r}, and this model computes {want!r} alone")

    def end(self) -> None:
        """Refuse every field that nobody took."""
        if left := sorted(set(self.left) - IGNORED):
            said = ", ".join(f"{name} {self.left[name]!r}" for name in left)
            raise self.refusal(f"{said}: not known, so the model could be another one")

    def refusal(self, why: str) -> RefusedError:
        """The error that this file is not one of a model that we have."""
        return RefusedError(f"--weights: {self.path}: {why}; take a model without it, or convert it first")


def config(path: Path, family: str, kind: type[Any]) -> Any:
    """The Config (of class `kind`) of a model that transformers saved.

    Raises:
        RefusedError: A field is missing, not known, or has a value that our model does not compute.
    """
    try:
        said = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RefusedError(f"--weights: {path} cannot be read: {error}") from error
    fields = _Fields(path, said)
    if (named := fields.take("model_type")) != TYPES[family]:
        raise RefusedError(
            f"--weights: {path} is of a {named}, --model {family} takes {TYPES[family]}; give its --model"
        )
    made = _mpt(fields) if family == "mpt" else _decoder(fields, family)
    fields.end()
    return kind(**made)


def _decoder(fields: _Fields, family: str) -> dict[str, Any]:
    """Llama, Mistral and Mixtral."""
    take = fields.take
    width, heads = take("hidden_size"), take("num_attention_heads")
    theta, scaling = _rope(fields, family)
    fields.only(
        hidden_act="silu",
        attention_bias=False,
        mlp_bias=False,
        attention_dropout=0.0,
        partial_rotary_factor=1.0,
    )
    made = {
        "layers": take("num_hidden_layers"),
        "width": width,
        "heads": heads,
        "kv_heads": take("num_key_value_heads", KV_HEADS.get(family)) or heads,
        "ffn": take("intermediate_size"),
        "vocab": take("vocab_size"),
        "theta": theta,
        "scaling": scaling,
        "eps": take("rms_norm_eps"),
        "head_dim": take("head_dim", None) or width // heads,
        "window": None if family == "llama" else take("sliding_window", WINDOW.get(family)),
        "tied": take("tie_word_embeddings", default=False),
    }
    if family == "moe":
        fields.only(router_jitter_noise=0.0)
        made |= {"experts": take("num_local_experts"), "active_experts": take("num_experts_per_tok")}
    return made


def _rope(fields: _Fields, family: str) -> tuple[float, Scaling | None]:
    """Theta and scaling of rotary positions: `rope_parameters` of version 5, or the two fields before it."""
    new, old = fields.take("rope_parameters", None), fields.take("rope_scaling", None)
    theta = fields.take("rope_theta", THETA[family])
    rope = _Fields(fields.path, new or old or {})
    theta = rope.take("rope_theta", theta)
    named = [rope.take(name, None) for name in ("rope_type", "type")]
    kind = next((name for name in named if name), "default")
    rope.only(partial_rotary_factor=1.0)
    scaling = None
    if kind == "linear":
        scaling = Scaling(factor=rope.take("factor"))
    elif kind == "llama3":
        scaling = Scaling(
            factor=rope.take("factor"),
            low=rope.take("low_freq_factor"),
            high=rope.take("high_freq_factor"),
            positions=rope.take("original_max_position_embeddings"),
        )
    elif kind != "default":
        raise fields.refusal(f"rope_type is {kind!r}, expected default, linear or llama3")
    rope.end()
    return float(theta), scaling


def _mpt(fields: _Fields) -> dict[str, Any]:
    """The released MPT: ALiBi, no biases."""
    given = fields.take("attn_config", None) or {}
    attention = _Fields(fields.path, {name: value for name, value in given.items() if name != "attn_impl"})
    attention.only(
        model_type="", alibi=True, alibi_bias_max=8, attn_pdrop=0, attn_type="multihead_attention",
        attn_uses_sequence_id=False, clip_qkv=None, prefix_lm=False, qk_ln=False, softmax_scale=None,
    )  # fmt: skip
    attention.end()
    fields.only(
        expansion_ratio=4, resid_pdrop=0.0, emb_pdrop=0.0, embedding_fraction=1.0, logit_scale=None,
        layer_norm_epsilon=1e-5, no_bias=True, tie_word_embeddings=True,
    )  # fmt: skip
    take = fields.take
    take("auto_map", None)  # the released files name code of their own, which computes this model
    made = {"layers": take("n_layers"), "width": take("d_model"), "heads": take("n_heads")}
    return made | {"vocab": take("vocab_size"), "alibi": True, "bias": False}


def said(family: str, config: Any, positions: int) -> dict[str, Any]:
    """What config.json has to say of this model, so that `config` reads it back.

    Raises:
        RefusedError: The library has no model of this family or variant.
    """
    if family not in TYPES or (family == "mpt" and not (config.alibi and not config.bias)):
        raise RefusedError(
            f"transformers has no model that computes {family} in this variant; use weights.safetensors"
        )
    found = {
        "architectures": [f"{CLASSES[family]}ForCausalLM"],
        "model_type": TYPES[family],
        "vocab_size": config.vocab,
        "tie_word_embeddings": config.tied,
        "torch_dtype": "float32",
    }
    if family == "mpt":
        attention = {"alibi": True, "alibi_bias_max": 8, "attn_pdrop": 0}
        shape = {"n_layers": config.layers, "d_model": config.width, "n_heads": config.heads}
        return found | shape | {"attn_config": attention, "no_bias": True, "max_seq_len": positions}
    found |= {
        "num_hidden_layers": config.layers,
        "hidden_size": config.width,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn,
        "hidden_act": "silu",
        "rms_norm_eps": config.eps,
        "rope_theta": config.theta,
        "rope_scaling": rope_scaling(config.scaling),
        "max_position_embeddings": positions,
    }
    if family != "llama":
        found["sliding_window"] = config.window
    if family == "moe":
        found |= {"num_local_experts": config.experts, "num_experts_per_tok": config.active_experts}
        if not config.renormalise:
            raise RefusedError(
                "Mixtral's chosen weights sum to one, and this model's do not; use weights.safetensors"
            )
    return found


def rope_scaling(scaling: Scaling | None) -> dict[str, Any] | None:
    """Stretched positions in the library's words; None where they are plain."""
    if scaling is None:
        return None
    if scaling.positions is None:
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low,
        "high_freq_factor": scaling.high,
        "original_max_position_embeddings": scaling.positions,
    }
