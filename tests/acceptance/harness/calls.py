"""What a check calls: its fixtures that run workloads, and their types. In: a function or a program.
Out: what comes back.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import vendors
from harness import launch as launcher
from harness import leases, overdue, processes
from harness.check import Check
from harness.evidence import newly_used
from harness.processes import WorkloadError
from harness.readings import machine
from harness.session import AcceptanceSession
from harness.unfit import InvalidRun
from harness.worker import Worker

Answer = TypeVar("Answer")
Function = Callable[..., Any] | str  # of tests/acceptance/workloads; a text is "module:name"
Passes = Callable[..., None]  # the fixture `passes`
SHARED_FAILED = "the launch that these checks share failed; look at the first check that failed in this file"
CLEAN_WAIT_S = 30.0
PROCESSES_AT_ONCE = 5  # more of them would share the queues of a device
# How torch, the runtimes of both vendors, and the libraries for products say that an allocation failed.
NO_MEMORY = (
    *("out of memory", "OutOfMemory", "ErrorMemoryAllocation", "ALLOC_FAILED", "MEMORY_ALLOCATION"),
    *("rocblas_status_memory_error", "Failed to allocate", "failed to allocate"),
)


class RecordMetric(Protocol):
    """Record a metric of the check."""

    def __call__(
        self,
        name: str,
        value: float,
        *,
        unit: str,
        repeats: Sequence[float] = (),
        conditions: Mapping[str, Any] | None = None,
        gate: bool = False,
        bound_needed: bool = True,
    ) -> None: ...


def once(kept: dict[str, Any], name: str, launch: Callable[[], Mapping[str, Any]], failed: str) -> Any:
    """The result of a launch that checks share; after one that failed, each fails with the words `failed`."""
    if name not in kept:
        assert f"no {name}" not in kept, failed
        kept[f"no {name}"] = True
        kept[name] = launch()
    return kept[name]


@dataclass(frozen=True)
class _OnLeased:
    """What calls on the leased devices share."""

    acceptance: AcceptanceSession
    lease: leases.Lease
    check: Check

    def _environment(self, env: Mapping[str, str] | None) -> dict[str, str]:
        return {**self.acceptance.child_environment(self.lease.devices), **(env or {})}

    def _done(self, once: Callable[[], Answer]) -> Answer:
        with overdue.failing(lambda: _not_clean(self.acceptance, self.lease)):
            return _with_memory(once, self.acceptance, self.lease, self.check)


class OnDevice(_OnLeased):
    """Runs functions in the process that owns the leased devices."""

    def __call__(
        self,
        function: Function,
        /,
        *,
        timeout_s: float = 120,
        env: Mapping[str, str] | None = None,
        **kwargs: object,
    ) -> Any:
        """What the function returns, read from JSON."""
        worker, limit_s = self.acceptance.worker, self.acceptance.limit_s(timeout_s)
        environment = self._environment(env)
        return self._done(lambda: _answer(worker, function, kwargs, environment, limit_s))


class InNewProcesses(_OnLeased):
    """Runs a function in several new processes that share the leased devices, some of them at once."""

    def __call__(
        self,
        function: Function,
        /,
        *,
        processes: int,
        timeout_s: float = 120,
        env: Mapping[str, str] | None = None,
        **kwargs: object,
    ) -> list[Any]:
        """What each of them returns, read from JSON."""
        environment, limit_s = self._environment(env), self.acceptance.limit_s(timeout_s)

        def one(_: int) -> Any:
            worker = Worker(self.acceptance.result_dir / "children")
            try:
                return _answer(worker, function, kwargs, environment, limit_s)
            finally:
                worker.stop()

        def once() -> list[Any]:
            with ThreadPoolExecutor(PROCESSES_AT_ONCE) as pool:
                return list(pool.map(one, range(processes)))

        return self._done(once)


@dataclass(frozen=True)
class InChild:
    """Runs functions in a child that sees no device; with `fresh=True` in one that has loaded nothing.

    These checks also run on a machine without devices, and give the same result there. A vendor that was
    named and has no device still fails the run, but what the image contains can be judged all the same.
    """

    acceptance: AcceptanceSession
    vendor: vendors.Vendor
    worker: Worker

    def __call__(
        self,
        function: Function,
        /,
        *,
        timeout_s: float = 300,
        env: Mapping[str, str] | None = None,
        fresh: bool = False,
        **kwargs: object,
    ) -> Any:
        """What the function returns, read from JSON."""
        if fresh:
            self.worker.stop()
        environment = {**self.vendor.child_environment(()), **(env or {})}
        with overdue.failing():
            limit_s = self.acceptance.limit_s(timeout_s)
            return _answer(self.worker, function, kwargs, environment, limit_s)


class Launch(_OnLeased):
    """Runs programs under torchrun; with `fresh=True` in new processes."""

    def __call__(
        self,
        program: str | Path,
        *args: object,
        nproc: int,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        fresh: bool = False,
    ) -> dict[str, Any]:
        """The JSON line of rank 0."""
        acceptance = self.acceptance
        patience = {processes.PATIENCE: f"{acceptance.limit_s(1, nproc):g}"}

        def once() -> dict[str, Any]:
            if self.lease.use in ("quiet", "alone"):
                acceptance.worker.stop()
            return launcher.launch(
                program,
                [str(argument) for argument in args],
                nproc=nproc,
                environment={**self._environment(patience), **(env or {})},
                timeout_s=acceptance.limit_s(timeout_s, nproc),
                folder=acceptance.result_dir / "children",
                server=None if fresh else acceptance.rank_server,
            )

        return self._done(once)


def _answer(
    worker: Worker,
    function: Function,
    kwargs: Mapping[str, object],
    environment: Mapping[str, str],
    limit_s: float,
) -> Any:
    name = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
    return worker.call(name, kwargs, environment=environment, timeout_s=limit_s)


def _with_memory(
    once: Callable[[], Answer], acceptance: AcceptanceSession, lease: leases.Lease, check: Check
) -> Answer:
    """The result of a call; if it found no memory beside other checks, that of a second one without them."""
    beside = lease.use == "shared" and not acceptance.shares_devices
    try:
        answer = once()
        if not (beside and lacks_memory(json.dumps(answer))):
            return answer
    except WorkloadError as error:
        if not (beside and lacks_memory(str(error))):
            raise
    acceptance.worker.stop()
    with check.waiting():
        acceptance.keeper.have_whole(lease)
    check.more_evidence["memory"] = "none was left beside other checks: repeated with the device whole"
    return once()


def lacks_memory(words: str) -> bool:
    """Whether a report or a traceback tells of an allocation that failed, of a device or in a library."""
    return any(sign in words for sign in NO_MEMORY)


def _not_clean(acceptance: AcceptanceSession, lease: leases.Lease) -> str:
    """Which leased devices still hold memory of a killed child, in words; empty if they are clean."""
    if acceptance.shares_devices:
        return ""
    early = acceptance.machine_at_start()
    try:
        acceptance.keeper.have_whole(lease)
        deadline = time.monotonic() + CLEAN_WAIT_S
        while dirty := newly_used(early, machine(acceptance.monitor.read_devices), lease.devices):
            if time.monotonic() > deadline:
                return f"devices {list(dirty)} are not clean {CLEAN_WAIT_S:g} s after the kill: reset them"
            time.sleep(1)
    except (InvalidRun, leases.LeaseError) as unread:
        return str(unread)
    return ""
