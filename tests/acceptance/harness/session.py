"""The pytest hooks of an acceptance run. In: pytest's options and reports. Out: checks by tier, result.json.

Under pytest-xdist the controller reads the host, hands it to the workers and writes result.json. Each check's
record travels to the controller as text on the teardown report.
"""

import bisect
import functools
import json
import os
import pickle
import signal
import tempfile
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import vendors
from harness import asked, launch, leases, models, nics, order, page, processes, records, resultfile, skips
from harness.check import Check
from harness.evidence import evidence, link_states
from harness.host_memory import HostMemory
from harness.listener import Listener
from harness.monitor import Monitor, MonitorError
from harness.overdue import OverdueError
from harness.server import Server
from harness.unfit import InvalidRun
from harness.worker import Worker
from vendors import Device, Host, VendorAbsentError, VendorName

PLUGIN = "stackcheck-acceptance"  # the session's name among pytest's plugins
CHECK = pytest.StashKey[Check]()
# What ends a check by its judgement; any other exception is a defect of the suites, and judges nothing.
JUDGED = (AssertionError, pytest.fail.Exception, pytest.skip.Exception)
# As `policy` in matrix.yaml, which no container has; a unit test compares them.
CERTIFYING_TIER: Mapping[VendorName, str] = {"cpu": "smoke", "amd": "standard", "nvidia": "standard"}
MEASURED_RANKS = 4
TITLES = {"amd": "AMD", "nvidia": "NVIDIA", "cpu": "CPU"}


# What the controller hands to its workers: run id, result folder, host, and why there is no host.
Shared = tuple[str, Path, Host | None, str | None]


