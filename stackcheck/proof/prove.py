"""Show that each check can fail. In: the tests of tests/faults. Out: a `Proof`: each fault, caught or missed.

The tests run in two parts. Faults that need torch run in a certified image, or with a Python of this host
that has torch. Faults of fabricated hosts (AMD's real library, as root; a stub of NVIDIA's) run on this host,
and their verdicts are judged. Each part prints one line of JSON at its end (tests/faults/proof.py): a
`FaultRun`, from which alone the proof is made.
"""

import contextlib
import dataclasses
import fnmatch
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Literal

from pydantic import ValidationError

from stackcheck.errors import ChecksFailedError, ConfigurationError
from stackcheck.files.border import Closed
from stackcheck.vendors import Vendor

FABRICATED_HOSTS = (
    "tests/faults/test_amd_hosts.py",
    "tests/faults/test_amd_readings.py",
    "tests/faults/test_nvidia_verdicts.py",
)
FAULTS = "tests/faults"
# They judge results by stackcheck, which no image has, and plant again what others plant.
JUDGED = (
    "tests/faults/test_amd_missing_calls.py",
    "tests/faults/test_amd_releases.py",
    "tests/faults/test_amd_whole_run.py",
    "tests/faults/test_first_amd_page.py",
    "tests/faults/test_first_host_file.py",
)
SUITE_PYTHON = "STACKCHECK_SUITE_PYTHON"  # as tests/faults/planting.py reads it
LINE = '{"checks": '
CAN_FAIL = ("failed", "invalid", "error")  # a fault that a skip answers does not show that a check can fail


class Planted(Closed, strict=True):
    """What a test planted, for which check, and the start of its failure message."""

    test: str
    name: str
    check: str
    vendor: Vendor
    reason: str | None


class Fault(Planted):
    """One planted fault, the check that must catch it, and the outcome which that check must have."""

    expected: Literal["failed", "invalid", "error", "skipped"]
    state: Literal["caught", "missed", "not run"]


class Healthy(Planted):
    """One run without a fault; a check that fails in it is a false alarm."""

    state: Literal["passed", "false alarm", "not run"]


class FaultRun(Closed, strict=True):
    """The line of JSON of one part."""

    checks: tuple[str, ...] | None  # all checks of the suites; null where they cannot be collected (no torch)
    faults: tuple[Fault, ...]
    healthy: tuple[Healthy, ...]  # the runs without a fault
    failed: tuple[str, ...]  # tests of tests/faults that plant nothing and failed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proof:
    """What all parts show together.

    Attributes:
        partial: Whether a pattern chose some of the tests; then healthy runs of the rest are not missed.
    """

    faults: tuple[Fault, ...]
    healthy: tuple[Healthy, ...]  # the runs without a fault
    failed: tuple[str, ...]  # tests of tests/faults that plant nothing and failed
    checks: tuple[str, ...]  # all checks of the suites
    unproven: tuple[str, ...]  # the checks for which no fault is planted
    partial: bool = False

    @property
    def caught(self) -> int:
        """How many faults were caught by their check."""
        return sum(fault.state == "caught" for fault in self.faults)

    @property
    def false_alarms(self) -> int:
        """In how many healthy runs a check failed."""
        return sum(run.state == "false alarm" for run in self.healthy)

    @property
    def holds(self) -> bool:
        """Whether every check was shown to fail, every fault was caught, and no healthy run failed."""
        quiet = all(run.state == "passed" for run in self.healthy) and not self.failed
        whole = bool(self.faults if self.partial else self.checks and self.healthy)
        complete = whole and not self.unproven
        return complete and quiet and self.caught == len(self.faults)


def in_torch(workers: int, *, quick: bool = False, only: str | None = None) -> tuple[str, ...]:
    """Python's arguments for the part that needs torch; `quick` leaves out the tests that are marked slow."""
    left_out = [word for path in (*FABRICATED_HOSTS, *JUDGED) for word in ("--ignore", path)]
    chosen = ("-m", "not slow") if quick else ()
    return ("-m", "pytest", FAULTS, *_options(workers), *left_out, *chosen, *_only(only))


def on_fabricated_hosts(workers: int, *, only: str | None = None) -> tuple[str, ...]:
    """Python's arguments for the part over fabricated hosts; the arguments as for `in_torch`."""
    return ("-m", "pytest", *FABRICATED_HOSTS, *_options(workers), *_only(only))


def _only(pattern: str | None) -> tuple[str, ...]:
    return (f"--only={pattern}",) if pattern else ()


def suite_python() -> str:
    """The Python of this host that has torch and pytest: STACKCHECK_SUITE_PYTHON, or else this one.

    Raises:
        ConfigurationError: The environment names a program that does not exist.
    """
    python = os.environ.get(SUITE_PYTHON, sys.executable)
    if shutil.which(python) is None:
        raise ConfigurationError(
            "the Python for the suites does not exist",
            where=SUITE_PYTHON,
            got=python or "an empty value",
            expected="the path of a Python that has torch and pytest",
            next_step=f"{SUITE_PYTHON}=/path/to/python stackcheck prove --here",
        )
    return python


def here(
    arguments: Sequence[str], *, root: Path, report: Callable[[str], None], python: str = sys.executable
) -> FaultRun:
    """Run one part on this host, and wait for it.

    Raises:
        ChecksFailedError: It ended without its line of JSON.
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
    """Run one part on this host while the body of the `with` runs a different one.

    The part over fabricated hosts mostly waits, the part that needs torch mostly computes.

    Yields:
        A function that waits for the end, reports the whole output, and returns the `FaultRun`. It raises
        ChecksFailedError if the part ended without its line of JSON.
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
    """A process that is terminated if the body raises."""
    with subprocess.Popen(
        command,
        cwd=root,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=output,
        stderr=subprocess.STDOUT,
        errors="replace",
    ) as process:
        try:
            yield process
        except BaseException:  # also Ctrl-C: no fault goes on without us
            process.terminate()  # pytest ends its own children, as on Ctrl-C
            raise


class FaultRunReader:
    """Reports each line of a part's output, and keeps the line of JSON."""

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
        """The line of JSON, at the end of the output; `where` is the command, for messages.

        Raises:
            ChecksFailedError: There was no such line, or it is malformed.
        """
        try:
            return FaultRun.model_validate_json(self._line)
        except ValidationError as error:
            raise ChecksFailedError(
                "the run of planted faults ended without its result",
                where=where,
                got="\n    ".join(self._last) or "no output",
                expected="one line of JSON at its end (tests/faults/proof.py)",
                next_step="fix what its last lines report, then run stackcheck prove again",
            ) from error


def join(parts: Sequence[FaultRun], only: str | None = None) -> Proof:
    """What several parts show together; `only` is the pattern that chose the tests, if one did."""
    faults = tuple(fault for part in parts for fault in part.faults)
    known = sorted({check for part in parts for check in part.checks or ()})
    checks = [check for check in known if only is None or fnmatch.fnmatchcase(check, f"*{only}*")]
    shown = {fault.check.partition("[")[0] for fault in faults if fault.expected in CAN_FAIL}
    return Proof(
        faults=faults,
        healthy=tuple(run for part in parts for run in part.healthy),
        failed=tuple(name for part in parts for name in part.failed),
        checks=tuple(checks),
        unproven=tuple(check for check in checks if check not in shown),
        partial=only is not None,
    )


def _options(workers: int) -> tuple[str, ...]:
    # A worker gets two tests at a time: from a longer list it would keep those behind a hang to itself.
    return "-q", "-n", str(workers), "--maxschedchunk", "2", "-p", "no:cacheprovider", "--proof"
