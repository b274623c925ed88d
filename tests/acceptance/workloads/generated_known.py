"""Known faults that drawn operators meet, each with its exact condition. In: a kernel's call.

Out: its results without the numbers that the fault gets wrong; all others are judged.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch._prims_common import suggest_memory_format

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from workloads.generated_judge import Call

    Rule = Callable[[Mapping[str, Any], torch.Tensor], torch.Tensor]

MOST_OF_MODE = 2048  # in a row
PAIR = 4  # bytes of two halves
AMX_SUM = 32  # halves of a row in a tile
PRODUCTS = {"mm": "self", "addmm": "mat1", "bmm": "self", "baddbmm": "batch1"}  # and their left operands
# What compares numbers, or bits, of NaN: that has no order (pytorch#95583), and many bits.
NO_NAN = ("unique_dim", "_unique2", "hash_tensor")
# Of a score beyond it the logarithm of the sum is that far off in float32 that exp(score - logarithm) is a
# matter of chance: backward of a processor's flash kernel has it, and float64 with the same operands too.
FAR_SCORE = 2.0**20
FLASH_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"
LONG = 4  # bytes of a type; in a shorter one an exponent that is a number is rounded to it: 2/3 is 0.668
BORDER = 4 * 2.0**-24  # of a place, by which two roundings in float32 move it


def torch_is_newer_than(*release: int) -> bool:
    """Whether this torch is of a later release, of two numbers."""
    return tuple(map(int, torch.__version__.split(".")[:2])) > release


def arguments(func: Any, call: Call) -> dict[str, Any]:
    """A kernel's arguments by name."""
    names = [one.name for one in func._schema.arguments]
    return {**dict(zip(names, call.args, strict=False)), **call.kwargs}


def require_harmless(func: Any, call: Call, args: Sequence[Any] = ()) -> None:
    """Refuse what ends a device's context; `args` are as the device has them.

    `mode` sorts many halves by comparisons, and NaN has no order. A convolution with one channel in a group
    reads pairs of halves (cuDNN 9.19), with channels last also where they begin between two pairs.
    """
    given, name = arguments(func, call), str(func._schema.name).removeprefix("aten::")
    if call.dtype is torch.float32:
        return
    if name == "mode":
        x = given["self"]
        ends = x.dim() and x.shape[given.get("dim", -1)] > MOST_OF_MODE and x.isnan().any()
    else:
        odd = any(isinstance(one, torch.Tensor) and one.data_ptr() % PAIR for one in args)
        last = name.startswith("convolution") and suggest_memory_format(given["input"])
        ends = odd and last is torch.channels_last and given["weight"].shape[1] == 1
    if ends:
        raise NotImplementedError("not run: a known fault ends the device's context")


def passed_over(
    func: Any, call: Call, got: Sequence[torch.Tensor], right: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], bool]:
    """The results, with float64's numbers where a known fault may give others; and whether it may."""
    name, given = str(func._schema.name).removeprefix("aten::"), arguments(func, call)
    if call.on is not None and name in NO_NAN and given["self"].isnan().any():
        return [one.to(other.dtype) for one, other in zip(right, got, strict=False)], True
    if call.on is None and name in PRODUCTS and got[0].shape == right[0].shape:
        left = given[PRODUCTS[name]]
        spoilt = right[0].isfinite() & ~got[0].isfinite() & _reads_rows_beside(left)
        return [torch.where(spoilt, right[0].to(got[0].dtype), got[0])], bool(spoilt.any())
    if name == FLASH_BACKWARD and largest_score(given["query"], given["key"]) > FAR_SCORE:
        return [one.to(other.dtype) for one, other in zip(right, got, strict=False)], True
    if name == "pow" and got[0].dtype.itemsize < LONG and isinstance(given["exponent"], float):
        exponent = torch.tensor(given["exponent"], dtype=got[0].dtype).item()
        took = got[0] == (given["self"].double() ** exponent).to(got[0].dtype)
        exact = right[0].to(got[0].dtype)
        return [torch.where(took, exact, got[0])], bool((took & (got[0] != exact)).any())
    rules = ANYWHERE if call.on is None else KNOWN | ANYWHERE
    says = next((says for ends, says in rules.items() if name.endswith(ends)), None)
    if says is None or got[0].shape != right[0].shape:
        return list(got), False
    same = (got[0].double() == right[0]) | (got[0].isnan() & right[0].isnan())
    wrong = says(given, right[0]) & ~same
    return [torch.where(wrong, right[0].to(got[0].dtype), got[0]), *got[1:]], bool(wrong.any())


