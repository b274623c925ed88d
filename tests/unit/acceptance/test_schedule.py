"""The schedule of a whole run, by simulation of recorded seconds, and when its checks waited and ran."""

import json
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness import leases, order, timeline

RECORDED = json.loads(Path(__file__).with_name("recorded_seconds.json").read_text(encoding="utf-8"))
AHEAD = 2  # pytest-xdist hands a worker its next scope when no more checks than these are left to it
NEAR = 1.15


def item(name: str, count: int, marks: dict, kind: str) -> SimpleNamespace:
    """What the order reads of a collected check."""
    gpus = SimpleNamespace(args=(count,), kwargs=marks) if count else None
    found = {"gpus": gpus, "long": kind == "long", "last": kind == "last"}
    path = Path("acceptance", name.partition("::")[0])
    return SimpleNamespace(
        nodeid=f"acceptance/{name}", path=path, get_closest_marker=lambda mark: found.get(mark) or None
    )


def made_x8() -> list:
    """Eight GPUs: the checks of all devices need eight, and every third check of one takes twice as long."""
    wide = [
        [name, seconds, 8 if count == 2 and "training" not in name else count, marks, kind]
        for name, seconds, count, marks, kind in RECORDED["H200 x2"]
    ]
    return [[n, s * (2 if i % 3 == 0 and c == 1 else 1), c, m, k] for i, (n, s, c, m, k) in enumerate(wide)]


# Checks, devices, and workers: one for two cores, 16 at most.
MACHINES = {
    "H100 x1": (RECORDED["H100 x1"], 1, 8),
    "H200 x2": (RECORDED["H200 x2"], 2, 16),
    "made x8": (made_x8(), 8, 16),
}


@dataclass
class Worker:
    """One worker of pytest-xdist: what it has to run, and what it runs."""

    queue: deque = field(default_factory=deque)
    running: SimpleNamespace | None = None
    ends: float = 0.0
    wish: leases.Wish | None = None
    held: tuple[int, ...] = ()


@dataclass
class Machine:
    """The workers, the turnstile of the leases, and the devices."""

    seconds: dict[str, float]
    devices: int
    places: int
    pending: deque
    workers: list[Worker]
    turnstile: list[Worker] = field(default_factory=list)
    left: dict = field(default_factory=dict)  # how many checks by stage

    def run(self) -> float:
        now = 0.0
        for worker in self.workers * 2:
            self._hand_out(worker)
        while any(self.left.values()):
            while self._start(now):
                pass
            busy = [worker for worker in self.workers if worker.running]
            assert busy, "every worker waits for another one"
            now = min(worker.ends for worker in busy)
            for worker in busy:
                if worker.ends <= now:
                    self._end(worker)
        return now

    def _end(self, worker: Worker) -> None:
        self.left[order.stage(worker.running, self.devices)] -= 1
        following = worker.queue[0] if worker.queue else None
        if following is None or not order.devices(following) or order.wish(following) != worker.wish:
            worker.wish, worker.held = None, ()
        worker.running = None
        self._hand_out(worker)

    def _hand_out(self, worker: Worker) -> None:
        if self.pending and len(worker.queue) <= AHEAD:
            worker.queue.extend(self.pending.popleft())

    def _start(self, now: float) -> bool:
        """Start what can start now. Whether anything did."""
        started = False
        for worker in self.workers:
            if worker.running or not worker.queue or worker in self.turnstile:
                continue
            check = worker.queue[0]
            stage = order.stage(check, self.devices)
            if stage > (0, False) and any(count for earlier, count in self.left.items() if earlier < stage):
                continue
            if not order.devices(check) or worker.wish == order.wish(check):
                self._begin(worker, now)
                started = True
            else:
                self.turnstile.append(worker)
        while self.turnstile and (held := self._lease(order.wish(self.turnstile[0].queue[0]))) is not None:
            worker = self.turnstile.pop(0)
            worker.wish, worker.held = order.wish(worker.queue[0]), held
            self._begin(worker, now)
            started = True
        return started

    def _begin(self, worker: Worker, now: float) -> None:
        worker.running = worker.queue.popleft()
        worker.ends = now + self.seconds[worker.running.nodeid]

    def _lease(self, wish: leases.Wish) -> tuple[int, ...] | None:
        """The devices that are free for this use, or None."""
        others = [worker for worker in self.workers if worker.wish]
        uses = {worker.wish.use for worker in others if worker.wish}
        beside = {
            "shared": {"shared", "whole"},
            "whole": {"shared", "whole"},
            "quiet": {"quiet"},
            "alone": set(),
        }
        if not uses <= beside[wish.use]:
            return None
        used = [[o.wish.use for o in others if o.wish and d in o.held] for d in range(self.devices)]
        most = self.places if wish.use == "shared" else 1
        free = [d for d in range(self.devices) if len(used[d]) < most and set(used[d]) <= {"shared"}]
        if wish.use != "shared":
            free = [d for d in free if not used[d]]
        free.sort(key=lambda d: len(used[d]))
        return tuple(free[: wish.count]) if len(free) >= wish.count else None


