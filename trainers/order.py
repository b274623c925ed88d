"""A seeded order of the rows of a data set, new in each pass, in which any place is found by itself.

In: the number of a sample. Out: its row. Nothing is kept: a table of 1.8e9 rows took 14 GB on each rank.
A Feistel network permutes the numbers below a power of 4; one that leaves the rows goes through it again
("cycle walking", Black and Rogaway, CT-RSA 2002), so that the rows are permuted among themselves.
"""

from __future__ import annotations

import hashlib

VERSION = 2  # of the order, in checkpoints; 1 was a table of torch.randperm
ROUNDS = 8


def row(number: int, rows: int, seed: int) -> int:
    """The row of this sample; each `rows` samples in a row are one pass."""
    epoch, place = divmod(number, rows)
    half = ((rows - 1).bit_length() + 1) // 2
    place = _once(place, half, f"{seed} {epoch}")
    while place >= rows:
        place = _once(place, half, f"{seed} {epoch}")
    return place


def _once(place: int, half: int, key: str) -> int:
    mask = (1 << half) - 1
    left, right = place >> half, place & mask
    for turn in range(ROUNDS):
        drawn = hashlib.blake2b(f"{key} {turn} {right}".encode(), digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(drawn, "little") & mask)
    return (left << half) | right
