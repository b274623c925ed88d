"""The pytest hooks of an acceptance run: read the host, choose by tier, keep records, write result.json.

Under pytest-xdist the controller reads the host, writes the file and tells the workers; each check's record
travels to it as text on the teardown report.
"""

import functools
import json
import pickle
import signal
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import vendors
from harness import leases, resultfile, summary
from harness.check import Check, InvalidRun
from harness.monitor import Monitor, MonitorError
from harness.worker import Worker
from vendors import Device, Host, VendorAbsentError, VendorName

TIERS = ("smoke", "standard", "soak")
CHECK = pytest.StashKey[Check]()
RECORD = "stackcheck_record"
TITLES = {"amd": "AMD", "nvidia": "NVIDIA", "cpu": "CPU"}


class AcceptanceSession:
    """One per pytest process; the controller's writes the result."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.vendor: VendorName = config.getoption("gpu_vendor")
        self.tier: str = config.getoption("tier")
        self.told = _told(config.getoption("run_file"))
        shared = getattr(config, "workerinput", {}).get("stackcheck")
        self.is_worker = shared is not None
        signal.signal(signal.SIGTERM, _interrupt)
        self.run_id, self.result_dir, self.host, self.absence = (
            pickle.loads(bytes.fromhex(shared)) if shared else self._begin()
        )
        self.monitor = Monitor(self.vendor)
        self.worker = Worker(self.result_dir / "children")
        self.lease_dir: Path = config.getoption("lease_dir") or leases.default_folder()
        self.deselected = 0
        self.collected = 0
        self.results: resultfile.ResultFile | None = None
        self.records: dict[str, dict[str, Any]] = {}
        if not self.is_worker:
            self._open_files()

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that this run may use."""
        return self.host.devices[: self.config.getoption("gpus")] if self.host else ()

    @property
    def shares_devices(self) -> bool:
        """Whether the "device" is the whole machine, which any number of checks may use at once."""
        return not vendors.module(self.vendor).VISIBILITY

    @functools.cached_property
    def model(self) -> str:
        """The device model; an unknown or mixed one is said in words, and has no thresholds."""
        found = sorted({resultfile.model_of(self.vendor, device) for device in self.devices})
        return found[0] if len(found) == 1 else " + ".join(found) or "none"

    # -- the run

    def _begin(self) -> tuple[str, Path, Host | None, str | None]:
        run_id = str(self.told.get("run_id") or uuid.uuid4().hex)
        folder = self.config.getoption("result_dir") or leases.default_folder().with_name(
            f"stackcheck-{run_id}"
        )
        Path(folder).mkdir(parents=True, exist_ok=True)
        monitor = Monitor(self.vendor)
        try:
            host, absence = monitor.read(), None
            if not host.devices:
                raise VendorAbsentError("the library lists none")
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
            tier=self.tier,
            run_id=self.run_id,
            told=self.told,
            host=self.host,
            arguments=[str(argument) for argument in self.config.invocation_params.args],
        )
        self.results = resultfile.ResultFile(self.result_dir / "result.json", head)

    def pytest_report_header(self) -> list[str]:
        return [
            f"stackcheck: {len(self.devices)} x {self.model}, tier {self.tier}, results in {self.result_dir}"
        ]

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        told = (self.run_id, self.result_dir, self.host, self.absence)
        node.workerinput["stackcheck"] = pickle.dumps(told).hex()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        late = [item for item in items if _tier(item) > TIERS.index(self.tier)]
        kept = [item for item in items if item not in late]
        items[:] = sorted(
            kept, key=_is_performance
        )  # stable: correctness first, performance alone at the end
        if late:
            config.hook.pytest_deselected(items=late)

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.deselected += len(items)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.collected = len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        del error
        counts = getattr(node, "workeroutput", {}).get("stackcheck", {})
        self.collected = max(self.collected, counts.get("collected", 0))
        self.deselected = max(self.deselected, counts.get("deselected", 0))

    # -- one check

    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if self.absence is None or item.get_closest_marker("static"):
            item.stash[CHECK] = Check(vendor=self.vendor, model=self.model)
            return None
        return _fail_at_once(item, self.absence)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        if isinstance(item, pytest.Function):
            item.obj = _concluding(item.obj, item.stash[CHECK])

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        outcome = yield
        report = outcome.get_result()
        report.stackcheck_kind = _kind(report, call)
        if report.when == "teardown" and CHECK in item.stash:
            setattr(report, RECORD, json.dumps(_measured(item, item.stash[CHECK]), allow_nan=False))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.results is None:
            return
        name = check_id(report.nodeid)
        record = self.records.setdefault(name, _new_record(name))
        _merge(record, report)
        if report.when == "teardown" or report.when not in ("setup", "call"):
            self.results.add(self.records.pop(name))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if self.results is not None and report.failed:
            record = _new_record(check_id(report.nodeid) or "collection")
            self.results.add({**record, "outcome": "error", "reason": report.longreprtext[-4000:]})

    # -- the end

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self.worker.stop()
        self.monitor.stop()
        counts = {"collected": self.collected, "deselected": self.deselected}
        if self.is_worker:
            self.config.workeroutput["stackcheck"] = counts  # type: ignore[attr-defined]
            return
        if self.results is None:
            return
        for record in self.records.values():
            self.results.add({**record, "outcome": "error", "reason": "the run ended inside this check"})
        self._judge_skips(session)
        crashed = int(exitstatus) not in (
            pytest.ExitCode.OK,
            pytest.ExitCode.TESTS_FAILED,
            pytest.ExitCode.NO_TESTS_COLLECTED,
        )
        self.results.finish(crashed=crashed, selection=counts)

    def _judge_skips(self, session: pytest.Session) -> None:
        assert self.results is not None
        ran: dict[str, bool] = {}  # by function: thirty instances of one skipped check are one loss
        for check in self.results.content["checks"]:
            name = check["id"].partition("[")[0]
            ran[name] = ran.get(name, False) or check["outcome"] != "skipped"
        skipped, budget = list(ran.values()).count(False), self.config.getoption("skip_budget")
        if not self._is_whole_suite() or skipped <= budget * len(ran):
            return
        reason = f"{skipped} of {len(ran)} checks were skipped; the budget is {budget:.0%} (--skip-budget)"
        self.results.add({**_new_record("session::skip_budget"), "outcome": "failed", "reason": reason})
        session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _is_whole_suite(self) -> bool:
        """A budget of skips means something only where nobody chose among the checks."""
        option = self.config.getoption
        chosen = option("keyword") or option("markexpr") or option("collectonly") or option("deselect")
        return not chosen and all(Path(name).is_dir() for name in self.config.args)

    def pytest_terminal_summary(self, terminalreporter: "pytest.TerminalReporter") -> None:
        if self.results is not None:
            summary.write(terminalreporter, self.results, self.model, len(self.devices))


