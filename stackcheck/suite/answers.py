"""The answer of a short program in an image. In: its container. Out: its exit code and lines.

The engine waits 2 s for the last output of a container that has ended, then drops the rest (moby,
daemon/monitor.go). So on a busy host an answer may lose its end, or be empty, beside exit code 0.
"""

import dataclasses
from collections.abc import Callable, Sequence

from stackcheck.engine.client import Engine
from stackcheck.engine.container import RunSpec

TRIES = 3


def ask(engine: Engine, spec: RunSpec, is_complete: Callable[[Sequence[str]], bool]) -> tuple[int, list[str]]:
    """Run a container, again if it ended with 0 and an answer that is not complete; the last run's answer."""
    for _ in range(TRIES):
        lines: list[str] = []
        code = engine.run(dataclasses.replace(spec, on_line=lines.append))
        if code or is_complete(lines):
            break
    return code, lines
