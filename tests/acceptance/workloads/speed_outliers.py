"""Bus bandwidth from time, and what is slower than the rest. In: times or rates.
Out: GB/s, problems in words.

Bus bandwidth is defined as in nccl-tests' doc/PERFORMANCE.md.
"""

import itertools
import statistics
from collections.abc import Collection, Mapping

LARGEST_DIP = 0.05  # bandwidth may not fall by more from one size to the next (ROCm/cvs cvs/lib/rccl_lib.py)
# One bad link shows as one slow direction, or as one pair far under the others (checks of NVIDIA/nccl#1130).
# Judged by the best repeat, which no busy host slows down: pairs of H200s differ by 1 %, and their two
# directions by 4 %. Where no link joins a pair, its way through the host decides. The least shares of the way
# back and of the median:
LINKED, THROUGH_HOST = (0.9, 0.9), (0.8, 0.5)
SHAPE_FROM_BYTES = 16 << 20  # below, the library changes algorithm and protocol, so steps are normal


def busbw_gb_per_s(op: str, size_bytes: int, seconds: float, ranks: int) -> float:
    """The bus bandwidth in 1e9 bytes/s; `size_bytes` is the size of the whole array."""
    factor = 2 * (ranks - 1) / ranks if op == "all_reduce" else (ranks - 1) / ranks
    return size_bytes / seconds * factor / 1e9


def dips(curve: Mapping[int, float]) -> list[str]:
    """Each size that is slower than the next smaller one by more than the allowed share."""
    sizes = sorted(size for size in curve if size >= SHAPE_FROM_BYTES)
    return [
        f"{curve[large]:.1f} GB/s at {large} B after {curve[small]:.1f} GB/s at {small} B"
        for small, large in itertools.pairwise(sizes)
        if not curve[large] >= (1 - LARGEST_DIP) * curve[small]
    ]


def odd_pairs(
    rates: Mapping[tuple[int, int], float],
    links: Mapping[tuple[int, int], int] | None = None,
    linked: Collection[tuple[int, int]] | None = None,
) -> list[str]:
    """Each (from, to) that is slower than the least share of its way back, or of the median pair.

    `links` says how many links join each pair; a pair is compared with the pairs that have the same number.
    Pairs of an MI250 node have 1, 2 or 4 (arXiv 2302.14827). `linked`: the pairs with links, by default all.
    """
    middle = medians(rates, links)
    found = []
    for (sender, receiver), rate in rates.items():
        joined = linked is None or (sender, receiver) in linked
        of_back, of_median = LINKED if joined else THROUGH_HOST
        back, usual = rates.get((receiver, sender), rate), middle[sender, receiver]
        if not rate >= of_back * back:
            found.append(f"{sender} to {receiver} {rate:.1f} GB/s, back {back:.1f} GB/s")
        elif not rate >= of_median * usual:
            found.append(f"{sender} to {receiver} {rate:.1f} GB/s, the median of all pairs {usual:.1f} GB/s")
    return found


def medians(
    rates: Mapping[tuple[int, int], float], links: Mapping[tuple[int, int], int] | None = None
) -> dict[tuple[int, int], float]:
    """For each pair the median of the pairs with the same number of links; without counts, of all pairs."""
    number = {pair: (links or {}).get(pair, 0) for pair in rates}
    alike: dict[int, list[float]] = {}
    for pair, rate in rates.items():
        alike.setdefault(number[pair], []).append(rate)
    return {pair: statistics.median(alike[number[pair]]) for pair in rates}


def slow_devices(rates: Mapping[int, float], least: float, unit: str) -> list[str]:
    """Each device that reaches less than the share `least` of its node's median."""
    middle = statistics.median(rates.values()) if rates else 0.0
    return [
        f"device {device} reaches {rate:.1f} {unit}, the median of its node is {middle:.1f} {unit}"
        for device, rate in rates.items()
        if not rate >= least * middle
    ]
