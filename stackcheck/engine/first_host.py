"""The first hour on a host: docs/guides/first-amd-host.md step by step, and one file of what they saw.

In: a stack. Out: a `StepRecord` of each step until the first surprise, and `document`, which has no serial
numbers, UUIDs, names of hosts and users, or network addresses. The tests make a host of its files
(fakeamd/recorded.py). A verdict against which only missing or derived bounds stand is no surprise: the steps
that follow measure the bounds of this machine.
"""

import dataclasses
import json
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stackcheck import __version__, vendors
from stackcheck.errors import ChecksFailedError, MachineUnfitError
from stackcheck.files import users

RUNS = 3
OF_A_VERDICT = (ChecksFailedError.exit_code, MachineUnfitError.exit_code)
LINES = 200  # of a step's output
SHORTEST = 4  # of a name that is replaced: a host called "gpu" would take the word out of every sentence
# Values of a result that a verdict rests on; none of them can have an identity.
JUDGED = frozenset(
    {"software", "devices", "inputs", "image", "id", "stack_id", "run_id", "driver", "metrics"}
)
HEX, ENDS = "[0-9a-fA-F]", r"(?!\w|:[0-9a-fA-F])"
PRIVATE = (
    re.compile(r"(?<![\w.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?!\w|\.\d)"),
    re.compile(rf"(?<![\w:])(?:{HEX}{{2}}:){{5}}{HEX}{{2}}{ENDS}"),
    re.compile(rf"(?<![\w:])(?:{HEX}{{1,4}}:){{7}}{HEX}{{1,4}}{ENDS}"),
    re.compile(rf"(?<![\w:])(?:{HEX}{{1,4}}:)+(?::{HEX}{{1,4}})+{ENDS}"),
    re.compile(rf"(?:GPU-)?{HEX}{{8}}(?:-{HEX}{{4}}){{3}}-{HEX}{{12}}"),
    re.compile(rf"GPU-{HEX}{{16}}"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageStep:
    """A step: its number on the page, the arguments of stackcheck, and the result that it leaves."""

    number: int
    arguments: tuple[str, ...]
    result: Path | None = None
    kept: Path | None = None  # where the result goes, as the next run replaces it
    verdict: Path | None = None  # what the command says of the run

    @property
    def moves(self) -> Mapping[Path, Path]:
        """What a run leaves -> where it is kept."""
        if not (self.result and self.kept and self.verdict):
            return {}
        return {self.result: self.kept, self.result.parents[1] / "verdict.json": self.verdict}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What a step did; `only_bounds`: nothing but missing or derived bounds made it end so."""

    number: int
    arguments: tuple[str, ...]
    exit_code: int
    output: str
    only_bounds: bool = False

    @property
    def is_surprise(self) -> bool:
        """Whether the hour ends here."""
        return bool(self.exit_code) and not self.only_bounds


def steps(stack: str, root: Path) -> tuple[PageStep, ...]:
    """What the page says to type for a stack; what needs a choice (waivers, a commit, a key) is left out."""
    result = root / "build" / stack / "run" / "result.json"
    kept = [root / "build" / f"first-host-{number}.json" for number in range(1, RUNS + 1)]
    said = [path.with_suffix(".verdict.json") for path in kept]
    return (
        PageStep(number=1, arguments=("doctor",)),
        PageStep(number=4, arguments=("explain", stack)),
        PageStep(number=5, arguments=("lock", stack)),
        PageStep(number=6, arguments=("build", stack)),
        *(
            PageStep(number=7, arguments=("test", stack), result=result, kept=path, verdict=verdict)
            for path, verdict in zip(kept, said, strict=True)
        ),
        PageStep(number=8, arguments=("judge", str(kept[0]), "--stack", stack), verdict=said[0]),
        PageStep(number=9, arguments=("baseline", *map(str, kept))),
    )


def follow(wanted: Iterable[PageStep], root: Path, show: Callable[[str], object]) -> Iterator[StepRecord]:
    """Take the steps in turn, each as a command of its own, until the first surprise."""
    for step in wanted:
        show(f"\nstep {step.number}: stackcheck {' '.join(step.arguments)}\n")
        for old in (*step.moves, *step.moves.values()):
            old.unlink(missing_ok=True)  # of an earlier hour
        code, output = _run((*step.arguments, "--root", str(root)), show)
        for left, kept in step.moves.items():
            if left.exists():
                shutil.copy(left, kept)
        record = StepRecord(
            number=step.number,
            arguments=step.arguments,
            exit_code=code,
            output=output,
            only_bounds=code in OF_A_VERDICT and _lacks_only_bounds(step.verdict),
        )
        yield record
        if record.is_surprise:
            return


def _lacks_only_bounds(verdict: Path | None) -> bool:
    return bool(verdict and verdict.exists() and json.loads(verdict.read_bytes())["only_bounds"])


def document(done: Sequence[StepRecord], wanted: Iterable[PageStep]) -> dict[str, Any]:
    """What a user can attach to an issue; the kernel's files are read last, as reading clears some errors."""
    files, identities = vendors.kernel_record()
    words = tuple({*identities, *_names()})
    kept = [step.kept for step in wanted if step.kept and step.kept.exists()]
    results = [json.loads(path.read_text(encoding="utf-8")) for path in kept]
    return {
        "schema": 1,
        "stackcheck": __version__,
        "kernel": platform.release(),
        "steps": [private(dataclasses.asdict(record), words) for record in done],
        "surprise": done[-1].number if done and done[-1].is_surprise else None,
        "results": [private(result, words) for result in results],
        "kernel_files": dict(files),
    }


def private(value: Any, words: Sequence[str]) -> Any:
    """The value without identities: `words` of this host, and whatever has the form of one."""
    if isinstance(value, dict):
        return {name: one if name in JUDGED else private(one, words) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [private(one, words) for one in value]
    if not isinstance(value, str):
        return value
    for word in sorted(words, key=len, reverse=True):
        value = re.sub(rf"(?<![\w]){re.escape(word)}(?![\w])", "REMOVED", value)
    for form in PRIVATE:
        value = form.sub("REMOVED", value)
    return value


def _names() -> Iterator[str]:
    """The names of this host, its user and the user's folder."""
    name = socket.gethostname()
    found = (name, name.partition(".")[0], platform.node(), users.name(), str(users.home()))
    yield from (one for one in found if len(one) >= SHORTEST and one not in {"root", "/root", "localhost"})


def _run(arguments: Sequence[str], show: Callable[[str], object]) -> tuple[int, str]:
    command = (sys.executable, "-m", "stackcheck", *arguments)
    lines: list[str] = []
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace"
    ) as process:
        for line in process.stdout or ():
            show(line)
            lines.append(line)
    return process.returncode, "".join(lines[-LINES:])
