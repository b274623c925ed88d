"""Known faults that drawn operators meet on a device, each with its exact condition. In: a kernel's call.

Out: its results without the numbers that the fault gets wrong; all others are judged.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from workloads.generated_judge import Call


def arguments(func: Any, call: Call) -> dict[str, Any]:
    """A kernel's arguments by name."""
    names = [one.name for one in func._schema.arguments]
    return {**dict(zip(names, call.args, strict=False)), **call.kwargs}


def passed_over(
    func: Any, call: Call, got: Sequence[torch.Tensor], right: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], bool]:
    """The results, with float64's numbers where a known fault may give others; and whether it may."""
    name = str(func._schema.name).removeprefix("aten::")
    says = next((says for ends, says in KNOWN.items() if name.endswith(ends)), None)
    wrong = says(arguments(func, call), right[0]) if says else torch.tensor(data=False)
    if not wrong.any() or got[0].shape != right[0].shape:
        return list(got), False
    return [torch.where(wrong, right[0].to(got[0].dtype), got[0]), *got[1:]], True


def _without_nan(given: Mapping[str, Any], right: torch.Tensor) -> torch.Tensor:
    """NaN is lost (pytorch#173799, corrected after 2.11)."""
    corrected = tuple(map(int, torch.__version__.split(".")[:2])) > (2, 11)
    return right.isnan() & (given.get("p", 2.0) in (0.0, math.inf) and not corrected)


def _one_column(given: Mapping[str, Any], right: torch.Tensor) -> torch.Tensor:
    """The processor is wrong, in float64 too: it takes the first row's weights for all rows of one column."""
    rows = given["self" if "self" in given else "input"].shape[-2]
    return torch.tensor(right.shape[-1] == 1 and right.shape[-2] not in (1, rows))


def _other_places(given: Mapping[str, Any], right: torch.Tensor, *, half: float = 0.0) -> torch.Tensor:
    """Rounding of a scale: a gradient goes to other places than forward read (pytorch#97135)."""
    wrong = torch.zeros(right.shape, dtype=torch.bool)
    scales = [scale for name, scale in given.items() if name.startswith("scales")]
    for n, size in enumerate(given["output_size"]):
        most, scale = given["input_size"][n + 2], scales[n] if n < len(scales) else None
        ways = (1 / scale, scale) if scale and scale > 0 else (most / size, size / most)
        there, back = (torch.tensor(one, dtype=torch.float32) for one in ways)
        places = torch.arange(size)
        read = ((places + half) * there).floor().clamp(max=most - 1).long()
        starts = (torch.arange(most + 1) * back - half).ceil()
        given_to = (starts[:, None] <= places).sum(0) - 1
        off = read != given_to
        rows = torch.cat([read[off], given_to[off & (given_to < most)]])
        wrong.index_fill_(n + 2, rows, value=True)
    return wrong


KNOWN: dict[str, Callable[[Mapping[str, Any], torch.Tensor], torch.Tensor]] = {
    "_pdist_forward": _without_nan,
    "_cdist_forward": _without_nan,
    "2d_aa": _one_column,
    **{f"upsample_nearest{n}d_backward": _other_places for n in (1, 2, 3)},
    **{
        f"upsample_nearest_exact{n}d_backward": lambda *each: _other_places(*each, half=0.5)
        for n in (1, 2, 3)
    },
}


def is_at_its_places(func: Any, call: Call, got: Sequence[torch.Tensor]) -> bool:
    """Whether numbers that a kernel gives with their places are there, among equal ones in whatever place."""
    if [one.name for one in func._schema.returns] != ["values", "indices"]:
        return True
    given, (numbers, places) = arguments(func, call), got
    dim, whole = given.get("dim", -1), given["self"]
    if not whole.dim() or not whole.numel():
        return True
    if numbers.dim() < whole.dim():
        numbers, places = numbers.unsqueeze(dim), places.unsqueeze(dim)
    if bool(((places < 0) | (places >= whole.shape[dim])).any()):
        return False
    there = whole.cpu().gather(dim, places)
    return bool(((there == numbers) | (there.isnan() & numbers.isnan())).all())