def _interrupt(number: int, frame: object) -> None:
    """A run told to end (`timeout`, a scheduler) ends its children too: they have sessions of their own."""
    del number, frame
    raise KeyboardInterrupt


def check_id(nodeid: str) -> str:
    """The id of a check, relative to tests/acceptance."""
    return nodeid.removeprefix("acceptance/")


def _told(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise pytest.UsageError(f"--run-file {path}: {error}") from error
    return told


def _tier(item: pytest.Item) -> int:
    mark = item.get_closest_marker("tier")
    name = mark.args[0] if mark else "smoke"
    if name not in TIERS:
        raise pytest.UsageError(f"{item.nodeid}: tier {name!r}, expected one of {', '.join(TIERS)}")
    return TIERS.index(name)


def _is_performance(item: pytest.Item) -> bool:
    mark = item.get_closest_marker("gpus")
    return bool(mark and mark.kwargs.get("perf"))


def _concluding(function: Callable[..., object], check: Check) -> Callable[..., None]:
    @functools.wraps(function)
    def run(*args: object, **kwargs: object) -> None:
        try:
            function(*args, **kwargs)
        except (AssertionError, pytest.fail.Exception):
            if check.unfit:  # a wrong figure of an unfit machine is no failure of the image
                check.conclude()
            raise
        check.conclude()

    return run


def _fail_at_once(item: pytest.Item, reason: str) -> bool:
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for when, outcome in (("setup", "passed"), ("call", "failed"), ("teardown", "passed")):
        report = pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords={},
            outcome=outcome,  # type: ignore[arg-type]
            longrepr=reason if outcome == "failed" else None,
            when=when,  # type: ignore[arg-type]
        )
        report.stackcheck_kind = outcome
        setattr(report, RECORD, json.dumps({"doc": _doc(item)}))
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _kind(report: pytest.TestReport, call: pytest.CallInfo[None]) -> str:
    raised = call.excinfo.value if call.excinfo else None
    if isinstance(raised, InvalidRun):
        return "invalid"
    if report.failed and report.when != "call" and not isinstance(raised, pytest.fail.Exception):
        return "error"
    return str(report.outcome)


def _doc(item: pytest.Item) -> str | None:
    text = getattr(getattr(item, "function", None), "__doc__", None)
    return " ".join(text.split("\n\n")[0].split()) if text else None


def _measured(item: pytest.Item, check: Check) -> dict[str, Any]:
    after = {**check.after, "during": check.telemetry()} if check.samples else check.after
    return {
        "doc": _doc(item),
        "devices": list(check.devices),
        "metrics": [asdict(metric) for metric in check.metrics],
        "evidence": {"before": check.before, "after": after},
        "violations": check.violations,
    }


def _new_record(name: str) -> dict[str, Any]:
    return {
        "id": name,
        "outcome": "passed",
        "reason": None,
        "doc": None,
        "seconds": 0.0,
        "devices": [],
        "metrics": [],
        "evidence": {"before": {}, "after": {}},
    }


RANK = {"passed": 0, "skipped": 1, "failed": 2, "invalid": 3, "error": 4}


def _merge(record: dict[str, Any], report: pytest.TestReport) -> None:
    record["seconds"] = round(record["seconds"] + getattr(report, "duration", 0.0), 4)
    kind = getattr(report, "stackcheck_kind", "error" if report.failed else report.outcome)
    if RANK[kind] > RANK[record["outcome"]]:
        record["outcome"] = kind
        record["reason"] = _reason(report)
    measured = json.loads(getattr(report, RECORD, "{}"))
    extra = [line for line in measured.pop("violations", []) if line not in (record["reason"] or "")]
    if extra:
        record["reason"] = "\n".join(filter(None, (record["reason"], *extra)))
    record.update(measured)


def _reason(report: pytest.TestReport) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longreprtext)[:8000]


def device_names(devices: tuple[Device, ...]) -> tuple[str, ...]:
    """The anonymised names of devices."""
    return tuple(resultfile.anonymous(device.uuid) for device in devices)
