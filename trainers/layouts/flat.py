"""Where weights lie in a flat buffer. In: a module on the meta device, plain or split over tensor ranks. Out:
offsets and views.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from layouts.sharding import DTensor

if TYPE_CHECKING:
    from torch import Tensor, nn

ALIGN = 64  # elements; each weight begins at a multiple


def offsets(module: nn.Module, prefix: str) -> tuple[dict[str, tuple[Tensor, int]], int, int]:
    """The places of weights in the flat buffer, in elements.

    Returns the offset of each weight, the offset of the first one that is no shard of tensor parallel, and
    the buffer's length before padding.
    """
    weights = {
        f"{prefix}.{path}" if prefix else path: parameter
        for path, parameter in module.named_parameters()
        if parameter.is_meta
    }
    shards = [path for path, parameter in weights.items() if is_shard(parameter)]
    at, end, common = {}, 0, 0
    for path in shards + [path for path in weights if path not in shards]:
        at[path] = end
        end += -(-local(weights[path]).numel() // ALIGN) * ALIGN
        common = end if path in shards else common
    return {path: (parameter, at[path]) for path, parameter in weights.items()}, common, end


def is_shard(parameter: Tensor) -> bool:
    """Whether a tensor rank holds a part of this weight only."""
    return isinstance(parameter, DTensor) and any(place.is_shard() for place in parameter.placements)


def local(parameter: Tensor) -> Tensor:
    """What this rank holds of a weight."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def view(flat: Tensor, parameter: Tensor, offset: int) -> Tensor:
    """The place of a weight in a flat buffer."""
    held = local(parameter)
    return flat[offset : offset + held.numel()].view(held.shape)


def spread_as(parameter: Tensor, held: Tensor) -> Tensor:
    """This local tensor, spread over the tensor ranks as the parameter is."""
    if not isinstance(parameter, DTensor):
        return held
    shape = {"shape": parameter.shape, "stride": parameter.stride()}
    return DTensor.from_local(held, parameter.device_mesh, parameter.placements, run_check=False, **shape)


def own_part(whole: Tensor, parameter: Tensor) -> Tensor:
    """What this tensor rank holds of a whole tensor."""
    if not isinstance(parameter, DTensor):
        return whole
    for dim, place in enumerate(parameter.placements):
        if place.is_shard():
            mesh = parameter.device_mesh
            whole = whole.chunk(mesh.size(dim), place.dim)[mesh.get_local_rank(dim)]
    return whole


def owners(model: nn.Module, parameter: Tensor) -> list[tuple[nn.Module, str]]:
    """Every module and attribute that holds this weight: a tied weight has two."""
    return [(m, leaf) for m in model.modules() for leaf, p in m._parameters.items() if p is parameter]  # noqa: SLF001
