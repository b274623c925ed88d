"""The fixtures that checks use. In: the session. Out: leased devices, calls into children, kept figures."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import vendors
from harness import launch as launcher
from harness import leases, models, order
from harness.check import Check, InvalidRun
from harness.evidence import (
    device_names,
    evidence,
    link_counts,
    newly_shared,
    newly_unfit,
    newly_used,
    unanswered,
)
from harness.monitor import Sampler
from harness.protocols import Launch, OnDevice, RecordMetric
from harness.readings import machine
from harness.session import CHECK, AcceptanceSession
from harness.worker import WorkloadError
from vendors import Device, Host, Sample

CLEAN_WAIT_S = 30.0
GONE_WAIT_S = 10.0  # a process that ended is in the readings for a moment longer


@pytest.fixture(scope="session")
def acceptance(pytestconfig: pytest.Config) -> AcceptanceSession:
    """The run: its options, its monitor and its worker."""
    plugin = pytestconfig.pluginmanager.get_plugin("stackcheck-acceptance")
    assert isinstance(plugin, AcceptanceSession)
    return plugin


@pytest.fixture(scope="session")
def vendor(acceptance: AcceptanceSession) -> vendors.Vendor:
    """The vendor's module."""
    return vendors.module(acceptance.vendor)


@pytest.fixture(scope="session")
def host(acceptance: AcceptanceSession) -> Host:
    """The machine as it was before the first check."""
    assert acceptance.host is not None
    return acceptance.host


@pytest.fixture(scope="session")
def devices(acceptance: AcceptanceSession) -> tuple[Device, ...]:
    """The physical devices that this run may use."""
    return acceptance.devices


@pytest.fixture(scope="session")
def device_model(acceptance: AcceptanceSession) -> str:
    """The product: "H200", "MI300X", "CPU"."""
    return acceptance.model


@pytest.fixture(scope="session")
def device_row(acceptance: AcceptanceSession) -> Mapping[str, Any]:
    """The product's row of devices.json: peaks, memory, links."""
    try:
        return models.identify(acceptance.vendor, acceptance.devices[0])
    except models.UnknownDeviceError as error:
        return pytest.fail(str(error), pytrace=False)


@pytest.fixture
def check(request: pytest.FixtureRequest) -> Check:
    """The state of the running check."""
    return request.node.stash[CHECK]


