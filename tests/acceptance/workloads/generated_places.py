"""Views of larger tensors, parts of tensors, and changes in place: what compiled programs are drawn of.

In: a tensor. Out: a leaf made from it, and the view of the leaf that is the tensor again.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """Where an operand lies: a leaf made from it, and the view of the leaf that is the operand again."""

    make: Callable[[torch.Tensor], torch.Tensor]
    take: Callable[[torch.Tensor, Shape], torch.Tensor]
    dims: int = 1  # the least number of dimensions
    other_numbers: bool = False


def strides(shape: Shape) -> list[int]:
    return [math.prod(shape[n + 1 :]) for n in range(len(shape))]


PLACES: dict[str, Place] = {
    "": Place(lambda x: x, lambda b, _: b, 0),
    "a slice": Place(lambda x: torch.cat((x, x)), lambda b, s: b.narrow(0, s[0], s[0])),
    "every other": Place(lambda x: torch.stack((x, x), -1).flatten(-2), lambda b, _: b[..., 1::2]),
    "a column": Place(lambda x: torch.stack((x, x), -1), lambda b, _: b.select(-1, 1), 0),
    "turned": Place(lambda x: x.mT.contiguous(), lambda b, _: b.mT, 2),
    "a turned copy": Place(lambda x: x.mT.contiguous(), lambda b, _: b.mT.contiguous(), 2),
    "moved": Place(lambda x: x.movedim(0, -1).contiguous(), lambda b, _: b.movedim(-1, 0), 2),
    "flat": Place(lambda x: x.reshape(-1), lambda b, s: b.view(s)),
    "a diagonal": Place(torch.diag_embed, lambda b, _: b.diagonal(0, -2, -1)),
    "a chunk": Place(lambda x: torch.cat((x, x), -1), lambda b, _: b.chunk(2, -1)[1]),
    "unbound": Place(lambda x: torch.stack((x, x)), lambda b, _: b.unbind()[0], 0),
    "a window": Place(lambda x: torch.cat((x, x), -1), lambda b, s: b.unfold(-1, s[-1], 1)[..., 1, :],
                      other_numbers=True),
    "strided": Place(lambda x: torch.cat((x, x)).contiguous(),
                     lambda b, s: b.as_strided(s, strides(s), math.prod(s)), 1),
    "expanded": Place(lambda x: x.narrow(-1, 0, 1), lambda b, s: b.expand(s), other_numbers=True),
}  # fmt: skip
# A part of a tensor with at least one dimension, as a view.
PARTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all": lambda y: y,
    "a half": lambda y: y.narrow(-1, y.shape[-1] // 2, y.shape[-1] - y.shape[-1] // 2),
    "a row": lambda y: y[0],
    "each second": lambda y: y[..., ::2],
    "turned": lambda y: y.mT if y.dim() > 1 else y.unsqueeze(0),
    "its diagonal": lambda y: y.diagonal() if y.dim() > 1 else y[:1],
    "split": lambda y: y.tensor_split(2, 0)[0],
}
CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "times 0.75": lambda v: v.mul_(0.75),
    "plus itself": lambda v: v.add_(v.clone(), alpha=0.5),
    "overwritten": lambda v: v.copy_(v.detach().flip(0) if v.dim() else v),
    "negated": lambda v: v.neg_(),
    "zeroed": lambda v: v.zero_(),
    "clamped": lambda v: v.clamp_(min=0.125),
}