def largest_score(q: torch.Tensor, k: torch.Tensor) -> float:
    """The largest product of a query and a key, scaled as attention does by default."""
    q, k = q.double().unflatten(1, (k.shape[1], -1)), k.double()[:, :, None]
    return float((q @ k.mT).abs().max() / math.sqrt(q.shape[-1]))


def _without_nan(given: Mapping[str, Any], right: torch.Tensor) -> torch.Tensor:
    """NaN is lost (pytorch#173799, corrected after 2.11)."""
    corrected = torch_is_newer_than(2, 11)
    return right.isnan() & (given.get("p", 2.0) in (0.0, math.inf) and not corrected)


def _last_channels(given: Mapping[str, Any], right: torch.Tensor) -> torch.Tensor:
    """The gradient goes to other places where channels come last and there is padding (pytorch#188344)."""
    corrected = torch_is_newer_than(2, 13)
    last = suggest_memory_format(given["self"]) is torch.channels_last
    return torch.full(right.shape, last and any(given.get("padding", ())) and not corrected)


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


def _at_borders(given: Mapping[str, Any], right: torch.Tensor, *, half: float = 0.0) -> torch.Tensor:
    """A place that the rounding of a scale moves to the sample beside it, in the type or in float64."""
    moved = torch.zeros(right.shape, dtype=torch.bool)
    scales = [scale for name, scale in given.items() if name.startswith("scales")]
    for n, size in enumerate(given["output_size"]):
        scale = scales[n] if n < len(scales) else None
        step = 1 / scale if scale and scale > 0 else given["self"].shape[n + 2] / size
        if float(torch.tensor(step, dtype=torch.float32)) == step:
            continue
        places = (torch.arange(size) + half).double() * step
        ways = [(places * (1 + way * BORDER)).floor() for way in (-1, 1)]
        moved.index_fill_(n + 2, (ways[0] != ways[1]).nonzero().flatten(), value=True)
    return moved


def _reads_rows_beside(left: torch.Tensor) -> bool:
    """Whether AMX multiplies rows beside by zero, and some hold no numbers (uxlfoundation/oneDNN#5717)."""
    amx: bool = getattr(torch.cpu, "_is_amx_tile_supported", bool)()
    odd = left.dtype is torch.bfloat16 and left.shape[-1] % AMX_SUM != 0
    return amx and odd and not bool(left.isfinite().all())


KNOWN: dict[str, Rule] = {
    "_pdist_forward": _without_nan,
    "_cdist_forward": _without_nan,
    "_pdist_backward": _without_nan,
    "_cdist_backward": _without_nan,
    "avg_pool2d_backward": _last_channels,
    "2d_aa": _one_column,
    **{f"upsample_nearest{n}d_backward": _other_places for n in (1, 2, 3)},
    **{
        f"upsample_nearest_exact{n}d_backward": lambda *each: _other_places(*each, half=0.5)
        for n in (1, 2, 3)
    },
}


def _no_range(given: Mapping[str, Any], right: torch.Tensor) -> torch.Tensor:
    """Bins of one number begin at it minus one, which a half may not tell from the number."""
    x, ends = given["self"], (given.get("min", 0), given.get("max", 0))
    alone = ends[0] == ends[1] and x.numel() > 0 and bool((x == x.flatten()[0]).all())
    return torch.full(right.shape, alone and bool((x - 1 == x).any()))


# Of a processor too: the rounding of a type, and no fault.
ANYWHERE: dict[str, Rule] = {
    "histc": _no_range,
    **{f"upsample_nearest{n}d": _at_borders for n in (1, 2, 3)},
    **{f"upsample_nearest_exact{n}d": lambda *each: _at_borders(*each, half=0.5) for n in (1, 2, 3)},
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
