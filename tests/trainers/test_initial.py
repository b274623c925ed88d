"""A job starts from the weights that a user brings, with the logits that they have in transformers."""

from pathlib import Path

import pytest
import torch
from agree import same_bits, same_sums

import options
import presets
from errors import RefusedError
from layouts import prepare

transformers = pytest.importorskip("transformers")
CPU = torch.device("cpu")


def started(folder: Path, size: str = "tiny") -> torch.nn.Module:
    parsed = options.parse(["--size", size, "--weights", str(folder)])
    preset = presets.find("llama", size)
    model = prepare.skeleton(presets.MODELS["llama"], preset.config, loss_chunks=1)
    prepare.give_weights(model, model, "", parsed, CPU)
    return model


def test_a_job_starts_from_transformers_weights_and_from_ours(tmp_path: Path) -> None:
    config = presets.find("llama", "tiny").config
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=config.width,
            intermediate_size=config.ffn,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab,
            rms_norm_eps=config.eps,
            rope_theta=config.theta,
            attn_implementation="eager",
        )
    ).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = started(tmp_path / "theirs")
    tokens = torch.arange(48).view(2, 24) % config.vocab
    with torch.inference_mode():
        same_sums(ours.logits(tokens), theirs(tokens).logits)
    (tmp_path / "ours").mkdir()
    torch.save(ours.state_dict(), tmp_path / "ours/weights.pt")
    again = started(tmp_path / "ours")
    same_bits(again.state_dict(), ours.state_dict())
    with pytest.raises(
        RefusedError, match=r"has shape \(256, 64\), expected shape \(257, 66\); give the --model"
    ):
        started(tmp_path / "theirs", "tiny-uneven")
    with pytest.raises(RefusedError, match=r"no weights.pt and no \*.safetensors"):
        started(tmp_path)
