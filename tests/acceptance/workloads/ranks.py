"""One rank among several: joins the group, and reports beside it.

Reports travel through the rendezvous store and never through the collectives that are under test: a broken
all-gather must not be able to hide itself.
"""

import contextlib
import datetime as dt
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from workloads import backend
from workloads.gates import Reading

SETTLE_S = 2.0
CaseFunction = Callable[[], Iterable[Reading]]


@dataclass(frozen=True)
class Ranks:
    """This process in its world: rank, size, its device and the store."""

    rank: int
    size: int
    device: torch.device
    store: dist.Store

    def collect(self, mine: Any, *, about: str = "report") -> list[Any] | None:
        """Every rank's JSON object, on rank 0."""
        self.store.set(f"{about}/{self.rank}", json.dumps(mine))
        if self.rank:
            self.store.get(f"{about} read")  # the store may live in rank 0's process group, and ends with it
            return None
        everyone = [json.loads(self.store.get(f"{about}/{rank}")) for rank in range(self.size)]
        self.store.set(f"{about} read", "1")
        return everyone


@contextlib.contextmanager
def joined(timeout_s: float = 60.0) -> Iterator[Ranks]:
    """The world of torchrun, on this rank's own device."""
    timeout = dt.timedelta(seconds=timeout_s)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        device = torch.device("cpu")
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    group = dist.PrefixStore("group", store)
    dist.init_process_group(backend(), store=group, rank=rank, world_size=size, timeout=timeout)
    try:
        yield Ranks(rank, size, device, dist.PrefixStore("stackcheck", store))
    finally:
        dist.destroy_process_group()


class Book:
    """Keeps what each case of this rank read, and merges it over the ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.cases: dict[str, dict[str, Any]] = {}

    def judge(self, op: str, name: str, function: CaseFunction) -> None:
        """Run one case on this rank; the same cases in the same order on every rank.

        Raises `RuntimeError` where the operation does, naming the ranks that did not come.
        """
        try:
            self.ranks.store.set(f"at/{self.ranks.rank}", f"{op}: {name}")
            readings = tuple(function())
        except RuntimeError as error:
            raise RuntimeError(f"{op}: {name} raised on rank {self.ranks.rank}; {self._others()}") from error
        failures = [str(reading) for reading in readings if not reading.passed]
        self.cases[f"{op}: {name}"] = {"read": len(readings), "failures": failures, "digest": None}

    def _others(self) -> str:
        """Who did not fail although this rank did: whoever waits fails at about the same time."""
        store = self.ranks.store
        store.set(f"failed/{self.ranks.rank}", "1")
        time.sleep(SETTLE_S)
        absent = [rank for rank in range(self.ranks.size) if not store.check([f"failed/{rank}"])]
        places = [
            store.get(f"at/{rank}").decode() if store.check([f"at/{rank}"]) else "no case" for rank in absent
        ]
        return f"ranks {absent} did not wait with it, they are at {places}" if absent else "so did all others"

    def same_everywhere(self, op: str, name: str, digest: int, reading: Reading) -> None:
        """A result that every rank must hold bit for bit, beside what its own gate read."""
        self.judge(op, name, lambda: (reading,))
        self.cases[f"{op}: {name}"]["digest"] = str(digest)

    def merged(self) -> dict[str, Any] | None:
        """On rank 0 `{"cases": [{"name", "failures", "margin"}]}` over all ranks."""
        everyone = self.ranks.collect(self.cases)
        if everyone is None:
            return None
        return {"cases": [_merge(name, everyone) for name in everyone[0]], "ranks": len(everyone)}


def _merge(name: str, everyone: list[dict[str, Any]]) -> dict[str, Any]:
    failures = [
        f"rank {rank}: {text}" for rank, cases in enumerate(everyone) for text in _failures(cases.get(name))
    ]
    digests = [cases.get(name, {}).get("digest") for cases in everyone]
    if len(set(digests)) > 1:
        odd = [rank for rank, digest in enumerate(digests) if digests.count(digest) <= len(digests) // 2]
        failures.append(f"ranks differ bitwise: {odd or 'no majority'} from the others")
    return {"name": name, "failures": failures, "margin": 0.0}


def _failures(case: dict[str, Any] | None) -> list[str]:
    if case is None:
        return ["did not run this case"]
    return case["failures"] if case["read"] else ["read nothing"]
