"""Which checks run, and in which order. In: their marks.
Out: an order, and progress that all workers can see.

Correctness comes first, then performance, then the checks marked `last`, which judge the whole run and have a
file of their own. pytest-xdist hands out checks in order, but earlier ones may still run in another worker.
So each check that ends leaves a mark in a folder that all workers see, and a check waits for all marks of
earlier phases.
A check that takes long in this tier announces it there before it begins.
"""

import os
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from harness.leases import Use, Wish

TIERS = ("smoke", "standard", "soak")
GATE = "gate"  # runs the checks with that mark, of any tier, as briefly as they can
# If no check ends for this long beyond any announced time, a worker is gone or hangs behind its own watchdog.
STALL_S = 900.0
# Checks of these files share no launch, so they may run in any worker.
INDEPENDENT = frozenset(
    {
        "test_attention.py", "test_compiled.py", "test_image.py", "test_kernel_speed.py", "test_kernels.py",
        "test_packages.py",
    }
)  # fmt: skip
# Checks that need their devices whole, of a file whose other checks share them.
WHOLE = frozenset(
    {
        "test_attention_that_ran_is_fused", "test_beyond_32_bits", "test_bf16_job_learns",
        "test_curve_at_full_width", "test_generated_huge", "test_gradients_at_full_width",
        "test_groups_set_up_and_torn_down", "test_memory_holds_patterns", "test_own_tests_of_collectives",
        "test_sizes_of_models", "test_throughput", "test_trains_with_flash_attn_4",
        "test_witness_of_collectives",
    }
)  # fmt: skip
# The performance checks of the files that have checks of correctness too, or that are spread over devices.
SPEED = frozenset(
    {
        "test_attention_speed", "test_convolution_halves", "test_copy_speed", "test_flash_attention_4_speed",
        "test_float32_speed", "test_fp8_is_worth_it", "test_gemm_speed", "test_gradient_product_speed",
        "test_graph_speed", "test_host_bandwidth", "test_memory_bound_speed", "test_peer_bandwidth",
        "test_throughput_8b", "test_throughput_fsdp2", "test_witness_of_speed",
    }
)  # fmt: skip
LASTS = "lasts-"  # prefix of the mark of a check that announced how long it takes
POLL_S = 0.1


def tier(item: pytest.Item) -> int:
    """The index in `TIERS` of the first tier that runs a check."""
    mark = item.get_closest_marker("tier")
    name = mark.args[0] if mark else "smoke"
    if name not in TIERS:
        raise pytest.UsageError(f"{item.nodeid}: unknown tier {name!r}, expected one of {', '.join(TIERS)}")
    return TIERS.index(name)


def is_in(item: pytest.Item, chosen: str) -> bool:
    """Whether a check belongs to a run of `chosen`: a tier, or the gate."""
    return item.get_closest_marker(GATE) is not None if chosen == GATE else tier(item) < reach(chosen)


def reach(chosen: str) -> int:
    """How many of `TIERS` a run of `chosen` takes checks from; none as a whole for the gate."""
    return 0 if chosen == GATE else TIERS.index(chosen) + 1


def is_last(item: pytest.Item) -> bool:
    """Whether a check judges the whole run."""
    return item.get_closest_marker("last") is not None


def ordered(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The checks by phase.

    In each, checks that need devices whole come last, few devices first. Before them come files that one
    worker runs as a whole, then single checks. Among their like, jobs that share several devices come
    first (a place on each is free at once only at the start), and checks that take long.
    """

    def place(item: pytest.Item) -> tuple[int, ...]:
        count, shared = devices(item), wish(item).use == "shared"
        few = count if not shared else -1 if count > 1 else 0
        single = item.path.name in INDEPENDENT
        short = item.get_closest_marker("long") is None  # a long check should not begin when the others end
        return phase(item), few > 0, single, few, short, count != 0

    return sorted(items, key=place)


def phase(item: pytest.Item) -> int:
    """Correctness, then the speed of single devices, then that of several, then what judges the run.

    A check of a later phase waits for all earlier ones, or devices would idle while checks of each kind wait
    for the other.
    """
    if is_last(item):
        return 3
    return 1 + (wish(item).use == "alone") if is_performance(item) else 0


def stage(item: pytest.Item, device_count: int) -> tuple[int, bool]:
    """The phase, and whether a check of correctness needs all devices whole. Such checks begin last in it.

    One that waits keeps the others from sharing its devices: they would run one by one after it.
    """
    whole = devices(item) >= device_count and wish(item).use != "shared"
    return phase(item), whole and phase(item) == 0


def scope(nodeid: str, device_count: int) -> str:
    """What one worker of pytest-xdist runs as a whole: a file, whose checks share launches, or one check.

    Each scope is of one phase and of one use: a check waits for all earlier phases, so none of them may come
    after it in the same worker. A check that needs devices whole waits long, too. Checks that have the only
    device of a machine for themselves run one after the other, so they keep one process on it.
    """
    file, _, check = nodeid.partition("::")
    name = check.partition("[")[0]
    part = "whole" if name in WHOLE else "speed" if name in SPEED else None
    if Path(file).name in INDEPENDENT and (part is None or device_count > 1):
        return nodeid
    return f"{file}::{part}" if part else file


def devices(item: pytest.Item) -> int:
    """The number of devices in a check's mark; 0 without a mark."""
    mark = item.get_closest_marker("gpus")
    return int(mark.args[0]) if mark else 0


def wish(item: pytest.Item) -> Wish:
    """What a check leases, by its mark; one device without a mark."""
    mark = item.get_closest_marker("gpus")
    count = devices(item) or 1
    return Wish(group=str(item.path), count=count, use=_use(count, **mark.kwargs if mark else {}))


def _use(count: int, *, perf: bool = False, exclusive: bool = False, whole: bool | None = None) -> Use:
    """The speed of one device is measured beside that of others; of several devices, alone on the machine."""
    if exclusive or (perf and count > 1):
        return "alone"
    if perf:
        return "quiet"
    if whole is None:
        whole = count > 1
    return "whole" if whole else "shared"


class Ended:
    """How many checks of a run have ended, over all of its workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.expected: Path | None = None  # the mark of the check that runs in this process

    def add(self, number: int) -> None:
        """Record that the check with this number has ended."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / str(number)).touch()
        if self.expected is not None:
            self.expected.unlink()
            self.expected = None

    def expect(self, seconds: float) -> None:
        """Announce how many seconds the check that begins now takes.
        Without it the other workers report a stall.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self.expected = self.folder / f"{LASTS}{seconds:g}-{os.getpid()}"
        self.expected.touch()

    def wait_for(self, count: int, *, stall_s: float = STALL_S) -> bool:
        """Wait until the first `count` checks have ended.
        False if none ended for too long, announced times included.
        """
        seen, since = -1, time.monotonic()
        while (now := self._count(count)) < count:
            if now != seen:
                seen, since = now, time.monotonic()
            announced = [name.removeprefix(LASTS) for name in self._marks() if name.startswith(LASTS)]
            longest = max((float(name.rpartition("-")[0]) for name in announced), default=0.0)
            if time.monotonic() - since > stall_s + longest:
                return False
            time.sleep(POLL_S)
        return True

    def _count(self, below: int) -> int:
        return sum(not name.startswith(LASTS) and int(name) < below for name in self._marks())

    def _marks(self) -> list[str]:
        return [mark.name for mark in self.folder.iterdir()] if self.folder.is_dir() else []


def is_performance(item: pytest.Item) -> bool:
    """Whether a check measures speed."""
    mark = item.get_closest_marker("gpus")
    return bool(mark and mark.kwargs.get("perf"))
