"""The first hour on a host: docs/guides/first-amd-host.md step by step, and one file of what they saw.

In: a stack. Out: a `StepRecord` of each step until the first surprise, and `document`, which has no serial
numbers, UUIDs, names of hosts and users, or network addresses. The tests make a host of its files
(fakeamd/recorded.py).
"""

from __future__ import annotations

import dataclasses
import getpass
import json
import platform
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stackcheck import __version__, vendors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

RUNS = 3
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What a step did."""

    number: int
    arguments: tuple[str, ...]
    exit_code: int
    output: str


def steps(stack: str, root: Path) -> tuple[PageStep, ...]:
    """What the page says to type for a stack; what needs a choice (waivers, a commit, a key) is left out."""
    result = root / "build" / stack / "run" / "result.json"
    kept = [root / "build" / f"first-host-{number}.json" for number in range(1, RUNS + 1)]
    return (
        PageStep(number=1, arguments=("doctor",)),
        PageStep(number=4, arguments=("explain", stack)),
        PageStep(number=5, arguments=("lock", stack)),
        PageStep(number=6, arguments=("build", stack)),
        *(PageStep(number=7, arguments=("test", stack), result=result, kept=path) for path in kept),
        PageStep(number=8, arguments=("judge", str(kept[0]), "--stack", stack)),
        PageStep(number=9, arguments=("baseline", *map(str, kept))),
    )


def follow(wanted: Iterable[PageStep], root: Path, show: Callable[[str], object]) -> Iterator[StepRecord]:
    """Take the steps in turn, each as a command of its own, until one does not end well."""
    for step in wanted:
        show(f"\nstep {step.number}: stackcheck {' '.join(step.arguments)}\n")
        for old in filter(None, (step.result, step.kept)):
            old.unlink(missing_ok=True)  # of an earlier hour
        code, output = _run((*step.arguments, "--root", str(root)), show)
        if step.result and step.kept and step.result.exists():
            shutil.copy(step.result, step.kept)
        yield StepRecord(number=step.number, arguments=step.arguments, exit_code=code, output=output)
        if code:
            return


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
        "surprise": done[-1].number if done and done[-1].exit_code else None,
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
    found = (name, name.partition(".")[0], platform.node(), getpass.getuser(), str(Path.home()))
    yield from (one for one in found if len(one) >= SHORTEST and one not in {"root", "/root", "localhost"})


def _run(arguments: Sequence[str], show: Callable[[str], object]) -> tuple[int, str]:
    command = (sys.executable, "-m", "stackcheck", *arguments)
    lines: list[str] = []
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            show(line)
            lines.append(line)
    return process.returncode, "".join(lines[-LINES:])
