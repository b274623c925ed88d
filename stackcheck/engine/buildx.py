"""Run `docker buildx bake`, and read its log.

In: a bake definition as JSON. Out: counts of steps by target and stage. While it runs, each step gives one
short line of progress. A failure is an error with the step, its last lines and the line of the Dockerfile.
A build that only the builder's own deadline ended is run again. The images go where the outputs of the
definition name.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from stackcheck.engine import host_setup
from stackcheck.errors import BuildError, EngineError

TIMEOUT_S = 4 * 3600.0
# BuildKit writes its record of a build when every output is written, and fails the build if that takes over
# 20 s (300 s from 0.15 on), as it does on a busy disk: https://github.com/moby/buildkit/issues/3966
# It has such limits too where it asks its client for a context or a Dockerfile.
OWN_DEADLINE = re.compile(r"failed to solve: DeadlineExceeded: context deadline exceeded$")
TRIES = 3
# Text in the output of a failed step, what it means, and what to configure; the first match counts.
CAUSES = (
    (r"no space left on device", "the disk is full", "free space: docker builder prune"),
    (
        r"failed to resolve source metadata|pull access denied|failed to do request: (Head|Get)",
        "the base image's registry cannot be reached, or refuses",
        "docker login, or configure a registry mirror or proxy for the daemon",
    ),
    (
        r"No matching distribution found|Could not find a version|NewConnectionError|Max retries exceeded",
        "the package indexes that this host's pip uses lack a locked wheel, or cannot be reached",
        "configure pip's index-url, extra-index-url or find-links (pip config set global.…)",
    ),
    (
        r"Failed to fetch|Unable to locate package|Temporary failure resolving",
        "the distribution's archive lacks a package, or cannot be reached",
        "fix this host's apt sources: a base of the same distribution is built with them",
    ),
)
LAST_LINES = 20
_STEP = re.compile(r"^#(?P<number>\d+) (?P<text>.*)$")
# "[2/4] RUN …" of a lone stage, "[wheels 2/4] RUN …", and with several targets "[stage-wheels-01 wheels 2/4]
# RUN …". What has no number is the builder's own: reading a Dockerfile, loading a context.
_TITLE = re.compile(
    r"^\[(?:(?P<target>\S+) (?=\S+ \d+/))?(?P<place>(?:(?P<stage>\S+) )?\d+/\d+)\] (?P<what>.+)$"
)
_OUTPUT = re.compile(r"^\d+\.\d+ (?P<text>.*)$")
# "Dockerfile:12" and, from a remote or renamed file, "images/x/Dockerfile:12", alone on a line.
_PLACE = re.compile(r"^(?P<file>\S*[Dd]ockerfile\S*):(?P<line>\d+)$")
_PINNED = re.compile(r"@?sha256:[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BakeResult:
    """What a build did: the number of steps, and how many of them were cached.

    Attributes:
        stages: (Target, stage) -> its steps that ran, and those that were cached; a step that several targets
            share is counted once, for one of them. The target is "" where only one was built.
    """

    steps: int
    cached: int
    seconds: float
    stages: Mapping[tuple[str, str], tuple[int, int]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a build stopped."""

    stage: str | None  # stage and number of the step, "wheels 4/6", where the builder named one
    step: str | None
    file: str | None  # Dockerfile, as the builder names it
    line: int | None
    last_lines: tuple[str, ...]  # what the step wrote last
    message: str  # the builder's own sentence


def bake(
    definition: Mapping[str, Any],
    targets: Sequence[str],
    *,
    report: Callable[[str], None],
    log: Path | None = None,
    timeout_s: float = TIMEOUT_S,
) -> BakeResult:
    """Build targets of a bake definition.

    Raises:
        BuildError: A step failed (the message has its stage, last lines and place), or time ran out.
        EngineError: buildx is missing or the daemon stopped.
    """
    start = time.monotonic()
    ran: frozenset[str] = frozenset()
    with log.open("w", encoding="utf-8") if log else contextlib.nullcontext() as file:
        for attempt in range(1, TRIES + 1):
            seen = BuildLog(report, ran)
            code = _run(definition, targets, seen, file, start + timeout_s - time.monotonic())
            seconds = time.monotonic() - start
            if not code:
                return BakeResult(
                    steps=len(seen.steps),
                    cached=len(seen.cached & seen.steps),
                    seconds=seconds,
                    stages=seen.stages(),
                )
            if attempt == TRIES or seconds >= timeout_s or not seen.only_the_deadline():
                break
            report("the builder was too busy for its own time limit: again, from its cache")
            ran |= seen.ran()
    raise _error(seen, log, None if seconds < timeout_s else timeout_s)


def _run(
    definition: Mapping[str, Any],
    targets: Sequence[str],
    seen: BuildLog,
    log: TextIO | None,
    timeout_s: float,
) -> int:
    """Run the builder once; its exit code. What it prints goes to `seen` and to the log."""
    process = _spawn_bake(targets)
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    try:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended at once: its output has the reason
            process.stdin.write(json.dumps(definition))
            process.stdin.close()
        for line in process.stdout or ():
            seen.feed(line)
            if log:
                log.write(line)
        return process.wait(timeout=30)
    finally:
        timer.cancel()
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()


def platforms() -> tuple[str, ...]:
    """The platforms whose programs the builder can run, its own first.

    Raises:
        EngineError: buildx is missing or the daemon does not answer.
    """
    command = ["docker", "buildx", "inspect", "default", "--bootstrap"]
    done = subprocess.run(command, capture_output=True, errors="replace", check=False, timeout=60)
    found = re.search(r"^Platforms:\s+(.+)$", done.stdout, re.MULTILINE)
    if done.returncode or not found:
        raise EngineError("the builder does not list its platforms", got=(done.stderr or done.stdout)[-500:])
    return tuple(name.strip().rstrip("*") for name in found[1].split(","))


