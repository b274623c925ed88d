"""Weights of torchao's FP8 layers under FSDP2: cast before they are gathered, so half the bytes travel.

In: a model whose FP8 layers hold torchao's class of weights. Out: the same, or plain tensors for a
checkpoint. Such a weight is a float32 tensor in a wrapper, which FSDP2 asks for what to send. Every rank must
send the same number of bytes, so a weight that the ranks cannot share evenly is gathered in bfloat16, and
cast then.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from errors import RefusedError
from layouts.flat import local, spread_as

if TYPE_CHECKING:
    from torch import Tensor

KNOWN = "0.16 to 0.18"  # versions of torchao whose weights were looked into


def like(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """This value in the class of a weight that has none yet."""
    if not casts_itself(parameter):
        return value
    wrapped = torch.empty_like(parameter, device=value.device, requires_grad=False)
    with torch.no_grad():
        wrapped.copy_(value)
    return wrapped


def casts_itself(value: Tensor) -> bool:
    """Whether FSDP2 gathers this tensor, or this rank's part of it, in what the tensor makes of itself."""
    return hasattr(local(value), "fsdp_pre_all_gather")


def plain(value: Any) -> Any:
    """A tensor without the wrapper, in the same memory; anything else as it is."""
    if not (isinstance(value, torch.Tensor) and casts_itself(value)):
        return value
    return spread_as(value, _inside(local(value)))


def unwrap_uneven(model: nn.Module, ranks: int) -> None:
    """Leave no weight in the wrapper whose first dimension `ranks` do not divide."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if casts_itself(parameter) and local(parameter).shape[0] % ranks:
                setattr(module, name, nn.Parameter(plain(parameter.detach())))


def compute_scales(model: nn.Module) -> None:
    """Find the scale of every weight with one all-reduce.

    Without it each weight needs one of its own when it is gathered; with it the scale is as old as the
    values, so this must follow every change of them.
    """
    if any(casts_itself(parameter) for parameter in model.parameters()):
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(model)


def _inside(value: Tensor) -> Tensor:
    """The values of this wrapper.

    torchao has no function for it; torch's protocol of tensor subclasses names the tensors inside a wrapper.
    A scale may stand beside the values.
    """
    names: list[str] = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else []
    held = [getattr(value, name) for name in names]
    found = [part for part in held if part.shape == value.shape and part.dtype == value.dtype]
    if len(found) != 1:
        version = getattr(sys.modules.get("torchao"), "__version__", "of no known version")
        raise RefusedError(
            f"{type(value).__name__} of torchao {version} holds {', '.join(names) or 'no named tensor'}, "
            f"expected one of the weight's shape and type; take torchao {KNOWN}, or --precision bf16"
        )
    return found[0]
