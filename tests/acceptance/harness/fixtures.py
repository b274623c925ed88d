"""The fixtures of the checks. In: the session. Out: devices, calls to children, metrics."""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

import vendors
from harness import leases, models, order, overdue, skips
from harness.calls import InChild, InNewProcesses, Launch, OnDevice, Passes, RecordMetric
from harness.check import Check
from harness.evidence import (
    device_names,
    doubts,
    evidence,
    held_down,
    link_states,
    newly_shared,
    newly_unfit,
    unanswered,
    without,
)
from harness.monitor import Sampler
from harness.readings import machine
from harness.session import CHECK, AcceptanceSession, session_of
from harness.unfit import Unfit
from harness.worker import Worker
from vendors import Device, Host, Sample

GONE_WAIT_S = 10.0  # the readings still show a process for a moment after it ended


@pytest.fixture(scope="session")
def acceptance(pytestconfig: pytest.Config) -> AcceptanceSession:
    """The run: its options, its monitor and its worker."""
    return session_of(pytestconfig)


@pytest.fixture(scope="session")
def vendor(acceptance: AcceptanceSession) -> vendors.Vendor:
    """The vendor's module."""
    return vendors.module(acceptance.vendor)


@pytest.fixture(scope="session")
def host(acceptance: AcceptanceSession) -> Host:
    """The machine before the first check."""
    return acceptance.machine_at_start()


@pytest.fixture(scope="session")
def devices(acceptance: AcceptanceSession) -> tuple[Device, ...]:
    """The physical devices that this run may use."""
    return acceptance.devices


@pytest.fixture(scope="session")
def device_model(acceptance: AcceptanceSession) -> str:
    """The device model: "H200", "MI300X", "CPU"."""
    return acceptance.model


@pytest.fixture(scope="session")
def device_row(acceptance: AcceptanceSession) -> Mapping[str, Any]:
    """The device model's row of devices.json: peaks, memory, links."""
    try:
        return models.identify(acceptance.vendor, acceptance.devices[0])
    except models.UnknownDeviceError as error:
        return pytest.fail(str(error), pytrace=False)


@pytest.fixture
def check(request: pytest.FixtureRequest) -> Check:
    """The state of the running check."""
    running: Check = request.node.stash[CHECK]
    return running


@pytest.fixture(autouse=True)
def leased_when_marked(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpus"):
        request.getfixturevalue("lease")


@pytest.fixture
def lease(
    request: pytest.FixtureRequest, acceptance: AcceptanceSession, check: Check
) -> Iterator[leases.Lease]:
    """The devices of this check. The machine's state is read before and after."""
    wish = order.wish(request.node)
    if wish.count > len(acceptance.devices) and not acceptance.shares_devices:
        skips.without_devices(wish.count, len(acceptance.devices))
    perf = order.is_performance(request.node)
    with check.waiting():
        whole = wish.use != "shared" and not acceptance.shares_devices
        if perf or whole:  # only to keep the order: the lease itself excludes others
            acceptance.earlier_ended(request.node)
        held = acceptance.keeper.take(wish)
    check.devices, check.count = device_names(held.devices), wish.count
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
def whole_run(request: pytest.FixtureRequest, acceptance: AcceptanceSession, check: Check) -> Host:
    """The machine after every other check; its states before and after the run become evidence."""
    with check.waiting():
        ended = acceptance.earlier_ended(request.node)
    if not ended:
        raise overdue.OverdueError("other checks did not end, so this check cannot judge the whole run")
    early = acceptance.machine_at_start()
    # Where a reading resets the error counts, a second reading would miss what the first one found.
    cleared = any(link.errors_cleared for link in early.links)
    late = machine(acceptance.monitor.read, attempts=1 if cleared else 2)
    check.devices = device_names(acceptance.devices)
    for kept, seen in ((check.before, early), (check.after, late)):
        kept.update(evidence(seen, acceptance.devices) | {"links": link_states(seen)})
    return late


@pytest.fixture
def record_metric(check: Check) -> RecordMetric:
    """Put a metric into result.json; with `gate=True` the metric's bound judges the check."""
    return check.record


@pytest.fixture
def on_device(acceptance: AcceptanceSession, lease: leases.Lease, check: Check) -> OnDevice:
    """Run functions of `workloads` on the leased devices."""
    return OnDevice(acceptance, lease, check)


@pytest.fixture
def in_new_processes(acceptance: AcceptanceSession, lease: leases.Lease, check: Check) -> InNewProcesses:
    """Run a function of `workloads` in several new processes, some of them at once."""
    return InNewProcesses(acceptance, lease, check)


@pytest.fixture(scope="module")
def in_child(acceptance: AcceptanceSession, vendor: vendors.Vendor) -> Iterator[InChild]:
    """Run functions of `workloads` without a device; with `fresh=True` in a process without any module."""
    worker = Worker(acceptance.result_dir / "children")
    yield InChild(acceptance, vendor, worker)
    worker.stop()


@pytest.fixture
def launch(acceptance: AcceptanceSession, lease: leases.Lease, check: Check) -> Launch:
    """Run torchrun programs on the leased devices."""
    return Launch(acceptance, lease, check)


@pytest.fixture
def passes(on_device: OnDevice, record_metric: RecordMetric) -> Passes:
    """Run a function of `workloads` on the leased devices; each of its cases must have passed."""
    from workloads import cases  # it imports torch, for which names stand only later

    return lambda function, **arguments: cases.require(on_device(function, **arguments), record_metric)


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    """Results of launches that checks of a file share: importing torch on every rank takes seconds."""
    return {}


def _state(acceptance: AcceptanceSession, held: leases.Lease, check: Check, *, perf: bool) -> Host:
    """Read the machine before or after a check.

    A performance check needs its devices alone: any process that stays makes the check unfit. Our own idle
    worker stays only where it is seen as itself on the device; else it is stopped.
    """
    if not perf or acceptance.shares_devices:
        return machine(acceptance.monitor.read_devices)
    early = acceptance.machine_at_start()
    if (own := acceptance.worker.pid) is not None:
        seen = machine(acceptance.monitor.read_devices)
        if not newly_shared(early, without(seen, own), held.devices):
            check.doubts += doubts(early, seen, held.devices)
            return seen
    acceptance.worker.stop()
    deadline = time.monotonic() + GONE_WAIT_S
    while True:
        seen = machine(acceptance.monitor.read_devices)
        others = newly_shared(early, seen, held.devices)
        if not others or time.monotonic() > deadline:
            check.unfit += others
            check.doubts += doubts(early, seen, held.devices)
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
        check.unfit += _without_reading(check.samples, held.devices, sampler.problem)
        for device in held.devices:
            reasons = {why for s in check.samples if s.index == device.index for why in s.throttle.normal}
            check.doubts += held_down(device.index, reasons)
        slowed = sorted({(s.index, reason) for s in check.samples for reason in s.throttle.unfit})
        check.unfit += [
            Unfit("throttled", f"device {index} throttled: {reason}", index) for index, reason in slowed
        ]


def _without_reading(
    samples: Sequence[Sample], devices: Sequence[Device], problem: str | None
) -> Iterator[Unfit]:
    """Each device for which no sample shows whether it was throttled."""
    for device in devices:
        readings = [sample.throttle.reading for sample in samples if sample.index == device.index]
        failed = [words for reading in readings for words in unanswered({"throttle reasons": reading})]
        if len(failed) == len(readings):
            last = failed[-1] if failed else problem
            words = f"device {device.index} gave no reading while the check ran: {last}"
            yield Unfit("no answer", words, device.index)