class AcceptanceSession:
    """The run of one pytest process; the controller's session writes the result."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.vendor: VendorName = config.getoption("gpu_vendor")
        self.chosen: str = config.getoption("tier") or CERTIFYING_TIER[self.vendor]
        self.is_gate = self.chosen == order.GATE
        self.tier = order.TIERS[0] if self.is_gate else self.chosen  # how much each check does
        self.run_file = resultfile.read_run_file(config.getoption("run_file"))
        shared: str | None = getattr(config, "workerinput", {}).get("stackcheck")
        self.is_worker = shared is not None
        self.listed: int | None = config.getoption("list_checks")  # how many devices the listing is for
        signal.signal(signal.SIGTERM, _interrupt)
        begun: Shared = pickle.loads(bytes.fromhex(shared)) if shared else self._begin()
        self.run_id, self.result_dir, self.host, self.absence = begun
        self.monitor = Monitor(self.vendor)
        _wait_asleep()
        if self.is_worker:  # its children use their part of the cores
            workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
            cores = max(1, len(os.sched_getaffinity(0)) // workers)
            processes.variables().setdefault("OMP_NUM_THREADS", str(cores))
        visibility = vendors.module(self.vendor).child_environment(())
        children = self.result_dir / "children"
        self.server = Server(children, free=visibility)
        one_thread = launch.THREADS.items() <= processes.variables().items()
        self.rank_server = (
            self.server if one_thread else Server(children, free=visibility, environment=launch.THREADS)
        )
        self.worker = Worker(self.result_dir / "children", self.server)
        self.keeper = leases.Keeper(
            config.getoption("lease_dir") or leases.default_folder(),
            self.devices,
            unlocked=self.shares_devices,
        )
        self.selection = {"collected": 0, "deselected": 0, "dropped": 0}
        self.results: resultfile.ResultFile | None = None
        self.page: str | None = None  # where report.html is, or why it is not
        self.unfinished: dict[str, dict[str, Any]] = {}  # records of checks whose teardown is still to come
        self.numbers: dict[str, int] = {}
        self.stages: list[tuple[int, bool]] = []  # of the checks, in their order
        self.ended = order.Ended(self.result_dir / "children" / f"ended-{self.run_id}")
        self.listener = Listener(self.result_dir / "children" / f"faults-{self.run_id}.jsonl")
        self.host_memory = HostMemory(self.result_dir / "children" / f"memory-{self.run_id}.jsonl")
        if self.listed:
            config.option.collectonly = True
        elif not self.is_worker:
            self._open_files()
        elif not self.shares_devices:  # a whole run on GPUs: they load torch while the checks are collected
            self.server.prepare()

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that this run may use."""
        return self.host.devices[: self.config.getoption("gpus")] if self.host else ()

    @property
    def device_count(self) -> int:
        """How many devices this run may use, or is listed for; at least one."""
        return self.listed or max(1, len(self.devices))

    @property
    def shares_devices(self) -> bool:
        """Whether the device is the machine itself (cpu), which any number of checks may use at once."""
        return not vendors.module(self.vendor).VISIBILITY

    def machine_at_start(self) -> Host:
        """The machine before the first check. A check that asks for it runs only where there are devices."""
        assert self.host is not None, self.absence
        return self.host

    def earlier_ended(self, item: pytest.Item) -> bool:
        """Wait for all checks of earlier stages. False if one of them does not end."""
        stall_s = self.limit_s(order.STALL_S, max(1, self.device_count))
        stage = order.stage(item, self.device_count)
        return self.ended.wait_for(bisect.bisect_left(self.stages, stage), stall_s=stall_s)

    @functools.cached_property
    def model(self) -> str:
        """The device model; for unknown or mixed devices a description, which has no thresholds."""
        found = sorted({resultfile.model_of(self.vendor, device) for device in self.devices})
        return found[0] if len(found) == 1 else " + ".join(found) or "none"

    def limit_s(self, timeout_s: float, ranks: int = 1) -> float:
        """A limit in seconds for a child with `ranks` ranks on this vendor's devices.

        The limits in the checks were set on up to four H200s, and each further rank imports and compiles too.
        """
        return timeout_s * vendors.module(self.vendor).TIME_LIMIT_FACTOR * max(1.0, ranks / MEASURED_RANKS)

    def child_environment(self, devices: Sequence[Device]) -> dict[str, str]:
        """Variables that show a child these devices, and tell a job their model: it never asks their name."""
        told = (
            {processes.DEVICE_MODEL: self.model}
            if any(row["model"] == self.model for row in models.table())
            else {}
        )
        return vendors.module(self.vendor).child_environment(devices) | told

    # -- the run

    def _begin(self) -> Shared:
        run_id = str(self.run_file.get("run_id") or uuid.uuid4().hex)
        if self.listed:
            return run_id, Path(tempfile.gettempdir()), None, None
        folder = self.config.getoption("result_dir") or Path(tempfile.gettempdir(), f"stackcheck-{run_id}")
        Path(folder).mkdir(parents=True, exist_ok=True)
        monitor = Monitor(self.vendor)
        try:
            host, absence = replace(monitor.read(), nics=nics.read()), None
            if not host.devices:
                raise VendorAbsentError("the library lists no device")
        except (VendorAbsentError, MonitorError) as error:
            host, absence = (
                None,
                f"vendor {self.vendor} was named and no {TITLES[self.vendor]} device is visible: {error}",
            )
        finally:
            monitor.stop()
        return run_id, Path(folder).resolve(), host, absence

    def _open_files(self) -> None:
        self.config.option.xmlpath = self.config.option.xmlpath or str(self.result_dir / "junit.xml")
        head = resultfile.head(
            vendor=self.vendor,
            tier=self.chosen,
            run_id=self.run_id,
            run_file=self.run_file,
            host=self.host,
            arguments=[str(argument) for argument in self.config.invocation_params.args],
        )
        self.results = resultfile.ResultFile(self.result_dir / "result.json", head)
        if self.host is None or self.config.option.collectonly:
            return
        if self.tier == "soak":  # which alone judges it: a thread of its own is beside each fork
            self.host_memory.start()
        if not self.shares_devices:
            self.listener.start(self.vendor)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give `ranks` the number of devices of this run: a smaller world would leave links untried.

        A file whose checks have `ranks` says in RANKS how many run on a machine without a GPU ("cpu"), and
        how its checks use the devices: the arguments of the mark `gpus` beside the number. A tuple as "whole"
        names the checks that need them whole; the others share them.
        """
        marks = dict(getattr(metafunc.module, "RANKS", {}))
        if marks and "ranks" in metafunc.fixturenames:
            on_cpu = marks.pop("cpu")
            if isinstance(names := marks.get("whole"), tuple):
                marks["whole"] = metafunc.function.__name__ in names
            count = on_cpu if self.vendor == "cpu" else self.device_count
            mark = pytest.mark.gpus(count, **marks)
            metafunc.parametrize("ranks", [pytest.param(count, marks=mark, id=f"{count}")])

    def pytest_report_header(self) -> list[str]:
        known = self.vendor == "cpu" or all(map(models.is_known_arch, self.devices))
        return [
            f"stackcheck: {len(self.devices)} x {self.model}, {self.chosen}, results in {self.result_dir}",
            *([] if known else [f"stackcheck: {models.uncertifiable(self.vendor, self.devices[0])}"]),
        ]

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:  # pytest-xdist, which may be absent, has the type
        shared: Shared = (self.run_id, self.result_dir, self.host, self.absence)
        node.workerinput["stackcheck"] = pickle.dumps(shared).hex()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        late = [item for item in items if self._is_late(item)]
        items[:] = order.ordered(item for item in items if item not in late)
        items.sort(key=lambda item: order.stage(item, self.device_count))
        if late:
            config.hook.pytest_deselected(items=late)

    def _is_late(self, item: pytest.Item) -> bool:
        return not order.is_in(item, self.chosen)

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        late = sum(self._is_late(item) for item in items)
        self.selection["deselected"] += late
        self.selection["dropped"] += len(items) - late  # by -k, -m or --deselect: such a run gets no verdict

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if self.listed:
            tiers = {records.check_id(item.nodeid): order.TIERS[order.tier(item)] for item in session.items}
            print(json.dumps(tiers, indent=0, sort_keys=True))
        self.selection["collected"] = len(session.items)
        self.numbers = {item.nodeid: number for number, item in enumerate(session.items)}
        self.stages = [order.stage(item, self.device_count) for item in session.items]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        del error
        counts = getattr(node, "workeroutput", {}).get("stackcheck", {})
        self.selection = {name: max(count, counts.get(name, 0)) for name, count in self.selection.items()}

    # -- one check

    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if self.absence is None or item.get_closest_marker("static"):
            if not self.shares_devices and "launch" in getattr(item, "fixturenames", ()):
                self.rank_server.prepare()  # it loads torch while the check waits for its devices
            item.stash[CHECK] = Check(vendor=self.vendor, model=self.model, bounds_needed=not self.is_gate)
            return None
        return records.fail_at_once(item, self.absence)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        if isinstance(item, pytest.Function):
            item.obj = records.concluding(item.obj, item.stash[CHECK])

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        yield
        if nextitem is None or not order.devices(nextitem) or order.wish(nextitem) != order.wish(item):
            if not self.shares_devices:  # the next holder of the devices would find our idle process on them
                self.worker.stop()
            self.keeper.give_back()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, Any, None]:  # pluggy's result, whose type pytest does not export
        outcome = yield
        report: pytest.TestReport = outcome.get_result()
        setattr(report, records.KIND, records.kind(report, call))
        if CHECK in item.stash and call.excinfo:
            self._note(item.stash[CHECK], call.excinfo.value)
        if report.when == "teardown" and CHECK in item.stash:
            measured = records.measured(item, item.stash[CHECK])
            setattr(report, records.RECORD, json.dumps(measured, allow_nan=False))

    def _note(self, check: Check, raised: BaseException) -> None:
        """Keep the facts that the host confirms: of a skip, or of an unfit machine as it was at the start."""
        check.skip = skips.facts(raised) or check.skip
        if not isinstance(raised, JUDGED):
            check.cause = "exception"
        if isinstance(raised, OverdueError):
            check.cause = "time_limit"
        if isinstance(raised, InvalidRun):
            check.machine += raised.found
            if self.host is not None and "start" not in check.more_evidence:
                start = evidence(self.host, self.devices)
                check.more_evidence["start"] = start | {"links": link_states(self.host)}

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if nodeid in self.numbers:  # empty in the controller of pytest-xdist, which collects no tests
            self.ended.add(self.numbers[nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.results is None:
            return
        name = records.check_id(report.nodeid)
        record = self.unfinished.setdefault(name, records.new_record(name))
        records.merge(record, report)
        if report.when == "teardown" or report.when not in ("setup", "call"):
            self.results.add(self.unfinished.pop(name))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if self.results is not None and report.failed:
            record = records.new_record(records.check_id(report.nodeid) or "collection")
            self.results.add({**record, "outcome": "error", "reason": report.longreprtext[-4000:]})

    # -- the end

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.worker.stop()
        self.server.stop()
        self.rank_server.stop()
        asked.stop()
        self.keeper.give_back()
        self.monitor.stop()
        self.listener.stop()
        self.host_memory.stop()
        if self.is_worker:
            # pytest-xdist adds the attribute in its workers; pytest's type does not know it.
            self.config.workeroutput["stackcheck"] = self.selection  # type: ignore[attr-defined]
            return
        if self.results is None:
            return
        for record in self.unfinished.values():
            self.results.add({**record, "outcome": "error", "reason": "the run ended inside this check"})
        crashed = int(exitstatus) not in (
            pytest.ExitCode.OK,
            pytest.ExitCode.TESTS_FAILED,
            pytest.ExitCode.NO_TESTS_COLLECTED,
        )
        self.results.finish(crashed=crashed, selection=self.selection)
        if not self.config.option.collectonly:
            try:
                written = page.write(self.results.content, self.result_dir, self.model, len(self.devices))
                self.page = str(written)
            except OSError as error:  # its content is in result.json already
                self.page = f"not written: {error}"

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        """The last line of a run by pytest alone; with an image the tool gives the verdict itself."""
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if self.results is None or reporter is None or config.option.collectonly:
            return
        if self.results.content["image"] is None:
            reporter.write_line(f"verdict: stackcheck judge {self.results.path}")

    def pytest_terminal_summary(self, terminalreporter: "pytest.TerminalReporter") -> None:
        if self.results is not None:
            content, path = self.results.content, self.results.path
            records.summarize(terminalreporter, content, path, self.model, len(self.devices))
            if self.page:
                terminalreporter.write_line(f"page: {self.page}")


def session_of(config: pytest.Config) -> AcceptanceSession:
    """The session of this pytest process; tests/conftest.py registers it for a run with --gpu-vendor."""
    plugin = config.pluginmanager.get_plugin(PLUGIN)
    assert isinstance(plugin, AcceptanceSession)
    return plugin


def _wait_asleep() -> None:
    """Let OpenMP's threads sleep while they wait for each other, unless the user chose: by default they spin.

    On two cores with other work, the attention of a smoke run took 19.6 s of processor time with spinning
    threads and 3.0 s with sleeping ones (torch 2.13, two threads); the results are the same.
    """
    processes.variables().setdefault("OMP_WAIT_POLICY", "passive")


def _interrupt(number: int, frame: object) -> None:
    """Turn SIGTERM (from `timeout` or a scheduler) into an interrupt, so that the run ends its children too.

    They run in sessions of their own, so the signal does not reach them.
    """
    del number, frame
    raise KeyboardInterrupt
