"""A model that a user brings to start from.

In: a folder, a family. Out: its shape, and each weight under this project's name.

A folder is a model that transformers saved (config.json and `*.safetensors`), or a checkpoint of train.py
with whole weights (`weights.safetensors`, and the model's configuration in `model.json`). Every rank maps the
files and copies only what it holds.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import TYPE_CHECKING, Any

import torch

import presets
import pretrained
import whole
from checkpoint import WEIGHTS
from errors import RefusedError
from models.layers import Scaling

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from options import Options
    from presets import Preset

OURS, SHAPE, THEIRS = WEIGHTS, "model.json", pretrained.FILE
BROUGHT = "config"  # the --size that takes the whole shape from --weights
LONGEST, FINE_TUNED = 4096, 1e-5  # tokens and peak rate of that size: memory and the weights stay safe
# What --size names. The rest of a configuration (theta, window, …) is the folder's alone.
NAMED = ("layers", "width", "heads", "kv_heads", "ffn", "vocab", "head_dim", "experts", "active_experts")


def preset(options: Options) -> Preset:
    """The preset of this job; with --weights, of the model in that folder.

    Raises:
        RefusedError: The folder's model is not of this family, its shape differs from --size, or it has
            weights or settings that this project's model does not have.
    """
    if options.weights is None or (config := _config(options.weights, options.model)) is None:
        return presets.find(options.model, options.size, layers=options.layers, lean=options.lean)
    if options.size == BROUGHT:
        found = presets.Preset(
            config=config, seq_len=LONGEST, micro_batch=1, lr=FINE_TUNED, source=str(options.weights)
        )
    else:
        found = presets.find(options.model, options.size)
        _require_shape(options, config, found.config)
        found = dataclasses.replace(found, config=config)
    _require_all_used(options.weights, options.model, config)
    return presets.changed(found, options.model, layers=options.layers, lean=options.lean)


def _require_shape(options: Options, got: Any, want: Any) -> None:
    differ = [
        f"{name} {getattr(got, name)}, not {getattr(want, name)}"
        for name in NAMED
        if getattr(got, name, None) != getattr(want, name, None)
    ]
    if differ:
        raise RefusedError(
            f"--weights {options.weights} has {', '.join(differ)} as --size {options.size}; give "
            f"the --size of that checkpoint, or --size {BROUGHT}"
        )


def _config(folder: Path, family: str) -> Any:
    """The configuration of the folder's model; `None` for a checkpoint of train.py that does not say it."""
    module = presets.MODELS[family]
    if (folder / OURS).is_file():
        return kept(folder, family)
    _files(folder)
    _require_names(family)
    return pretrained.config(folder / THEIRS, family, module.Config)


def kept(folder: Path, family: str) -> Any:
    """The configuration that a checkpoint of train.py holds; `None` if an older version wrote it."""
    if not (folder / SHAPE).is_file():
        return None
    held = json.loads((folder / SHAPE).read_text())
    if held["family"] != family:
        raise RefusedError(f"{folder} is of --model {held['family']}, not {family}; give its --model")
    config = {
        name: tuple(value) if isinstance(value, list) else value for name, value in held["config"].items()
    }
    if config.get("scaling") is not None:
        config["scaling"] = Scaling(*config["scaling"])
    return presets.MODELS[family].Config(**config)


def untied(config: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """With a tied head under both of its names: a checkpoint of ZeRO-1 has the first one alone."""
    names = ("embedding.weight", "head.out.weight")
    return weights | {names[1]: weights[names[0]]} if config.tied and names[0] in weights else weights


def shape(family: str, config: Any) -> str:
    """What `kept` reads back."""
    return json.dumps({"family": family, "config": dataclasses.asdict(config)}, indent=1)


def _require_all_used(folder: Path, family: str, config: Any) -> None:
    """Refuse a folder with weights that the model has not, or has once where the folder has two."""
    with torch.device("meta"):
        model = presets.MODELS[family].Model(config)
    known, found = dict(model.named_parameters(remove_duplicate=False)), _loaded(folder, family)
    other = [name for name in found if name not in known]
    for first in model.parameters():
        copies = [copy for copy, weight in known.items() if weight is first and copy in found]
        other += [copy for copy in copies[1:] if not torch.equal(found[copy], found[copies[0]])]
    if other:
        raise RefusedError(
            f"--weights {folder}: the weights {', '.join(other[:4])} ({len(other)} in all) are not in "
            f"{family} as its configuration says, so this would be another model; take a model without them"
        )


def weight(folder: Path, family: str, name: str, shape: torch.Size) -> Tensor:
    """The weight of this name, float32. Raises RefusedError where the folder has none of this shape."""
    found = _loaded(folder, family)
    if name not in found or found[name].shape != shape:
        got = f"shape {tuple(found[name].shape)}" if name in found else "no weight of this name"
        raise RefusedError(
            f"--weights {folder}: {name} has {got}, expected shape {tuple(shape)}; give the --model and "
            "--size of that checkpoint"
        )
    return found[name].float()


@functools.cache
def _loaded(folder: Path, family: str) -> dict[str, Tensor]:
    if (folder / OURS).is_file():
        return whole.read(folder / OURS)
    files = _files(folder)
    _require_names(family)
    theirs = {name: value for path in files for name, value in whole.read(path).items()}
    # Frequencies of rotary positions, which older versions saved: config.json says them.
    theirs = {name: value for name, value in theirs.items() if not name.endswith(".inv_freq")}
    try:
        made: dict[str, Tensor] = presets.MODELS[family].from_transformers(theirs)
    except (KeyError, StopIteration, ValueError) as error:
        raise RefusedError(f"--weights {folder}: not a {family} of transformers: {error!r}") from error
    return made


def _require_names(family: str) -> None:
    if not hasattr(presets.MODELS[family], "from_transformers"):
        raise RefusedError(f"--weights: models of {family} have no names in transformers; give a {OURS}")


def _files(folder: Path) -> list[Path]:
    """The files of the library's form; beside them may lie the same weights in the maker's own form."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return sorted(folder / name for name in set(json.loads(index.read_text())["weight_map"].values()))
    whole = folder / "model.safetensors"
    files = [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise RefusedError(f"--weights {folder}: no {OURS} and no *.safetensors; name a folder that has them")
    return files
