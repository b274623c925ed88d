"""Test patterns in most of a device's free memory. In: a share of it, seconds.
Out: the words that were wrong.

Each pass writes a pattern to every block, and then reads every block, so that it also finds writes that
change another block. The patterns are the word's own address (finds a wrong or shorted address line),
checkerboards (neighbouring cells), and walking ones and zeros (a data line), each with its complement. Words
have 64 bits.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

BLOCK_BYTES = 1 << 30
STRIPE_WORDS = 1 << 25  # compared at a time, which needs another three quarters of a GiB
CPU_BYTES = 64 << 20
RESERVE_BYTES = 1 << 30  # for the comparison, and for contexts of other processes
WORD_BYTES = 8
CHECKER = 0x5555555555555555
SHOWN = 8
FEWEST_PASSES = 2  # own address and its complement: every bit of every word in both states

Pattern = tuple[str, Callable[[torch.Tensor, int], torch.Tensor | int]]


def patterns(share: float, seconds: float) -> list[dict[str, Any]]:
    """Test all visible devices at once; one entry per device, as `_device` describes it."""
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    devices = devices or [torch.device("cpu")]
    with ThreadPoolExecutor(len(devices)) as pool:
        return list(pool.map(lambda device: _device(device, share, seconds), devices))


def _device(device: torch.device, share: float, seconds: float) -> dict[str, Any]:
    """Test one device: bytes tested, bytes that were free, full passes, seconds, the first wrong words."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else CPU_BYTES
    started = time.monotonic()
    blocks = taken(device, int(share * free))
    passes: list[str] = []
    errors: list[dict[str, Any]] = []
    for name, pattern in every_pattern():
        if len(passes) >= FEWEST_PASSES and time.monotonic() - started > seconds:
            break
        write(blocks, pattern)
        errors += list(wrong(blocks, name, pattern))
        passes.append(name)
    covered = sum(block.numel() for block in blocks) * WORD_BYTES
    del blocks
    if device.type == "cuda":
        torch.cuda.empty_cache()
    took = time.monotonic() - started
    known = {"device": device.index or 0, "bytes": covered, "free_bytes": free, "seconds": round(took, 3)}
    return {**known, "passes": passes, "errors": len(errors), "first": errors[:SHOWN]}


def taken(device: torch.device, size: int) -> list[torch.Tensor]:
    """Blocks of 64-bit words of `size` bytes together, less what comparing them needs."""
    size -= RESERVE_BYTES if device.type == "cuda" else 0
    full, rest = divmod(size, BLOCK_BYTES)
    sizes = [BLOCK_BYTES] * full + ([rest] if rest >= WORD_BYTES else [])
    return [torch.empty(part // WORD_BYTES, dtype=torch.int64, device=device) for part in sizes]


def every_pattern() -> Iterator[Pattern]:
    """The patterns, the most effective first, because the time may end before the last."""
    yield "own address", _address
    yield "own address, complement", lambda stripe, first: _address(stripe, first).bitwise_not_()
    for name, word in (("checkerboard", CHECKER), ("checkerboard, complement", ~CHECKER)):
        yield name, _constant(word)
    for bit in range(64):
        one = 1 << bit if bit < 63 else -(1 << 63)
        yield f"walking one {bit}", _constant(one)
        yield f"walking zero {bit}", _constant(~one)


def write(blocks: list[torch.Tensor], pattern: Callable[[torch.Tensor, int], torch.Tensor | int]) -> None:
    """Write a pattern everywhere."""
    for stripe, first in _stripes(blocks):
        word = pattern(stripe, first)
        stripe.fill_(word) if isinstance(word, int) else stripe.copy_(word)


def wrong(
    blocks: list[torch.Tensor], name: str, pattern: Callable[[torch.Tensor, int], torch.Tensor | int]
) -> Iterator[dict[str, Any]]:
    """The words that are not what was written, with the bits that differ."""
    for stripe, first in _stripes(blocks):
        differs = stripe ^ pattern(stripe, first)
        if bool(differs.any()):
            for place in differs.nonzero()[:SHOWN, 0].tolist():
                bits = int(differs[place]) & (1 << 64) - 1
                yield {"pattern": name, "word": first + place, "bits": f"{bits:#018x}"}


def _stripes(blocks: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, int]]:
    """The parts of all blocks, each with the number of its first word."""
    first = 0
    for block in blocks:
        for stripe in block.split(STRIPE_WORDS):
            yield stripe, first
            first += stripe.numel()


def _address(stripe: torch.Tensor, first: int) -> torch.Tensor:
    return torch.arange(first, first + stripe.numel(), dtype=torch.int64, device=stripe.device)


def _constant(word: int) -> Callable[[torch.Tensor, int], int]:
    return lambda _stripe, _first: word
