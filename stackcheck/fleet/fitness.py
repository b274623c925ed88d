"""Is this node fit for this image, now? In: this node, an image or none, its own last gates. Out: `Fitness`.

The checks are those of the suites that find broken machines (tier `gate`); `suite.judged` runs and judges
them, and pytest alone where there is no image. Then each figure is held to what this node measured before.
"""

import contextlib
import dataclasses
import datetime as dt
import fcntl
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from stackcheck import vendors
from stackcheck.engine.client import Engine
from stackcheck.errors import ChecksFailedError, ConfigurationError, MachineUnfitError
from stackcheck.files import users
from stackcheck.files.atomic import file_error
from stackcheck.fleet.job import subject_of
from stackcheck.fleet.node import load_image
from stackcheck.fleet.own_past import NodePast, Part, compare, slower_before
from stackcheck.history.history import History
from stackcheck.oci.tags import label
from stackcheck.suite import controller, results, run
from stackcheck.suite import judged as suites
from stackcheck.suite.judgement import judge_file
from stackcheck.suite.results import RunResult
from stackcheck.suite.verdict import Verdict
from stackcheck.vendors import Vendor, seen

State = Literal["fit", "unfit", "failed"]
EXIT_CODES: Mapping[State, int] = {
    "fit": 0,
    "unfit": MachineUnfitError.exit_code,
    "failed": ChecksFailedError.exit_code,
}
STOP_S = 15.0
ONCE = "slower once"
PASSING = frozenset({"shared", ONCE})  # another job is on the device; one measurement is no proof
KEPT = 500  # gates of a node: three weeks of one each hour


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fitness:
    """The answer: `fit`, `unfit` (a part of this node), or `failed` (a check, and nothing shows the node)."""

    state: State
    image: str | None  # the image; None: the node alone
    result: RunResult
    compared: NodePast  # the comparison with the node's own last gates
    parts: tuple[Part, ...]  # what refuses the node, with its evidence
    reasons: tuple[str, ...]  # why it is not fit
    seconds: float  # how long all of it took

    @property
    def drains(self) -> bool:
        """Whether a part of the node is broken, and not only in use."""
        return self.state != "fit" and any(part.kind not in PASSING for part in self.parts)

    @property
    def words(self) -> str:
        """The answer in one line, the most important first."""
        if self.state == "fit":
            return f"fit, {self.seconds:.0f} s: {self.compared.words}"
        first = f"{self.parts[0].name}: {self.parts[0].evidence}" if self.parts else self.reasons[0]
        return f"{self.state}: {' '.join(first.split())}"

    def as_json(self) -> dict[str, Any]:
        """The answer for machines."""
        return {
            "state": self.state,
            "exit_code": EXIT_CODES[self.state],
            "drains": self.drains,
            "image": self.image,
            "vendor": self.result.host.vendor,
            "devices": [device.model for device in self.result.host.devices],
            "seconds": round(self.seconds, 1),
            "history": {**self.compared._asdict(), "says": self.compared.words}
            | {"slower": [part.name for part in self.compared.slower]},
            "parts": [dataclasses.asdict(part) for part in self.parts],
            "reasons": list(self.reasons),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeGate:
    """How to look at this node.

    Attributes:
        limit_s: How long it may take: a run without an image is stopped then, and no second run begins that
            would not end in time.
    """

    root: Path  # the checkout with the suites and bounds
    state: Path  # a folder of this node that keeps its last gates
    vendor: Vendor | None  # the vendor whose checks run; None: that of the image, or of this node's GPUs
    python: str  # without an image, the Python with torch that runs the suites
    limit_s: float
    report: Callable[[str], None]

    def look(self, image: str | None, connect: Callable[[], Engine]) -> Fitness:
        """The node's fitness. A figure that is slower than before is measured a second time before it counts.

        Raises:
            MachineUnfitError: The node has no GPU of the vendor.
            ConfigurationError: The checkout does not know the image, or the Python has no torch.
        """
        began = time.monotonic()
        with self._alone():
            history = History(str(self.state / "records"), f"sqlite:///{self.state / 'index.sqlite'}")
            body, verdict = self._measured(image, connect, self.limit_s)
            result = results.parse(body)
            compared = compare(result, history)
            took = time.monotonic() - began
            if compared.slower and verdict.status == "PASSED" and 2 * took > self.limit_s:
                compared = compared._replace(slower=self._once(compared.slower, result, history, took))
            elif compared.slower and verdict.status == "PASSED":
                self.report(
                    f"slower than before, measured again: {', '.join(p.name for p in compared.slower)}"
                )
                first = {part.figure for part in compared.slower}
                body, verdict = self._measured(image, connect, self.limit_s - took)
                result = results.parse(body)
                compared = compare(result, history)
                again = tuple(part for part in compared.slower if part.figure in first)
                compared = compared._replace(slower=again)
            if compared.slower and verdict.status == "PASSED":
                slower = tuple(f"{part.name}: {part.evidence}" for part in compared.slower)
                verdict = dataclasses.replace(verdict, status="UNFIT", reasons=slower)
            history.append(body, verdict.as_json(), None, source="gate", judged=dt.datetime.now(dt.UTC))
            history.keep_newest(KEPT)
        return _fitness(image, result, verdict, compared, time.monotonic() - began)

    def _once(
        self, slower: Sequence[Part], result: RunResult, history: History, took: float
    ) -> tuple[Part, ...]:
        """The slower parts where there is no time for a second run: the last gate may be the first one."""
        self.report(f"slower than before, not measured again: {took:.0f} s of {self.limit_s:g} s are gone")
        sure = slower_before(slower, result, history)
        words = f"; measured once: no time for a second run within {self.limit_s:g} s"
        return tuple(
            part if part in sure else dataclasses.replace(part, kind=ONCE, evidence=part.evidence + words)
            for part in slower
        )

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One gate at a time on a node: two would slow each other down."""
        try:
            self.state.mkdir(parents=True, exist_ok=True)
            with (self.state / "lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        except PermissionError as error:
            raise file_error(error, self.state) from error

    def _measured(
        self, image: str | None, connect: Callable[[], Engine], limit_s: float
    ) -> tuple[bytes, Verdict]:
        if image is None:
            return self._bare(limit_s)
        subject = subject_of(image, self.root, self.vendor)
        require_devices(subject.vendor)
        engine = connect()
        load_image(subject.image, engine, self.report)
        out = self.state / "runs" / label(image)
        out.mkdir(parents=True, exist_ok=True)
        judged = suites.run_and_judge(
            *(subject, engine),
            tier="gate",
            root=self.root,
            out=out,
            report=self.report,
            reuse=lambda _: False,
        )
        return results.read_result_file(out / "run" / "result.json"), judged.verdict

    def _bare(self, limit_s: float) -> tuple[bytes, Verdict]:
        """By pytest alone, as a node without any container has it."""
        vendor = self.vendor or vendors.detect()
        if self.vendor is None and vendor == "cpu":
            raise _no_gpu("of any vendor", "--gpu-vendor cpu, to look at a node that shall have none")
        require_devices(vendor)
        _require_torch(self.python)
        out = self.state / "runs" / "bare"
        path = out / "result.json"
        path.unlink(missing_ok=True)
        code = self._pytest(vendor, out, limit_s)
        if not path.is_file():
            raise ChecksFailedError(
                "the suites ended without a result",
                where=str(out),
                got=f"exit code {code}",
                next_step=f"{self.python} -m pytest {self.root / 'tests'} --gpu-vendor {vendor} --tier gate",
            )
        verdict = judge_file(path, self.root, None).verdict
        if gone := seen.look(vendors.host(vendor)).gone:
            verdict = dataclasses.replace(verdict, status="UNFIT", reasons=(*gone, *verdict.reasons))
        return results.read_result_file(path), verdict

    def _pytest(self, vendor: Vendor, out: Path, limit_s: float) -> int:
        command = (
            *(self.python, "-B", "-m", "pytest", str(self.root / "tests"), "-p", "no:cacheprovider"),
            *(f"--gpu-vendor={vendor}", "--tier=gate", f"--result-dir={out}"),
        )
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHON"))}
        out.mkdir(parents=True, exist_ok=True)
        with (out / "log").open("w+", encoding="utf-8") as log:
            with subprocess.Popen(
                command, cwd=out, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            ) as process:
                try:
                    process.wait(limit_s)
                except subprocess.TimeoutExpired:
                    self.report(f"not ended within {limit_s:.3g} s: stopped")
                finally:
                    controller.stop(process, STOP_S)
            log.seek(0)
            for line in log:
                if run.PROGRESS.search(line.rstrip()):
                    self.report(line.rstrip())
        return process.returncode


def require_devices(vendor: Vendor) -> None:
    """Refuse a node without a GPU of this vendor.

    Raises:
        MachineUnfitError: It has none.
    """
    if vendor != "cpu" and not vendors.host(vendor).devices:
        raise _no_gpu(f"of {vendor}", f"stackcheck doctor; lspci | grep -i {vendor}")


def _no_gpu(which: str, step: str) -> MachineUnfitError:
    return MachineUnfitError(
        f"this node has no GPU {which} that its driver lists",
        got="no device",
        expected="the GPUs that the image is for",
        next_step=step,
    )


def _require_torch(python: str) -> None:
    asked = "import importlib.util as u, sys; sys.exit(not all(u.find_spec(n) for n in ('torch', 'pytest')))"
    try:
        code = subprocess.run([python, "-c", asked], check=False, timeout=60).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        code = str(error)  # type: ignore[assignment]
    if code:
        raise ConfigurationError(
            "without an image, a Python with torch and pytest runs the suites",
            where=python,
            got="it lacks one of them, or does not start",
            expected="--python PATH",
            next_step="stackcheck gate --python /opt/venv/bin/python, or name an image",
        )


def _fitness(
    image: str | None, result: RunResult, verdict: Verdict, compared: NodePast, seconds: float
) -> Fitness:
    # The PCI address of each device of the run, "" where nothing tells it.
    known = vendors.module(result.host.vendor).addresses()
    addresses = [known.get(device.id, "") for device in result.host.devices]
    parts = [
        _part(found.kind, found.words, found.device, addresses)
        for check in result.checks
        if check.outcome == "invalid"
        for found in check.machine
    ]
    parts += [dataclasses.replace(part, name=_at(part.name, addresses)) for part in compared.slower]
    states: dict[str, State] = {"PASSED": "fit", "UNFIT": "unfit", "FAILED": "failed"}
    return Fitness(
        state=states[verdict.status],
        image=image,
        result=result,
        compared=compared,
        parts=tuple(dict.fromkeys(parts)),
        reasons=verdict.reasons,
        seconds=seconds,
    )


def _part(kind: str, words: str, device: int | None, addresses: Sequence[str]) -> Part:
    if device is not None:
        return Part(kind=kind, name=_at(f"GPU {device}", addresses), evidence=words)
    head, _, rest = words.partition(": ")
    pair = re.search(r"\d+-\d+$", head)
    name = _at(f"link {pair[0]}", addresses) if kind == "link" and pair else head if rest else "the node"
    return Part(kind=kind, name=name, evidence=rest or words)


def _at(name: str, addresses: Sequence[str]) -> str:
    """The name with the PCI address of each GPU in it."""
    numbers = [int(number) for number in re.findall(r"\d+", name)]
    found = [addresses[number] for number in numbers if number < len(addresses) and addresses[number]]
    return f"{name} at {' and '.join(found)}" if found and " at " not in name else name


def default_state() -> Path:
    """Where a node keeps its gates: never below a checkout that many nodes share."""
    if os.geteuid() == 0:
        return Path("/var/lib/stackcheck/gate")
    return users.folder("XDG_STATE_HOME") / "stackcheck/gate"
