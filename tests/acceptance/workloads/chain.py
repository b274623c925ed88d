"""A chain of products that `harness.clock` asks for. In: a seed, a salt, steps. Out: sums of rows, seconds.

X <- sign(X A), with whole numbers that every type holds exactly: each order of additions gives the same.
"""

import time
from typing import Any

import torch

from harness.clock import drawn
from workloads import device, synchronize

ROWS_AT_ONCE = 8192  # in float32

_kept: dict[str, torch.Tensor] = {}


def prepare(seed: str, rows: int, width: int) -> None:
    """Put X and A on the device; before the clock starts."""
    dtype = torch.bfloat16 if device().type == "cuda" else torch.float32
    x = b"".join(drawn(seed, f"row {row}", width) for row in range(rows))
    for name, body, shape in (
        ("x", x, (rows, width)),
        ("a", drawn(seed, "matrix", width**2), (width, width)),
    ):
        numbers = torch.frombuffer(bytearray(body), dtype=torch.uint8).to(device())
        _kept[name] = numbers.remainder(3).to(dtype).sub_(1).reshape(shape)
    _kept["weights"] = (torch.arange(width, device=device()) % 127 + 1).to(torch.float32)
    _kept["out"] = torch.empty_like(_kept["x"])
    torch.mm(_kept["x"], _kept["a"], out=_kept["out"])
    synchronize()


def run(salt: str, steps: int) -> dict[str, Any]:
    """The weighted sum of each row after some steps, and the seconds that the steps took."""
    begin = time.perf_counter()
    a, out = _kept["a"], _kept["out"]
    signs = torch.frombuffer(bytearray(drawn(salt, "signs", len(a))), dtype=torch.uint8).to(device())
    x = _kept["x"] * (signs.bitwise_and(1).to(a.dtype) * 2 - 1)
    for _ in range(steps):
        torch.mm(x, a, out=out)
        x, out = out.sign_(), x
    _kept["out"] = out
    parts = [(part.float() * _kept["weights"]).sum(1) for part in x.split(ROWS_AT_ONCE)]
    sums = torch.cat(parts).long().tolist()
    return {"seconds": time.perf_counter() - begin, "sums": sums}
