"""Whatever signals come, and wherever they come, a container does not outlive its run."""

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import docker
import pytest

from stackcheck.engine import container, image_files, interrupts, leftovers
from stackcheck.engine.container import RunSpec
from stackcheck.errors import EngineError

SPEC = RunSpec(image="x", command=("true",), network="none")


class EndedError(Exception):
    """What the handler of a program raises, as that of a fleet's node does."""


class Daemon:
    """The engine's side: a request that was sent is carried out, also if nobody waits for the answer.

    `during` is called in the middle of each request; the name says which.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.during: Callable[[str], None] = lambda _request: None
        self.kept: list[str] = []  # the errors with which a removal is refused
        self.api = SimpleNamespace(remove_container=self._remove, remove_volume=self._remove_volume)
        self.containers = SimpleNamespace(create=self._create, list=self._list)
        self.images = SimpleNamespace(get=lambda _name: SimpleNamespace(attrs={}))
        self.owners: dict[str, str] = {}
        self.late: set[str] = set()  # made after the client had gone, and had removed what was not there yet

    def info(self) -> dict[str, Any]:
        return {"MemTotal": 1 << 30}

    def _create(self, _image: str, _command: list[str], *, name: str, **options: Any) -> Any:
        self.owners[name] = options["labels"].get(leftovers.OWNER, "")
        try:
            self.during("create")
        except EndedError:
            self.late.add(name)
            raise
        self.names.add(name)
        return SimpleNamespace(
            start=lambda: self.during("start"),
            attach=lambda **_how: iter(((b"a line\n", None),)),
            wait=lambda **_how: {"StatusCode": 0},
            kill=lambda: None,
        )

    def _remove(self, name: str, **_how: object) -> None:
        self.during("remove")  # an exception here: the request was never sent
        if self.kept:
            raise docker.errors.APIError(self.kept.pop(0))
        if name not in self.names:
            self.names |= self.late
            raise docker.errors.NotFound("no such container")
        self.names.discard(name)

    def _remove_volume(self, name: str, **_how: object) -> None:
        raise AssertionError(name)

    def _list(self, **_which: object) -> list[Any]:
        return [
            SimpleNamespace(name=name, labels={leftovers.OWNER: owner}, attrs={})
            for name, owner in self.owners.items()
            if owner and name in self.names
        ]

    def read(self) -> None:
        with image_files.of_image(self, "x"):  # type: ignore[arg-type]
            self.during("start")

    def run(self) -> None:
        container.run(self, SPEC)  # type: ignore[arg-type]


def raising(_number: int, _frame: object) -> None:
    raise EndedError


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in interrupts.SIGNALS}
    for number in interrupts.SIGNALS:
        signal.signal(number, raising)
    yield
    assert {signal.getsignal(number) for number in interrupts.SIGNALS} <= {raising, signal.SIG_IGN}
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(params=["run", "read"])
def use(request) -> Callable[[Daemon], None]:
    """A container that runs, or one that is never started, from which files are read."""
    function: Callable[[Daemon], None] = getattr(Daemon, request.param)
    return function


@pytest.mark.parametrize("number", interrupts.SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("request_", ["create", "start", "remove"])
def test_a_signal_in_any_request_leaves_no_container_and_is_not_lost(use, request_, number):
    daemon = Daemon()
    daemon.during = lambda name: os.kill(os.getpid(), number) if name == request_ else None
    with pytest.raises(EndedError):
        use(daemon)
    assert daemon.names == set()


def test_a_second_signal_while_the_container_is_removed_does_not_stop_that(use):
    """Slurm sends SIGTERM twice when the time of a job is over, and people press Ctrl-C twice."""
    daemon = Daemon()
    sent: list[str] = []

    def twice(name: str) -> None:
        if name in {"start", "remove"}:
            sent.append(name)
            os.kill(os.getpid(), signal.SIGTERM)

    daemon.during = twice
    with pytest.raises(EndedError):
        use(daemon)
    assert sent == ["start", "remove"]
    assert daemon.names == set()


def test_a_handler_that_chose_to_ignore_what_follows_keeps_its_choice():
    def once(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise EndedError

    signal.signal(signal.SIGTERM, once)
    daemon = Daemon()
    daemon.during = lambda name: os.kill(os.getpid(), signal.SIGTERM) if name == "start" else None
    with pytest.raises(EndedError):
        daemon.run()
    assert (daemon.names, signal.getsignal(signal.SIGTERM)) == (set(), signal.SIG_IGN)


def test_a_signal_whose_handler_returns_ends_nothing():
    came: list[int] = []
    signal.signal(signal.SIGALRM, lambda number, _frame: came.append(number))
    daemon = Daemon()
    daemon.during = lambda _name: os.kill(os.getpid(), signal.SIGALRM)
    daemon.run()
    assert (len(came), daemon.names) == (3, set()), "one in each request"
    signal.signal(signal.SIGALRM, raising)


def test_a_removal_that_the_engine_refuses_at_first_is_tried_again(monkeypatch):
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(leftovers, "time", clock)
    daemon = Daemon()
    daemon.kept = ["could not kill: did not receive an exit event", "removal is already in progress"]
    daemon.run()
    assert (daemon.names, len(slept)) == (set(), 2)
    daemon.kept = ["device or resource busy"] * 1000
    with pytest.raises(EngineError, match=r"does not remove(?s:.*)device or resource busy(?s:.*)docker rm"):
        daemon.run()
    assert sum(slept) >= leftovers.REMOVAL_TIMEOUT_S


def test_the_next_run_removes_what_a_killed_process_left_and_nothing_else():
    told = "from stackcheck.engine import leftovers; print(leftovers.labels()[leftovers.OWNER], end='')"
    dead = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True).stdout
    own = leftovers.labels()[leftovers.OWNER]
    place, pid, started = own.rsplit(" ", 2)
    reused = f"{place} {pid} {int(started) - 1}"
    elsewhere = dead.replace(place, "another-boot/pid:[1]")
    daemon = Daemon()
    daemon.owners = {"dead": dead, "own": own, "reused": reused, "elsewhere": elsewhere, "odd": "?"}
    daemon.names = set(daemon.owners)
    daemon.run()
    assert daemon.names == {"own", "elsewhere", "odd"}
    daemon.owners["stuck"] = dead
    daemon.names.add("stuck")
    daemon.kept = ["device or resource busy"]
    daemon.run()
    assert daemon.names == {"own", "elsewhere", "odd", "stuck"}, "a new run is not about it"


def test_the_time_of_a_container_begins_when_what_it_waits_for_is_there(monkeypatch):
    order: list[str] = []

    class Timer:
        def __init__(self, *_asked: object) -> None:
            self.start = lambda: order.append("clock")
            self.cancel = lambda: None

    daemon = Daemon()
    daemon.during = order.append
    monkeypatch.setattr(container.threading, "Timer", Timer)
    spec = dataclasses.replace(SPEC, on_start=lambda: order.append("waited"))
    container.run(daemon, spec)  # type: ignore[arg-type]
    assert order == ["create", "start", "waited", "clock", "remove"]

    def never() -> None:
        raise EndedError

    with pytest.raises(EndedError):
        container.run(daemon, dataclasses.replace(SPEC, on_start=never))  # type: ignore[arg-type]
    assert daemon.names == set()
