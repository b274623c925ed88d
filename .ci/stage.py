"""Run one stage of the tests and say in one line how it ended. In: `[--closing PATTERN] NAME COMMAND…`,
`--start`, or `--summary TITLE CODE`.

A stage's output goes to build/logs/; a failure shows its last lines, the command that repeats it and the log.
The one line ends with the last line of pytest, else with what the pattern matches, else with the last line.
Out: the exit code of the command. `--summary` prints in one line what all stages since `--start` ran, and
exits with 1 where one of them failed or did not run.

Beside the time by the clock stands the processor time of the stage's own processes, which other work on the
machine does not change much. What runs in a container is a child of the Docker daemon and is not in it; the
summary says how long all processors of the machine worked, with the daemon and whatever else ran.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import IO

LOGS = Path(__file__).resolve().parents[1] / "build" / "logs"
RECORD = LOGS / "stages.jsonl"
PROCESSORS = Path("/proc/stat")  # of Linux alone
CLOSING = re.compile(r"\b\d+ (?:passed|failed|skipped|errors?|deselected|xfailed)\b.* in [\d.]+s")
COUNT = re.compile(r"\b(\d+) (passed|failed|skipped|error)s?\b")
BAD = re.compile(r"^(FAILED|ERROR|error:|missed:|false alarm:|failed:) ?")
SHOWN_LINES = 20


def run(name: str, command: list[str], pattern: str | None = None) -> int:
    """Run a stage to its end and record it."""
    log = LOGS / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.log"
    LOGS.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    # A signal reaches the whole process group: the command cleans up and ends, and this waits for it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    with log.open("wb") as file:
        code = ended(command, file)
    seconds = time.monotonic() - begin
    cpu = cpu_of_children()
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    counts = counted(lines)
    with RECORD.open("a", encoding="utf-8") as file:
        record = {"name": name, "code": code, "seconds": seconds, "cpu_seconds": cpu, "counts": counts}
        file.write(json.dumps(record) + "\n")
    times = f"{spoken(seconds):>12}  cpu {spoken(cpu):>12}"
    line = f"{'ok' if code == 0 else 'FAILED':<7} {name:<28} {times}  {closing(lines, pattern)}"
    print(line.rstrip(), flush=True)
    if code:
        explain(command, code, log, lines)
    return code


def ended(command: list[str], log: IO[bytes]) -> int:
    """The exit code of a command, as a shell says it."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, check=False
        )
    except OSError as error:
        log.write(f"error: {error}\n".encode())
        return 127
    return done.returncode if done.returncode >= 0 else 128 - done.returncode


def cpu_of_children() -> float:
    """Processor seconds of the command and of each process below it that was waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def cpu_of_machine() -> float | None:
    """Processor seconds of everything since the machine started; None where the system does not say."""
    if not PROCESSORS.is_file():
        return None
    user, nice, system, _idle, _waiting, *interrupts = map(
        int, PROCESSORS.read_text().split("\n")[0].split()[1:8]
    )
    return sum((user, nice, system, *interrupts)) / os.sysconf("SC_CLK_TCK")


def explain(command: list[str], code: int, log: Path, lines: list[str]) -> None:
    """What a failure needs: the lines that name it, the command that repeats it, and the log."""
    named = [line for line in lines if BAD.match(line)] or [line for line in lines if line.strip()]
    shown = "".join(f"    {line}\n" for line in named[-SHOWN_LINES:])
    repeat = shlex.join(command)
    print(
        f"{shown}  exit code {code}\n  repeat: {repeat}\n  log: {log.relative_to(LOGS.parents[1])}",
        flush=True,
    )


def closing(lines: list[str], pattern: str | None) -> str:
    """The closing line of pytest, or what the pattern matches, or the last line there is."""
    ends = [line.strip("= ") for line in lines if CLOSING.search(line)]
    if pattern and not ends:
        matches = [match[0] for line in lines if (match := re.search(pattern, line))]
        ends = [" ".join(match.split()) for match in matches]
    spoken_last = [line.strip() for line in lines if line.strip()]
    return " + ".join(ends) or (spoken_last[-1] if spoken_last else "")


def counted(lines: list[str]) -> dict[str, int]:
    """How many tests passed, failed and were skipped, by the closing lines of pytest."""
    total: Counter[str] = Counter()
    for line in lines:
        if CLOSING.search(line):
            for number, word in COUNT.findall(line):
                total["failed" if word == "error" else word] += int(number)
    return dict(total)


def summary(title: str, ended: int) -> int:
    """One line on every stage since the start; `ended` is the exit code of all that ran."""
    stages = [json.loads(line) for line in RECORD.read_text(encoding="utf-8").splitlines()]
    began, *stages = stages
    total = sum((Counter(stage["counts"]) for stage in stages), Counter[str]())
    failed = [stage["name"] for stage in stages if stage["code"]]
    tests = ", ".join(f"{total[word]} {word}" for word in ("passed", "failed", "skipped"))
    took = spoken(time.time() - began["began"]) + worked(began["cpu_seconds"])
    if failed:
        how = f"FAILED: {', '.join(failed)}"
    else:
        how = "ok" if stages and not ended else "FAILED: not every stage ran"
    print(f"{title}: {how}; {len(stages)} stages in {took}; tests: {tests}", flush=True)
    return how != "ok"


def worked(before: float | None) -> str:
    """How long the machine's processors worked since then, in parentheses; "" where it is not known."""
    now = cpu_of_machine()
    return "" if now is None or before is None else f" (the machine's processors: {spoken(now - before)})"


def start() -> int:
    """Forget earlier stages."""
    LOGS.mkdir(parents=True, exist_ok=True)
    began = {"began": time.time(), "cpu_seconds": cpu_of_machine()}
    RECORD.write_text(json.dumps(began) + "\n", encoding="utf-8")
    return 0


def spoken(seconds: float) -> str:
    """Minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--start"]:
            sys.exit(start())
        case ["--summary", title, ended]:
            sys.exit(summary(title, int(ended)))
        case ["--closing", pattern, stage, *words] if words:
            sys.exit(run(stage, words, pattern))
        case [stage, *words] if words:
            sys.exit(run(stage, words))
        case _:
            sys.exit(__doc__)
