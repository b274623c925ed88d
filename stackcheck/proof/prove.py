"""Show that each check can fail. In: runs of tests/faults. Out: a `Proof`: fault by fault, caught or not.

The faults that need torch run where torch is (in a certified image, or on this host with a Python that has
it), those over AMD's real library on the host, which has to be root for them. Each run ends with one line of
JSON (tests/faults/proof.py); what such a run planted, what caught it and which check nothing was planted for
is read from that line alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from stackcheck.errors import ChecksFailedError, ConfigurationError
from stackcheck.vendors import Vendor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from typing import IO

AMD_HOSTS = ("tests/faults/test_amd_hosts.py", "tests/faults/test_amd_readings.py")
FAULTS = "tests/faults"
SUITE_PYTHON = "STACKCHECK_SUITE_PYTHON"  # as tests/faults/planting.py reads it
LINE = '{"checks": '
CAN_FAIL = ("failed", "invalid", "error")  # a fault whose right answer is a skip proves no failure


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Planted(_Part):
    """What a test planted, for which check, and the first words of its failure."""

    test: str
    name: str
    check: str
    vendor: Vendor
    reason: str | None


class Fault(Planted):
    """One planted fault, the check that has to catch it, and how that check has to end."""

    expected: Literal["failed", "invalid", "error", "skipped"]
    state: Literal["caught", "missed", "not run"]


class Healthy(Planted):
    """One run with nothing planted; a check that fails in it is a false alarm."""

    state: Literal["passed", "false alarm", "not run"]


class FaultRun(_Part):
    """The line of one run; `checks` is null where the suites cannot be collected (no torch)."""

    checks: tuple[str, ...] | None
    faults: tuple[Fault, ...]
    healthy: tuple[Healthy, ...]
    failed: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proof:
    """Every fault and healthy run, and the checks that nothing was planted for."""

    faults: tuple[Fault, ...]
    healthy: tuple[Healthy, ...]
    failed: tuple[str, ...]  # tests of tests/faults that plant nothing, and failed all the same
    checks: tuple[str, ...]
    unproven: tuple[str, ...]

    @property
    def caught(self) -> int:
        """Faults whose check ended as it has to."""
        return sum(fault.state == "caught" for fault in self.faults)

    @property
    def false_alarms(self) -> int:
        """Healthy runs in which something failed."""
        return sum(run.state == "false alarm" for run in self.healthy)

    @property
    def holds(self) -> bool:
        """Whether every check can fail, every fault was caught, and nothing healthy failed."""
        quiet = all(run.state == "passed" for run in self.healthy) and not self.failed
        complete = bool(self.checks and self.healthy) and not self.unproven
        return complete and quiet and self.caught == len(self.faults)


def in_torch(workers: int) -> tuple[str, ...]:
    """The arguments of the run that needs torch."""
    left_out = [word for path in AMD_HOSTS for word in ("--ignore", path)]
    return ("-m", "pytest", FAULTS, *_options(workers), *left_out)


def over_amd(workers: int) -> tuple[str, ...]:
    """The arguments of the run over AMD's real library."""
    return ("-m", "pytest", *AMD_HOSTS, *_options(workers))


def suite_python() -> str:
    """The Python of this host that has torch and pytest; the tool's own has no torch.

    Raises:
        ConfigurationError: The one that the environment names cannot be run.
    """
    python = os.environ.get(SUITE_PYTHON, sys.executable)
    if shutil.which(python) is None:
        raise ConfigurationError(
            "there is no such Python",
            where=SUITE_PYTHON,
            got=python or "nothing",
            expected="a program that has torch and pytest",
            next_step=f"{SUITE_PYTHON}=/path/to/python stackcheck prove --here",
        )
    return python


def here(
    arguments: Sequence[str], *, root: Path, report: Callable[[str], None], python: str = sys.executable
) -> FaultRun:
    """Run one part on this host.

    Raises:
        ChecksFailedError: It ended without its line.
    """
    reader = FaultRunReader(report)
    with _started([python, *arguments], root, subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            reader(line)
    return reader.finished(" ".join(arguments))


@contextlib.contextmanager
def beside(
    arguments: Sequence[str], *, root: Path, report: Callable[[str], None]
) -> Iterator[Callable[[], FaultRun]]:
    """Run one part on this host while the body runs; what the body gets waits for it and reports it whole.

    Most of the run over AMD's library is waiting, and most of the one that needs torch is not.
    """
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output,
        _started([sys.executable, *arguments], root, output) as process,
    ):

        def ended() -> FaultRun:
            process.wait()
            output.seek(0)
            reader = FaultRunReader(report)
            for line in output:
                reader(line)
            return reader.finished(" ".join(arguments))

        yield ended


@contextlib.contextmanager
def _started(command: Sequence[str], root: Path, output: int | IO[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that does not outlive the body when that fails."""
    with subprocess.Popen(
        command,
        cwd=root,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        except BaseException:
            process.terminate()  # its children end with it: pytest unwinds, as on Ctrl-C
            raise


class FaultRunReader:
    """Reports each line of a run, and keeps the one that tells what came of it."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._line = ""
        self._last: list[str] = []

    def __call__(self, line: str) -> None:
        """Take one line of output."""
        text = line.rstrip("\n")
        if text.startswith(LINE):
            self._line = text
        elif text.strip():
            self._last = [*self._last[-14:], text]
            self._report(text)

    def finished(self, where: str) -> FaultRun:
        """What the line said.

        Raises:
            ChecksFailedError: There was none, or it is not such a line.
        """
        try:
            return FaultRun.model_validate_json(self._line)
        except ValidationError as error:
            raise ChecksFailedError(
                "the run of planted faults ended without saying what was caught",
                where=where,
                got="\n    ".join(self._last) or "no output",
                expected="one line of JSON at its end (tests/faults/proof.py)",
            ) from error


def join(parts: Sequence[FaultRun]) -> Proof:
    """What several runs prove together."""
    faults = tuple(fault for part in parts for fault in part.faults)
    checks = sorted({check for part in parts for check in part.checks or ()})
    shown = {fault.check.partition("[")[0] for fault in faults if fault.expected in CAN_FAIL}
    return Proof(
        faults=faults,
        healthy=tuple(run for part in parts for run in part.healthy),
        failed=tuple(name for part in parts for name in part.failed),
        checks=tuple(checks),
        unproven=tuple(check for check in checks if check not in shown),
    )


def _options(workers: int) -> tuple[str, ...]:
    return "-q", "-n", str(workers), "-p", "no:cacheprovider", "--proof"
