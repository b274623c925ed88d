"""What a drawn collective sends and must give. In: a call, a place, a turn. Out: shares, numbers.

Each operation says which share goes from whom to whom. Shares are integers whose sums, means and products the
type holds, so they are exact in any order; or random bits, which no copy may change; or fractions, which a
sum may round once for each rank.
"""

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from workloads.gates import unit_roundoff

Share = tuple[int, int]  # from, to: places in the group
ALL = -1  # a share that is the reduction over all


@dataclass(frozen=True)
class Kind:
    """A type: what torch calls it, its numbers one by one, and up to which integer it holds all."""

    whole: torch.dtype
    part: torch.dtype
    most: int
    parts: int = 1


def _kind(name: str, most: int) -> Kind:
    kind = getattr(torch, name)
    return Kind(kind, kind, most)


KINDS = {
    "fp64": _kind("float64", 2**53),
    "fp32": _kind("float32", 2**24),
    "fp16": _kind("float16", 2**11),
    "bf16": _kind("bfloat16", 2**8),
    "e4m3": _kind("float8_e4m3fn", 2**4),
    "e5m2": _kind("float8_e5m2", 2**3),
    "int8": _kind("int8", 2**7 - 1),
    "uint8": _kind("uint8", 2**8 - 1),
    "int32": _kind("int32", 2**31 - 1),
    "int64": _kind("int64", 2**62),
    "bool": _kind("bool", 1),
    "c64": Kind(torch.complex64, torch.float32, 2**24, 2),
    "c128": Kind(torch.complex128, torch.float64, 2**53, 2),
}
COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add, "avg": torch.add, "premul": torch.add, "product": torch.mul, "min": torch.minimum,
    "max": torch.maximum, "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor,
}  # fmt: skip
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
IN_PLACE = ("all_reduce", "reduce", "broadcast")
LISTS = ("all_gather", "gather", "scatter", "reduce_scatter", "all_to_all")
PAIRED = ("batch_isend_irecv", "send")


@dataclass(frozen=True, kw_only=True)
class Call:
    """One collective. `root` is a place in its group, or how far messages go; offset -1 means no guards."""

    op: str
    dtype: str = "fp32"
    count: int = 1
    reduce: str = "sum"
    values: str = "exact"
    offset: int = 0
    root: int = 0
    uneven: int = 0
    inplace: bool = False
    apart: bool = False
    group: int = 0
    numbers: int = 0

    @property
    def kind(self) -> Kind:
        """The type of the elements."""
        return KINDS[self.dtype]

    def length(self, share: Share) -> int:
        """Elements of a share: equal, or each pair of ranks another number, zero among them."""
        if not self.uneven:
            return self.count
        return self.count * ((3 * share[0] + 2 * share[1] + self.uneven) % 4) // 3


def sent(call: Call, me: int, size: int) -> list[Share]:
    """The shares that a place in the group gives."""
    op, root = _plain(call.op), me == call.root
    if op in {"scatter", "reduce_scatter", "all_to_all"}:
        return [(me, to) for to in range(size)] if root or op != "scatter" else []
    gives = (root or op not in {"broadcast", "send"}) and (size > 1 or op not in PAIRED)
    return [(me, 0)] if gives else []


def received(call: Call, me: int, size: int) -> list[Share]:
    """The shares that a place in the group gets."""
    op, root, pair = call.op, call.root, size > 1
    ring = (me - 1 - root % max(1, size - 1)) % size  # who sends to this place
    shares = {
        "all_reduce": [(ALL, 0)],
        "reduce": [(ALL, 0)] if me == root else [],
        "all_gather": [(one, 0) for one in range(size)],
        "reduce_scatter": [(ALL, me)],
        "all_to_all": [(one, me) for one in range(size)],
        "gather": [(one, 0) for one in range(size)] if me == root else [],
        "broadcast": [(root, 0)],
        "scatter": [(root, me)],
        "send": [(root, 0)] if pair and me == (root + 1) % size else [],
        "batch_isend_irecv": [(ring, 0)] if pair else [],
        "barrier": [],
    }
    return shares[_plain(op)]


def _plain(op: str) -> str:
    for end in ("_into_tensor", "_tensor", "_single", "_object_list", "_object"):
        op = op.removesuffix(end)
    return op


def noise(key: int, count: int, device: torch.device) -> torch.Tensor:
    """64 random bits for each element, the same on every rank and device; int64 wraps around."""
    found = torch.arange(key, key + count, device=device)
    for factor, shift in ((-7046029254386353131, 29), (-4658895280553007687, 32)):
        found = (found ^ (found >> shift)) * factor
    return found ^ (found >> 31)


def values(call: Call, share: Share, size: int, turn: int, device: torch.device) -> torch.Tensor:
    """One rank's share, in its type's own numbers."""
    key = zlib.crc32(f"{call.numbers} {share} {turn}".encode()) << 24
    kind = call.kind
    found = noise(key, call.length(share) * kind.parts, device)
    if call.values == "bits":
        width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[kind.part.itemsize]
        return found.to(width).view(kind.part)
    if call.values == "normal":
        return (found.double() * 2.0**-63).to(kind.part)
    if kind.part == torch.bool:
        return (found & 1).bool()
    signed = kind.part != torch.uint8
    if call.reduce == "product":
        power = (found >> 8) % (3 if kind.part.is_floating_point else 2)
        power = power - 1 if kind.part.is_floating_point else power * (share[0] < 6)
        sign = 1 - 2 * (found & 1) if signed else 1
        return (sign * torch.exp2(power.double())).to(kind.part)
    times = size if call.reduce == "avg" else 1
    share_of = {"avg": size * size, "premul": 2 * size, "sum": size}.get(call.reduce, 1)
    most = kind.most // share_of if call.op in REDUCING else kind.most
    found = found % (2 * most + 1) - most if signed else (found & (2**62 - 1)) % (most + 1)
    return (found * times).to(kind.part)


def right(
    call: Call, share: Share, size: int, turn: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What must arrive, and by how much each element may be off; None where no bit may differ."""
    make = functools.partial(values, call, size=size, turn=turn, device=device)
    if share[0] != ALL:
        return make(share), None
    whole = torch.float64 if call.kind.part.is_floating_point else torch.int64
    total, spread = make((0, share[1])).to(whole), None
    if call.values == "normal":
        spread = total.abs()
    for one in range(1, size):
        more = make((one, share[1])).to(whole)
        total = COMBINE[call.reduce](total, more)
        spread = None if spread is None else spread + more.abs()
    if call.reduce == "avg":
        total = total / size if whole == torch.float64 else total.div(size, rounding_mode="trunc")
        spread = None if spread is None else spread / size
    total = 2 * total if call.reduce == "premul" else total
    inexact = call.reduce == "avg" and size & (size - 1)  # a library multiplies by 1 / size
    if inexact and spread is None and whole == torch.float64:
        spread = (
            sum((make((one, share[1])).to(whole).abs() for one in range(size)), torch.zeros_like(total))
            / size
        )
    if spread is None:
        return (total != 0 if call.dtype == "bool" else total).to(call.kind.part), None
    return total, 2 * size * unit_roundoff(call.kind.part) * spread
