"""Weights that a user brings to start from. In: a folder, a family. Out: each weight under our name.

A folder is a model that transformers saved (`*.safetensors`), or a checkpoint of ours with whole weights
(`weights.pt`). Every rank maps the files and copies only what it holds.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

import presets
from errors import RefusedError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

OURS = "weights.pt"


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
        ours: dict[str, Tensor] = torch.load(folder / OURS, mmap=True, weights_only=True)
        return ours
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise RefusedError(f"--weights {folder}: no {OURS} and no *.safetensors; name a folder that has them")
    module = presets.MODELS[family]
    if not hasattr(module, "from_transformers"):
        raise RefusedError(f"--weights: models of {family} have no names in transformers; give a {OURS}")
    theirs = {name: value for path in files for name, value in _safetensors(path).items()}
    try:
        made: dict[str, Tensor] = module.from_transformers(theirs)
    except (KeyError, StopIteration, ValueError) as error:
        raise RefusedError(f"--weights {folder}: not a {family} of transformers: {error!r}") from error
    return made


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise RefusedError(f"{path} needs safetensors to be read; pip install safetensors") from error
    found: dict[str, Tensor] = load_file(path)
    return found
