"""What `docker buildx bake --progress=plain` prints, read while it is printed.

In: lines. Out: one short line a step for progress, counts of steps by target and stage, and for a failure
the step, its last lines and the Dockerfile's line.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

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
class Failure:
    """Why a build stopped.

    Attributes:
        stage: Stage and number of the step, "wheels 4/6", where the builder named one.
        step: The step's text.
        file: Dockerfile, as the builder names it.
        line: Line in it.
        last_lines: What the step wrote last.
        message: The builder's own sentence.
    """

    stage: str | None
    step: str | None
    file: str | None
    line: int | None
    last_lines: tuple[str, ...]
    message: str


class BuildLog:
    """Reads a build's output line by line."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._titles: dict[str, str] = {}
        self._output: dict[str, collections.deque[str]] = {}
        self._failed: str | None = None
        self._place: tuple[str, int] | None = None
        self._tail: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        self._message = ""
        self.steps: set[str] = set()
        self.cached: set[str] = set()

    def stages(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(Target, stage; each "" where there is only one) -> steps that ran, and steps that were there."""
        counted: dict[tuple[str, str], tuple[int, int]] = {}
        for number in self.steps:
            title = _TITLE.match(self._titles[number])
            assert title
            place = (title["target"] or "", title["stage"] or "")
            ran, cached = counted.get(place, (0, 0))
            hit = number in self.cached
            counted[place] = (ran + (not hit), cached + hit)
        return counted

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
        """What is known of the failure, once the builder has ended with an error."""
        title = _TITLE.match(self._titles.get(self._failed or "", ""))
        output = self._output.get(self._failed or "", self._tail)
        return Failure(
            stage=title["place"] if title else None,
            step=title["what"] if title else self._titles.get(self._failed or ""),
            file=self._place[0] if self._place else None,
            line=self._place[1] if self._place else None,
            last_lines=tuple(output),
            message=self._message or (self._tail[-1] if self._tail else "the builder said nothing"),
        )

    def _feed_step(self, number: str, text: str) -> None:
        if number not in self._titles:
            self._titles[number] = text
            self._output[number] = collections.deque(maxlen=LAST_LINES)
            if title := _TITLE.match(text):
                self.steps.add(number)
                self._report(_short(f"[{title['place']}] {title['what']}"))
        elif text == "CACHED":
            self.cached.add(number)
        elif text.startswith("ERROR"):
            self._failed = self._failed or number  # what was built upon it fails after it
            self._message = self._message or text
        elif output := _OUTPUT.match(text):
            self._output[number].append(output["text"])


def _short(text: str, width: int = 110) -> str:
    text = _PINNED.sub("", " ".join(text.split()))
    return text if len(text) <= width else text[: width - 1] + "…"
