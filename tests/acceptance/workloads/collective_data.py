"""Data for which a collective's result is exact in any order of summation. In: a payload, a rank. Out:
tensors.

x_r[i] = (7 i + 13 r + 31 t) mod m for rank r and trial t, with n m below the first integer that the dtype
cannot represent, as in nccl-tests' verifiable.h.
"""

from dataclasses import dataclass

import torch

from workloads.gates import Reading, bits, exact
from workloads.ranks import Ranks

DTYPES = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int64": torch.int64,
    "uint8": torch.uint8,
}  # fmt: skip
# Integers are exact up to here. A byte can carry an fp8 value, so every code of a byte must survive.
COUNTS_TO = {"fp32": 2**24, "bf16": 256, "fp16": 2048, "int64": 2**40, "uint8": 256}
GUARD = 64


@dataclass(frozen=True, kw_only=True)
class Payload:
    """What is sent: elements per rank, their dtype, elements off alignment, and the number of the trial."""

    count: int
    dtype: str = "fp32"
    offset: int = 0
    trial: int = 0

    def __str__(self) -> str:
        """The payload as the name of a case."""
        return f"{self.dtype} x {self.count}{f' at offset {self.offset}' if self.offset else ''}"

    def modulus(self, ranks: Ranks) -> int:
        """Small enough that the sum over the ranks is exact, and odd:
        data of an even period would hide a shift by a power of two, which is how libraries split an array.
        """
        if self.dtype == "uint8":
            return 251
        return max(3, (COUNTS_TO[self.dtype] // ranks.size - 1) | 1)


def values(
    payload: Payload, ranks: Ranks, rank: int, count: int | None = None, start: int = 0
) -> torch.Tensor:
    """The values of `rank` from element `start` on, as int64."""
    index = torch.arange(start, start + (payload.count if count is None else count), device=ranks.device)
    return (7 * index + 13 * rank + 31 * payload.trial) % payload.modulus(ranks)


def send_buffer(payload: Payload, ranks: Ranks, count: int | None = None) -> torch.Tensor:
    """This rank's values at the payload's offset."""
    data = values(payload, ranks, ranks.rank, count)
    buffer = Guarded(len(data), payload, ranks)
    buffer.view.copy_(data)
    return buffer.view


class Guarded:
    """A poisoned output with a guard band on each side."""

    def __init__(self, count: int, payload: Payload, ranks: Ranks) -> None:
        kind = DTYPES[payload.dtype]
        self.start = GUARD + payload.offset
        self.poison = float("nan") if kind.is_floating_point else 77
        self.whole = torch.full((self.start + count + GUARD,), self.poison, dtype=kind, device=ranks.device)
        self.view = self.whole[self.start : self.start + count]

    def readings(self, expected: torch.Tensor) -> tuple[Reading, Reading]:
        """The values are exact, and nothing around them was written."""
        before, after = self.whole[: self.start], self.whole[self.start + self.view.numel() :]
        around = torch.cat((before, after))
        clean = torch.full_like(around, self.poison)
        touched = int((bits(around) != bits(clean)).sum())
        return exact(self.view, expected, name="values"), Reading("guard band", touched, 0.0)