@pytest.fixture(autouse=True)
def _leased_when_marked(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpus"):
        request.getfixturevalue("lease")


@pytest.fixture
def lease(
    request: pytest.FixtureRequest, acceptance: AcceptanceSession, check: Check
) -> Iterator[leases.Lease]:
    """The devices of this check, with the machine's state read before and after."""
    wish = order.wish(request.node)
    if wish.count > len(acceptance.devices) and not acceptance.shares_devices:
        pytest.skip(f"needs {wish.count} devices, {len(acceptance.devices)} visible")
    held = acceptance.keeper.take(wish)
    check.devices, check.count = device_names(held.devices), wish.count
    perf = order.is_performance(request.node)
    check.before = evidence(_state(acceptance, held, check, perf=perf), held.devices)
    if check.unfit:
        check.conclude()
    with _sampled(acceptance, held, check, perf=perf):
        yield held
    check.after = evidence(_state(acceptance, held, check, perf=perf), held.devices)
    check.unfit += newly_unfit(check.before, check.after)
    if check.unfit:
        check.conclude()


@pytest.fixture
def whole_run(acceptance: AcceptanceSession, check: Check) -> Host:
    """The machine after every other check, with its state before the first one as evidence beside it."""
    if not acceptance.ended.wait_for(acceptance.before_last):
        pytest.fail(
            "other checks of this run have not ended, so nothing can be said of the whole", pytrace=False
        )
    assert acceptance.host is not None
    # A second reading would find what the first one set to zero.
    cleared = any(link.errors_cleared for link in acceptance.host.links)
    late = machine(acceptance.monitor.read, attempts=1 if cleared else 2)
    check.devices = device_names(acceptance.devices)
    for kept, seen in ((check.before, acceptance.host), (check.after, late)):
        kept.update(evidence(seen, acceptance.devices) | {"links": link_counts(seen)})
    return late


@pytest.fixture
def record_metric(check: Check) -> RecordMetric:
    """Put a figure into result.json; with `gate=True` its bound judges the check."""
    return check.record


@pytest.fixture
def on_device(acceptance: AcceptanceSession, vendor: vendors.Vendor, lease: leases.Lease) -> OnDevice:
    """Run `workloads` functions on the leased devices."""

    def call(
        function: Callable[..., Any] | str,
        /,
        *,
        timeout_s: float = 120,
        env: Mapping[str, str] | None = None,
        **kwargs: object,
    ) -> Any:
        name = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
        environment = {**vendor.child_environment(lease.devices), **(env or {})}
        with _failing(acceptance, lease):
            return acceptance.worker.call(name, kwargs, environment=environment, timeout_s=timeout_s)

    return call


@pytest.fixture
def launch(acceptance: AcceptanceSession, vendor: vendors.Vendor, lease: leases.Lease) -> Launch:
    """Run torchrun programs on the leased devices."""

    def run(
        program: str | Path,
        *args: object,
        nproc: int,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        with _failing(acceptance, lease):
            return launcher.launch(
                program,
                [str(argument) for argument in args],
                nproc=nproc,
                environment={**vendor.child_environment(lease.devices), **(env or {})},
                timeout_s=timeout_s,
                folder=acceptance.result_dir / "children",
            )

    return run


def _state(acceptance: AcceptanceSession, held: leases.Lease, check: Check, *, perf: bool) -> Host:
    """The machine around a check. A figure needs devices of its own: ours are stopped, others are unfit."""
    if not perf or acceptance.shares_devices:
        return machine(acceptance.monitor.read_devices)
    acceptance.worker.stop()
    assert acceptance.host is not None
    deadline = time.monotonic() + GONE_WAIT_S
    while True:
        seen = machine(acceptance.monitor.read_devices)
        others = newly_shared(acceptance.host, seen, held.devices)
        if not others or time.monotonic() > deadline:
            check.unfit += others
            return seen
        time.sleep(0.2)


@contextlib.contextmanager
def _sampled(
    acceptance: AcceptanceSession, held: leases.Lease, check: Check, *, perf: bool
) -> Iterator[None]:
    if not perf or acceptance.shares_devices:
        yield
        return
    sampler = Sampler(acceptance.monitor, [device.index for device in held.devices]).start()
    try:
        yield
    finally:
        check.samples = list(sampler.finish())
        check.unfit += _untold(check.samples, held.devices, sampler.problem)
        check.unfit += sorted(
            {f"device {s.index} throttled: {reason}" for s in check.samples for reason in s.throttle.unfit}
        )


def _untold(samples: Sequence[Sample], devices: Sequence[Device], problem: str | None) -> Iterator[str]:
    """Devices of which no sample at all says whether they were throttled, in words."""
    for device in devices:
        readings = [sample.throttle.reading for sample in samples if sample.index == device.index]
        failed = [words for reading in readings for words in unanswered({"throttle reasons": reading})]
        if len(failed) == len(readings):
            last = failed[-1] if failed else problem
            yield f"device {device.index} told nothing while the check ran: {last}"


@contextlib.contextmanager
def _failing(acceptance: AcceptanceSession, lease: leases.Lease) -> Iterator[None]:
    problem = ""
    try:
        yield
    except WorkloadError as error:
        problem = "\n".join(filter(None, (str(error), _left_behind(acceptance, lease))))
    if problem:  # raised outside the handler, so that the report shows one failure and not a chain
        pytest.fail(problem, pytrace=False)


def _left_behind(acceptance: AcceptanceSession, lease: leases.Lease) -> str:
    """Words for memory that a killed child left on a leased device; empty when it is clean."""
    if acceptance.shares_devices:
        return ""
    assert acceptance.host is not None
    deadline = time.monotonic() + CLEAN_WAIT_S
    try:
        while dirty := newly_used(acceptance.host, machine(acceptance.monitor.read_devices), lease.devices):
            if time.monotonic() > deadline:
                return f"devices {list(dirty)} are not clean {CLEAN_WAIT_S:g} s after the kill: reset them"
            time.sleep(1)
    except InvalidRun as unread:
        return str(unread)
    return ""
