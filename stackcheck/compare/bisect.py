"""Which component breaks a check. In: two stacks of the matrix, one check. Out: a `SearchResult`.

Each mixed stack is locked, built and run like any stack, in `build/bisect/`, which looks like a checkout;
nothing is written to `images/`. Each answer is kept in a file, so that a search that was interrupted goes on
with the first image that it has not run.

The steps between the two are applied in order, and the search halves the range in which the answer changes.
The step that it finds is then applied alone: if that passes, an earlier step is needed as well.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from stackcheck import flow
from stackcheck.compare.mixed_stacks import Between, Component
from stackcheck.engine.client import Engine
from stackcheck.errors import BuildError, ConfigurationError, MachineUnfitError
from stackcheck.files.atomic import write_atomically
from stackcheck.imaging import build
from stackcheck.matrix import compat, known_issues, matrix, resolve
from stackcheck.matrix import pins as pinned
from stackcheck.policy import Tier
from stackcheck.recipe import lock, render
from stackcheck.recipe.upstream import Upstream
from stackcheck.suite import run
from stackcheck.suite import subject as subjects
from stackcheck.suite.judged import measure

FOLDER = Path("build") / "bisect"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tried:
    """One image that was asked."""

    steps: Steps  # which steps it takes from the bad stack
    outcome: Outcome  # how the check ended in it
    why: str = ""  # why the outcome is unknown, if it is
    new: bool = True  # whether it was run now, and not by an earlier call


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchResult:
    """What the search found, and every image that it asked, in that order."""

    culprit: Culprit
    steps: tuple[tuple[Component, ...], ...]
    tried: tuple[Tried, ...]

    def named(self, numbers: Sequence[int]) -> str:
        """Steps in words."""
        return " and ".join(", ".join(each.words for each in self.steps[number]) for number in numbers)


def between(root: Path, good: str, bad: str) -> Between:
    """What lies between two stacks of a checkout."""
    return Between(
        matrix.load_matrix(root / "matrix.yaml"),
        compat.load_rules(root / "images" / "compat.yaml"),
        known_issues.load_known_issues(root / "images" / "known-issues.yaml"),
        good,
        bad,
    )


class Search:
    """One search, which may have begun earlier.

    Args:
        good: The id of the stack in which the check passes.
        settings: What the user chose; `force` forgets what an earlier call found.
        engine: Builds and runs.
        tier: How thorough the suites are: the check must be in it.
        upstream: Asks registries and release pages.
    """

    def __init__(
        self,
        good: str,
        bad: str,
        check: str,
        settings: flow.FlowSettings,
        engine: Engine,
        *,
        tier: Tier,
        upstream: Upstream,
        report: Callable[[str], None],
    ) -> None:
        self._ends, self._check, self._settings = (good, bad), check, settings
        self._engine, self._tier, self._upstream, self._report = engine, tier, upstream, report
        self._between = between(settings.root, good, bad)
        self._steps = self._between.steps()
        self._tried: list[Tried] = []
        words = [[each.words for each in step] for step in self._steps]
        self._about = {"schema": 1, "good": good, "bad": bad, "check": check, "tier": tier, "steps": words}
        name = hashlib.sha256(json.dumps(self._about).encode()).hexdigest()[:12]
        self._file = settings.root / FOLDER / f"{name}.json"
        self._known = {} if settings.force else self._load()

    def run(self) -> SearchResult:
        """Search to the end.

        Raises:
            MachineUnfitError: The check found the machine unfit; call again on a healthy one.
            BuildError: One of the two ends cannot be built.
        """
        self._report(f"{len(self._steps)} steps between {self._ends[0]} and {self._ends[1]}")
        culprit = walk(len(self._steps), self._ask)
        return SearchResult(culprit=culprit, steps=self._steps, tried=tuple(self._tried))

    def _ask(self, steps: Steps) -> Outcome:
        if steps in self._known:
            tried = self._known[steps]
        else:
            tried = self._told(steps)
            self._known[steps] = tried
            self._save()
        self._tried.append(tried)
        self._report(f"{self._words(steps)}: the check {tried.outcome}{tried.why and f' ({tried.why})'}")
        return tried.outcome

    def _told(self, steps: Steps) -> Tried:
        """Build the image of some steps, and run the check in it."""
        whole = len(steps) in {0, len(self._steps)}
        try:
            subject = self._end(steps) if whole else self._mixed(steps)
        except (BuildError, ConfigurationError) as error:
            if whole:
                raise
            return Tried(
                steps=steps, outcome="unknown", why=f"{error.what}: {error.got or error.where or ''}"
            )
        out = self._settings.root / FOLDER / subject.name
        plan = run.plan(subject, tier=self._tier, root=self._settings.root, out=out)
        # Pytest's -k for one check: its file, and its name.
        file, _, name = self._check.partition("::")
        only = f"{file} and {name}"
        result = measure(plan, self._engine, out=out, report=lambda _line: None, only=only)
        found = next((each for each in result.checks if each.id == self._check), None)
        if found is None or found.outcome == "skipped":
            why = (found.reason if found else None) or "the check did not run"
            return Tried(steps=steps, outcome="unknown", why=why)
        if found.outcome == "invalid":
            raise MachineUnfitError(
                "the machine was unfit, so nothing is told of this image",
                where=subject.name,
                got=found.reason or self._check,
                expected="an idle and healthy machine",
                next_step="run the same command again there: it goes on from here",
            )
        return Tried(steps=steps, outcome="passes" if found.outcome == "passed" else "fails")

    def _end(self, steps: Steps) -> subjects.Subject:
        name = self._ends[1] if steps else self._ends[0]
        (stack,) = resolve.load_stacks(self._settings.root, (name,))
        return flow.build_subject(stack, self._engine, self._settings, self._report)

    def _mixed(self, steps: Steps) -> subjects.Subject:
        taken = [each for number in sorted(steps) for each in self._steps[number]]
        place = scratch(self._settings.root)
        stack = self._between.stack(taken)
        done = lock.lock(stack, place / "images", self._upstream)
        if done.missing:
            raise BuildError("it cannot be locked here", got="; ".join(done.missing))
        stack = self._between.stack(taken, pinned.read_pins(place))
        render.write((stack,), place / "images")
        options = self._settings.build
        (image,) = build.build((stack,), self._engine, root=place, report=self._report, options=options)
        policy = matrix.load_matrix(self._settings.root / "matrix.yaml").policy
        return subjects.of_stack(stack, image, policy, vendor=self._settings.vendor)

    def _words(self, steps: Steps) -> str:
        if not steps:
            return self._ends[0]
        if len(steps) == len(self._steps):
            return self._ends[1]
        taken = [each.words for number in sorted(steps) for each in self._steps[number]]
        return f"{self._ends[0]} with {', '.join(taken)}"

    def _load(self) -> dict[Steps, Tried]:
        """What an earlier call found; a damaged file is as good as none."""
        try:
            document: dict[str, Any] = json.loads(self._file.read_bytes())
            if {name: document[name] for name in self._about} != self._about:
                return {}
            found = [_tried(each) for each in document["tried"]]
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        return {each.steps: each for each in found}

    def _save(self) -> None:
        tried = [
            {"steps": sorted(each.steps), "outcome": each.outcome, "why": each.why}
            for each in self._known.values()
        ]
        body = json.dumps({**self._about, "tried": tried}, indent=2).encode()
        write_atomically(self._file, (body,))


def scratch(root: Path) -> Path:
    """A folder that looks like a checkout, for the images of mixed stacks: the templates, and the same bases.

    Raises:
        OSError: It cannot be made.
    """
    place = root / FOLDER / "checkout"
    (place / "build").mkdir(parents=True, exist_ok=True)
    (place / "images").mkdir(exist_ok=True)
    (root / "build" / "bases").mkdir(parents=True, exist_ok=True)
    bases = place / "build" / "bases"
    if not bases.is_symlink():
        bases.symlink_to(root / "build" / "bases")
    for path in (root / "images").iterdir():
        if path.is_file():
            shutil.copy(path, place / "images")
        elif not (path / "stack.json").exists():
            shutil.copytree(path, place / "images" / path.name, dirs_exist_ok=True)
    shutil.copy(root / "matrix.yaml", place)
    return place


def _tried(kept: dict[str, Any]) -> Tried:
    if kept["outcome"] not in get_args(Outcome):
        raise ValueError(kept["outcome"])
    outcome = cast("Outcome", kept["outcome"])
    return Tried(steps=frozenset(map(int, kept["steps"])), outcome=outcome, why=str(kept["why"]), new=False)


Outcome = Literal["passes", "fails", "unknown"]
Steps = frozenset[int]
Kind = Literal["good fails", "bad passes", "one", "together", "one of", "more"]


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """What the search found.

    Attributes:
        kind: `one`: one step alone breaks it. `together`: two steps do, and neither of them alone. `one of`:
            one of several steps, between which nothing can be tested. `more`: a step that needs several
            others.
            `good fails` and `bad passes`: the ends are not what they were said to be.
    """

    kind: Kind
    steps: tuple[int, ...] = ()  # the steps, the one that the search found first


def walk(count: int, ask: Callable[[Steps], Outcome]) -> Culprit:
    """Search the steps 0 … count - 1, where good has none of them and bad has all.

    `ask` says whether the check passes with a set of steps: `unknown` if that cannot be built or decided.
    """
    if ask(frozenset()) != "passes":
        return Culprit(kind="good fails")
    if ask(frozenset(range(count))) != "fails":
        return Culprit(kind="bad passes")
    low, high = _edge(0, count, lambda end: ask(frozenset(range(end))))
    if high - low > 1:
        return Culprit(kind="one of", steps=tuple(range(low, high)))
    alone = "fails" if low == 0 else ask(frozenset({low}))
    if alone == "fails":
        return Culprit(kind="one", steps=(low,))
    return _partner(low, ask)


def _partner(found: int, ask: Callable[[Steps], Outcome]) -> Culprit:
    """The earlier step without which `found` passes."""
    low, high = _edge(0, found, lambda end: ask(frozenset((*range(end), found))) if end else "passes")
    if high - low == 1 and ask(frozenset({low, found})) == "fails":
        return Culprit(kind="together", steps=(found, low))
    return Culprit(kind="more", steps=(found, *range(high)))


def _edge(low: int, high: int, ask: Callable[[int], Outcome]) -> tuple[int, int]:
    """Two neighbours between which the answer changes: `low` passes and `high` fails.

    Places whose answer is unknown are left out, so the two may be further apart in the end.
    """
    unknown: set[int] = set()
    while places := [place for place in range(low + 1, high) if place not in unknown]:
        middle = min(places, key=lambda place: abs(2 * place - low - high))
        match ask(middle):
            case "passes":
                low = middle
            case "fails":
                high = middle
            case "unknown":
                unknown.add(middle)
    return low, high