def simulated(rows: list, devices: int, workers: int, *, places: int = leases.MOST_SHARERS) -> float:
    """The seconds of a run with this order."""
    items = order.ordered(item(name, *rest) for name, _, *rest in rows)
    items.sort(key=lambda one: order.stage(one, devices))
    scopes: dict[str, list] = {}
    for one in items:
        scopes.setdefault(order.scope(one.nodeid, devices), []).append(one)
    seconds = {f"acceptance/{name}": length for name, length, *_ in rows}
    machine = Machine(seconds, devices, places, deque(scopes.values()), [Worker() for _ in range(workers)])
    for one in items:
        stage = order.stage(one, devices)
        machine.left[stage] = machine.left.get(stage, 0) + 1
    return machine.run()


def least(rows: list, devices: int, workers: int, *, places: int = leases.MOST_SHARERS) -> float:
    """A lower bound for any order of the phases.

    In each, checks that need all devices come one by one. Added to them is the longest scope, or the time of
    the devices. The workers' time may be longer.
    """
    total = 0.0
    timed = [(item(name, *rest), length) for name, length, *rest in rows]
    for phase in {order.phase(one) for one, _ in timed}:
        chains: dict[str, float] = {}
        all_devices = some_devices = cores = 0.0
        for one, length in timed:
            if order.phase(one) != phase:
                continue
            wish, count = order.wish(one), order.devices(one)
            cores += length / workers
            if count and (wish.use == "alone" or (wish.use != "shared" and count >= devices)):
                all_devices += length
                continue
            scope = order.scope(one.nodeid, devices)
            chains[scope] = chains.get(scope, 0.0) + length
            some_devices += length * count / (places if wish.use == "shared" else 1) / devices
        total += max(all_devices + max([some_devices, *chains.values()]), cores)
    return total


@pytest.mark.parametrize("name", MACHINES)
def test_the_schedule_is_near_the_shortest_one(name):
    took, bound = simulated(*MACHINES[name]), least(*MACHINES[name])
    assert bound <= took <= NEAR * bound, f"{took:.0f} s, at least {bound:.0f} s are needed"


@pytest.mark.parametrize("name", MACHINES)
def test_checks_that_need_all_devices_begin_after_those_that_share(name, monkeypatch):
    took = simulated(*MACHINES[name])
    monkeypatch.setattr(order, "stage", lambda one, _: (order.phase(one), False))
    assert simulated(*MACHINES[name]) > took


STARTED = "2026-01-01T00:00:{:02}.000+00:00"


def check(name: str, at: int, waited: float, seconds: float, *devices: str) -> dict[str, Any]:
    return {
        "id": f"test_a.py::{name}",
        "started": STARTED.format(at),
        "waited_s": waited,
        "seconds": seconds,
        "devices": list(devices),
    }


RESULT = {
    "started": STARTED.format(0),
    "checks": [
        check("speed", 5, 15.0, 20.0, "d"),
        check("first", 2, 0.0, 8.0, "d"),
        check("beside", 2, 0.0, 3.0, "d"),
        check("second", 3, 7.0, 10.0, "d"),
        check("text", 2, 0.0, 4.0),
        {"id": "test_a.py::never", "started": None, "waited_s": 0.0, "seconds": 0.0, "devices": []},
    ],
}


def test_the_chain_goes_back_from_the_last_check_through_those_it_waited_for():
    names = [span.name.rpartition("::")[2] for span in timeline.chain(timeline.spans(RESULT))]
    assert names == ["first", "second", "speed"]


def test_a_device_that_two_checks_share_is_held_once():
    assert timeline.held_s(timeline.spans(RESULT)) == pytest.approx(38.0)


def test_the_line_names_the_wall_time_and_what_limited_it():
    words = timeline.words(RESULT)
    assert words.startswith("time: 40 s, first check after 2 s, a check had a device for 95%")
    assert words.endswith("limited by speed 20 s, second 10 s, first 8 s")


def test_a_run_without_checks_has_no_chain():
    assert timeline.words({**RESULT, "checks": []}) == "time: no check ran"
