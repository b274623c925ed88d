"""Whole weights in one file of the form of safetensors (https://huggingface.co/docs/safetensors).

In: weights, one at a time. Out: a file; and back, weights that are mapped from it, so that reading one copies
no other. The library is not needed: a header in JSON, and then the bytes.
"""

from __future__ import annotations

import json
import math
import struct
from typing import TYPE_CHECKING

import torch

from errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from torch import Tensor

KINDS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}
LENGTH = struct.Struct("<Q")  # of the header, in bytes


def write(path: Path, shapes: Mapping[str, Iterable[int]], weights: Iterable[tuple[str, Tensor]]) -> None:
    """Write float32 weights, which come in the order of `shapes`; one is held at a time."""
    header, at = {}, 0
    for name, shape in shapes.items():
        end = at + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % LENGTH.size)
    with path.open("wb") as file:
        file.write(LENGTH.pack(len(text)) + text)
        for (name, value), (wanted, facts) in zip(weights, header.items(), strict=True):
            if (name, list(value.shape), value.dtype) != (wanted, facts["shape"], torch.float32):
                raise AssertionError(f"{name} {tuple(value.shape)} {value.dtype} is not {wanted} {facts}")
            file.write(value.contiguous().view(-1).numpy())


def read(path: Path) -> dict[str, Tensor]:
    """The weights of a file, mapped.

    Raises:
        RefusedError: It is cut off, or not of this form, or has a type that is not known.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = LENGTH.unpack(file.read(LENGTH.size))
            header = json.loads(file.read(min(length, size)))
        header.pop("__metadata__", None)
        begin = LENGTH.size + length
        end = begin + max((facts["data_offsets"][1] for facts in header.values()), default=0)
        if end != size:
            raise ValueError(f"{size} bytes, its header expects {end}")
        held = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        return {name: _mapped(held[begin:], facts) for name, facts in header.items()}
    except (ValueError, KeyError, struct.error) as error:
        raise RefusedError(f"{path} is no whole file of safetensors: {error}; copy it again") from error


def _mapped(data: Tensor, facts: dict[str, list[int]]) -> Tensor:
    begin, end = facts["data_offsets"]
    kind, part = KINDS[str(facts["dtype"])], data[begin:end]
    if part.storage_offset() % kind.itemsize:  # the form promises no alignment
        part = part.clone()
    return part.view(kind).view(facts["shape"])
