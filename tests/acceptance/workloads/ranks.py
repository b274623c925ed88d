"""One rank of a workload: joins the group, runs cases, reports. In: torchrun's environment, cases. Out:
merged reports.

Reports go through the rendezvous store, never through the collectives under test: a broken all-gather must
not be able to hide itself.
"""

import contextlib
import datetime as dt
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from workloads import backend, margins
from workloads.gates import Reading
from workloads.time_limits import scaled

SETTLE_S = 3.0
MOST_REFUSALS = 40
CaseFunction = Callable[[], Iterable[Reading]]


@dataclass(frozen=True)
class Ranks:
    """This process in its world: rank, world size, device and store."""

    rank: int
    size: int
    device: torch.device
    store: dist.Store

    def collect(self, mine: Any, *, about: str = "report") -> list[Any] | None:
        """Every rank's JSON object, on rank 0."""
        self.store.set(f"{about}/{self.rank}", json.dumps(mine))
        if self.rank:
            self.store.get(f"{about} read")  # the store may be in rank 0's process, and ends with it
            return None
        everyone = [json.loads(self.store.get(f"{about}/{rank}")) for rank in range(self.size)]
        self.store.set(f"{about} read", "1")
        return everyone


@contextlib.contextmanager
def joined(timeout_s: float = 60.0, *, bound: bool = False) -> Iterator[Ranks]:
    """The world of torchrun, on this rank's own device; if it is bound to a GPU, its groups are split off."""
    timeout = dt.timedelta(seconds=scaled(timeout_s))
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        device = torch.device("cpu")
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    group = dist.PrefixStore("group", store)
    more = {"device_id": device} if bound and device.type == "cuda" else {}
    dist.init_process_group(backend(), store=group, rank=rank, world_size=size, timeout=timeout, **more)
    try:
        yield Ranks(rank, size, device, dist.PrefixStore("stackcheck", store))
    finally:
        dist.destroy_process_group()


class Book:
    """Keeps the readings of each case on this rank, and merges them over the ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.cases: dict[str, dict[str, Any]] = {}
        self.refused = 0

    def judge(self, op: str, name: str, function: CaseFunction) -> None:
        """Run one case on this rank. All ranks run the same cases in the same order.

        An error that all ranks raise is a failure of this case only. Raises `RuntimeError` if only some ranks
        raise an error, naming the others, and if too many cases raised errors.
        """
        place = f"{op}: {name}"
        self.ranks.store.set(f"at/{self.ranks.rank}", place)
        try:
            readings = tuple(function())
        except (RuntimeError, TypeError, ValueError) as error:
            self._agree_on_refusal(place, error)
            text = f"raised {type(error).__name__}: {str(error)[:300]}"
            self.cases[place] = {"read": 1, "failures": [text], "digest": None, "margin": math.inf}
            return
        failures = [str(reading) for reading in readings if not reading.passed]
        margin = margins.worst(reading.margin for reading in readings)
        self.cases[place] = {"read": len(readings), "failures": failures, "digest": None, "margin": margin}

    def _agree_on_refusal(self, place: str, error: Exception) -> None:
        """Return when every rank raised an error in this case.
        If some did not, all fail at about the same time.
        """
        store, everyone = self.ranks.store, range(self.ranks.size)
        self.refused += 1
        store.set(f"failed/{self.refused}/{self.ranks.rank}", place)
        deadline, absent = time.monotonic() + SETTLE_S, list(everyone)
        while absent and time.monotonic() < deadline:
            absent = [rank for rank in everyone if not store.check([f"failed/{self.refused}/{rank}"])]
            time.sleep(0.01)
        begun = [rank for rank in absent if store.check([f"at/{rank}"])]
        places = {rank: store.get(f"at/{rank}").decode() for rank in begun}
        raised = f"{place} raised on rank {self.ranks.rank}"
        if absent:
            raise RuntimeError(f"{raised}, but not on ranks {absent}, which are at {places}") from error
        if self.refused > MOST_REFUSALS:
            raise RuntimeError(f"{raised}, like {MOST_REFUSALS} cases before it on every rank") from error

    def same_everywhere(self, op: str, name: str, digest: int, reading: Reading) -> None:
        """Add a result that must be bitwise equal on every rank, together with the reading of its gate."""
        self.judge(op, name, lambda: (reading,))
        self.cases[f"{op}: {name}"]["digest"] = str(digest)

    def merged(self) -> dict[str, Any] | None:
        """On rank 0 `{"cases": [{"name", "failures", "margin"}], "ranks"}` over all ranks; None elsewhere."""
        everyone = self.ranks.collect(self.cases)
        if everyone is None:
            return None
        return {"cases": [_merge(name, everyone) for name in everyone[0]], "ranks": len(everyone)}


def _merge(name: str, everyone: list[dict[str, Any]]) -> dict[str, Any]:
    failures = []
    for rank, cases in enumerate(everyone):
        found = cases[name]["failures"] if name in cases else ["did not run this case"]
        if name in cases and not cases[name]["read"]:
            found = ["has no reading"]
        failures += [f"rank {rank}: {text}" for text in found]
    digests = [cases.get(name, {}).get("digest") for cases in everyone]
    if len(set(digests)) > 1:
        odd = [rank for rank, digest in enumerate(digests) if digests.count(digest) <= len(digests) // 2]
        failures.append(
            f"results differ bitwise: ranks {odd} from the others"
            if odd
            else "results differ bitwise, without a majority"
        )
    worst = margins.worst(cases[name]["margin"] for cases in everyone if name in cases)
    return {"name": name, "failures": failures, "margin": worst}