def _spawn_bake(targets: Sequence[str]) -> subprocess.Popen[str]:
    command = ["docker", "buildx", "bake", "--builder", "default", "--file", "-", "--progress", "plain"]
    command += ["--provenance=false", "--sbom=false", *targets]
    # Since 0.20 buildx refuses a definition that reads or writes outside the working folder, as this one does
    # secrets, wheels, layouts. This program wrote it, and older releases do not know the flag for a folder.
    environment = {**os.environ, "BUILDX_BAKE_ENTITLEMENTS_FS": "0"}
    try:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            errors="replace",
        )
    except OSError as error:
        raise host_setup.missing_engine(f"the docker client cannot be started: {error}") from error


def _error(seen: BuildLog, log: Path | None, ran_out_after_s: float | None) -> BuildError | EngineError:
    """Why the builder ended with an error."""
    if ran_out_after_s is not None:
        return BuildError(
            "the build took too long and was stopped", expected=f"at most {ran_out_after_s:.0f} s"
        )
    failure = seen.failure()
    if not host_setup.socket_answers():
        return EngineError(
            "the engine stopped in the middle of a build",
            got=failure.message,
            next_step="stackcheck doctor --fix, then the same command: finished steps are kept",
        )
    if seen.only_the_deadline():
        return BuildError(
            "the builder was too busy for its own time limit",
            got=f"{failure.message}, {TRIES} times",
            next_step="the same command when the host's disk is less busy: finished steps are kept",
        )
    text = "\n    ".join(failure.last_lines)
    place = f"{failure.file}:{failure.line}" if failure.file else None
    stage = f"stage {failure.stage}" if failure.stage else None
    cause = next((c for c in CAUSES if re.search(c[0], f"{text}\n{failure.message}")), None)
    return BuildError(
        cause[1] if cause else f"a build step failed: {failure.step or failure.message}",
        where=", ".join(part for part in (place, stage) if part) or None,
        got=f"{failure.message}; its last lines:\n    {text}",
        next_step=cause[2] if cause else f"read {log}" if log else None,
    )


class BuildLog:
    """Reads a build's output line by line.

    Args:
        report: Takes one short line for each step.
        ran: What `ran` of the runs before this one gave: their steps are cached now, but did run.
    """

    def __init__(self, report: Callable[[str], None], ran: frozenset[str] = frozenset()) -> None:
        self._report = report
        self._ran_before = ran
        self._titles: dict[str, str] = {}
        self._output: dict[str, collections.deque[str]] = {}
        self._failed: str | None = None
        self._place: tuple[str, int] | None = None
        self._tail: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        self._message = ""
        self.steps: set[str] = set()
        self.cached: set[str] = set()

    def stages(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(Target, stage; each "" where there is only one) -> steps that ran, and steps that were cached."""
        counted: dict[tuple[str, str], tuple[int, int]] = {}
        for number in self.steps:
            title = _TITLE.match(self._titles[number])
            assert title
            place = (title["target"] or "", title["stage"] or "")
            ran, cached = counted.get(place, (0, 0))
            hit = number in self.cached
            counted[place] = (ran + (not hit), cached + hit)
        return counted

    def ran(self) -> frozenset[str]:
        """The steps that ran, by place and text: "wheels 2/4 RUN …"."""
        return frozenset(self._name(number) for number in self.steps - self.cached)

    def only_the_deadline(self) -> bool:
        """Whether only the builder's own deadline ended the build, and no step of the Dockerfile failed."""
        failed = self._failed and _TITLE.match(self._titles[self._failed])
        return not failed and OWN_DEADLINE.search(self._message) is not None

    def feed(self, line: str) -> None:
        """Read one line."""
        line = line.rstrip()
        self._tail.append(line)
        match = _STEP.match(line)
        if match:
            self._feed_step(match["number"], match["text"])
        elif place := _PLACE.match(line.strip()):
            self._place = (place["file"], int(place["line"]))
        elif line.startswith("ERROR: "):
            self._message = line.removeprefix("ERROR: ")

    def failure(self) -> Failure:
        """The step, place and last output of a failed build, once the builder has ended with an error."""
        title = _TITLE.match(self._titles.get(self._failed or "", ""))
        output = self._output.get(self._failed or "", self._tail)
        return Failure(
            stage=title["place"] if title else None,
            step=title["what"] if title else self._titles.get(self._failed or ""),
            file=self._place[0] if self._place else None,
            line=self._place[1] if self._place else None,
            last_lines=tuple(output),
            message=self._message or (self._tail[-1] if self._tail else "the builder printed no error"),
        )

    def _name(self, number: str) -> str:
        title = _TITLE.match(self._titles[number])
        return f"{title['place']} {title['what']}" if title else self._titles[number]

    def _feed_step(self, number: str, text: str) -> None:
        if number not in self._titles:
            self._titles[number] = text
            self._output[number] = collections.deque(maxlen=LAST_LINES)
            if title := _TITLE.match(text):
                self.steps.add(number)
                self._report(_short(f"[{title['place']}] {title['what']}"))
        elif text == "CACHED":
            if self._name(number) not in self._ran_before:
                self.cached.add(number)
        elif text.startswith("ERROR"):
            self._failed = self._failed or number  # steps that need it fail later
            self._message = self._message or text
        elif output := _OUTPUT.match(text):
            self._output[number].append(output["text"])


def _short(text: str, width: int = 110) -> str:
    text = _PINNED.sub("", " ".join(text.split()))
    return text if len(text) <= width else text[: width - 1] + "…"
