"""`docker buildx bake` as a process: a definition in, progress lines while it runs, an error with its place.

In: a bake definition as JSON. Out: what was built and what was there already; the images are where the
definition's outputs say.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

from stackcheck import host_setup
from stackcheck.buildlog import BuildLog
from stackcheck.errors import BuildError, EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

TIMEOUT_S = 4 * 3600.0

# What a failed step says, what that means, and what to configure; the first that matches counts.
CAUSES = (
    (r"no space left on device", "the disk is full", "free space: docker builder prune"),
    (
        r"failed to resolve source metadata|pull access denied|failed to do request: (Head|Get)",
        "the base image's registry cannot be reached, or refuses",
        "docker login, or configure a registry mirror or proxy for the daemon",
    ),
    (
        r"No matching distribution found|Could not find a version|NewConnectionError|Max retries exceeded",
        "a wheel of the lock cannot be had from the package indexes that this host's pip names",
        "configure pip's index-url, extra-index-url or find-links (pip config set global.…)",
    ),
    (
        r"Failed to fetch|Unable to locate package|Temporary failure resolving",
        "a package cannot be had from the distribution's archive",
        "mend this host's apt sources; a base of the same distribution is built with them",
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BakeResult:
    """What a build did: steps in all, and those that were there already.

    Attributes:
        stages: (Target, stage) -> its steps that ran, and those that were there; a step that several targets
            share is counted once, for one of them. The target is "" where only one was built.
    """

    steps: int
    cached: int
    seconds: float
    stages: Mapping[tuple[str, str], tuple[int, int]] = dataclasses.field(default_factory=dict)


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
    seen = BuildLog(report)
    process = _spawn_bake(targets)
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    try:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended at once: its output says why
            process.stdin.write(json.dumps(definition))
            process.stdin.close()
        with log.open("w", encoding="utf-8") if log else contextlib.nullcontext() as file:
            for line in process.stdout or ():
                seen.feed(line)
                if file:
                    file.write(line)
        code = process.wait(timeout=30)
    finally:
        timer.cancel()
        _end(process)
    seconds = time.monotonic() - start
    if code:
        raise _error(seen, log, None if seconds < timeout_s else timeout_s)
    return BakeResult(
        steps=len(seen.steps),
        cached=len(seen.cached & seen.steps),
        seconds=seconds,
        stages=seen.stages(),
    )


def platforms() -> tuple[str, ...]:
    """The platforms whose programs the builder can run, its own first.

    Raises:
        EngineError: buildx is missing or the daemon does not answer.
    """
    command = ["docker", "buildx", "inspect", "default", "--bootstrap"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    found = re.search(r"^Platforms:\s+(.+)$", done.stdout, re.MULTILINE)
    if done.returncode or not found:
        raise EngineError(
            "the builder does not say what it can build", got=(done.stderr or done.stdout)[-500:]
        )
    return tuple(name.strip().rstrip("*") for name in found[1].split(","))


def _error(seen: BuildLog, log: Path | None, ran_out_after_s: float | None) -> BuildError | EngineError:
    """Why the builder ended with an error."""
    if ran_out_after_s is not None:
        return BuildError("the build did not end in time", expected=f"an end within {ran_out_after_s:.0f} s")
    failure = seen.failure()
    if not host_setup.socket_answers():
        return EngineError(
            "the engine stopped in the middle of a build",
            got=failure.message,
            next_step="stackcheck doctor --fix, then the same command: finished steps are kept",
        )
    text = "\n    ".join(failure.last_lines)
    place = f"{failure.file}:{failure.line}" if failure.file else None
    stage = f"stage {failure.stage}" if failure.stage else None
    cause = next((c for c in CAUSES if re.search(c[0], f"{text}\n{failure.message}")), None)
    return BuildError(
        cause[1] if cause else f"a build step failed: {failure.step or failure.message}",
        where=", ".join(part for part in (place, stage) if part) or None,
        got=f"{failure.message}; it wrote last:\n    {text}",
        next_step=cause[2] if cause else f"read {log}" if log else None,
    )


def _spawn_bake(targets: Sequence[str]) -> subprocess.Popen[str]:
    command = ["docker", "buildx", "bake", "--builder", "default", "--file", "-", "--progress", "plain"]
    command += ["--provenance=false", "--sbom=false", *targets]
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise host_setup.missing_engine(f"the docker client cannot be started: {error}") from error


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
