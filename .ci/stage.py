"""Run one stage of the tests and say in one line how it ended. In: `[--closing PATTERN] NAME COMMAND…`.

The output goes to build/logs/; a failure shows its last lines, the command that repeats it and the log. The
line ends with the counts of pytest, else with what the pattern matches, else with the last line of output.
`{folder}` in a command is a new folder, which goes when the stage passed; `{memory}` is one in memory, where
there is enough of it.
Out: the exit code of the command. STACKCHECK_TESTS_END is a time in seconds since 1970: what has not ended by
then is ended and named, and failed only if a test of it had. `--summary TITLE CODE SECONDS` says in one line
what all recorded stages ran, and exits with 1 where one of them failed or CODE says that not every stage ran.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / "build" / "logs"
RECORD = LOGS / "stages.jsonl"
CLOSING = re.compile(r"\b\d+ (?:passed|failed|skipped|errors?|deselected|xfailed)\b.* in [\d.]+s")
COUNT = re.compile(r"\b(\d+) (passed|failed|skipped|error)s?\b")
# A line of pytest's progress with a test that did not pass.
PROGRESS = re.compile(r"^[.sxX]*[FE][.sxXFE]*( +\[ *\d+%\])?$")
BAD = re.compile(r"^(FAILED|ERROR|error:|missed:|false alarm:|failed:) ?")
SHOWN_LINES = 20
END, STOPPING_S = "STACKCHECK_TESTS_END", 120
LEFT = -1  # what `ended` gives for a command that the clock ended
SHARED, LEAST_FREE_BYTES = Path("/dev/shm"), 4 << 30  # a container's is 64 MB


def run(name: str, command: list[str], pattern: str | None = None) -> int:
    """Run a stage to its end, record it and print its line."""
    log = LOGS / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.log"
    folder = tempfile.mkdtemp(prefix="stage-", dir=in_memory() if "{memory}" in command else None)
    command = [folder if word in {"{folder}", "{memory}"} else word for word in command]
    begin = time.monotonic()
    code = ended(command, log)
    if code == 0:
        shutil.rmtree(folder, ignore_errors=True)
    seconds = time.monotonic() - begin
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    left = code == LEFT
    code = 0 if left else code
    counts: Counter[str] = Counter()
    for line in filter(CLOSING.search, lines):
        counts += Counter({word: int(number) for number, word in COUNT.findall(line)})
    with RECORD.open("a", encoding="utf-8") as file:
        told = {"name": name, "code": code, "left": left, "seconds": seconds, "counts": counts}
        file.write(json.dumps(told) + "\n")
    matches = [
        " ".join(match[0].split()) for line in lines if pattern and (match := re.search(pattern, line))
    ]
    closing = (
        spoken(counts) or " + ".join(matches) or next((line for line in reversed(lines) if line.strip()), "")
    )
    how = "left" if left else "FAILED" if code else "ok"
    text = f"{how:<7} {name:<28} {seconds:>6.0f} s  {closing}\n"
    if code:
        named = [line for line in lines if BAD.match(line)] or [line for line in lines if line.strip()]
        text += "".join(f"    {line}\n" for line in named[-SHOWN_LINES:])
        text += f"  exit code {code}\n  repeat: {shlex.join(command)}\n  log: {log.relative_to(ROOT)}\n"
    sys.stdout.write(text)
    return code


def has_failed(log: Path, since: float) -> bool:
    """Whether a test had failed, by what a stage said, and its parts in the folder of the log's name."""
    parts = [part for part in log.with_suffix("").glob("*.log") if part.stat().st_mtime >= since]
    lines = "\n".join(one.read_text(encoding="utf-8", errors="replace") for one in (log, *parts))
    return any(BAD.match(line) or PROGRESS.match(line) for line in lines.splitlines())


def in_memory() -> Path | None:
    """Where files are in memory, programs may start, and a stage finds room."""
    if not SHARED.is_dir():
        return None
    found = os.statvfs(SHARED)
    fits = found.f_bavail * found.f_frsize >= LEAST_FREE_BYTES and not found.f_flag & os.ST_NOEXEC
    return SHARED if fits else None


def ended(command: list[str], log: Path) -> int:
    """The exit code, as a shell says it; `LEFT` if the time was over and no test had failed by then.

    What ends this interrupts the whole command, once: it cleans up.
    """
    running: list[int] = []

    def stop(_number: int = 0, _frame: object = None) -> None:
        while running:
            os.killpg(running.pop(), signal.SIGINT)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    limit_s = time_left()
    if limit_s is not None and limit_s <= 0:
        log.write_text("it did not begin\n", encoding="utf-8")
        return LEFT
    begin = time.time()
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["env", *command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        running.append(process.pid)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            # What it says of its interruption is no failure.
            said, failed = log.read_bytes(), has_failed(log, begin)
            stop()
            try:
                process.wait(STOPPING_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            log.write_bytes(said)
            return int(failed) or LEFT
    running.clear()
    return code if code >= 0 else 128 - code


def time_left() -> float | None:
    """Seconds until the time by which all has to end; None if there is none."""
    given = os.environ.get(END)
    if given is not None and not given.isdigit():
        sys.exit(f"error: {END} is {given!r}, expected seconds since 1970; next: $(($(date +%s) + 4800))")
    return None if given is None else int(given) - time.time()


def summary(title: str, code: int, seconds: int) -> int:
    """Print one line about every recorded stage."""
    stages = [json.loads(line) for line in RECORD.read_text(encoding="utf-8").splitlines()]
    failed = ", ".join(stage["name"] for stage in stages if stage["code"])
    left = ", ".join(stage["name"] for stage in stages if stage["left"])
    bad = bool(failed or code)
    how = f"FAILED: {failed or 'not every stage ran'}" if bad else "ok"
    how += f"; there was no time to end: {left}" if left else ""
    total = sum((Counter(stage["counts"]) for stage in stages), Counter[str]())
    took = f"{seconds // 60} min {seconds % 60:02} s"
    print(f"{title}: {how}; {len(stages)} stages in {took}; tests: {spoken(total)}", flush=True)
    return bad


def spoken(counts: Counter[str]) -> str:
    """How tests ended, in words; nothing for no test."""
    return ", ".join(
        f"{counts[word]} {word}" for word in ("passed", "failed", "error", "skipped") if counts[word]
    )


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--summary", title, code, seconds]:
            sys.exit(summary(title, int(code), int(seconds)))
        case ["--closing", pattern, stage, *words] if words:
            sys.exit(run(stage, words, pattern))
        case [stage, *words] if words:
            sys.exit(run(stage, words))
        case _:
            sys.exit(__doc__)
