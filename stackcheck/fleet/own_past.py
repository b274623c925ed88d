"""A node's figures against its own last gates. In: a result, the kept gates. Out: which parts got slower."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from stackcheck.history import metrics, regressions
from stackcheck.history.records import result_of
from stackcheck.history.runs import Query, Run
from stackcheck.suite import results
from stackcheck.suite.judgement import NO_IMAGE
from stackcheck.suite.results import RunResult

if TYPE_CHECKING:
    from stackcheck.history.history import History

# As many as the nights against which one chip is held: the spread of fewer says little.
LAST, FEWEST = 20, regressions.FEWEST_NIGHTS
USELESS = 1.0  # a tolerance that no slow-down can exceed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the node that refuses it: `GPU 3 at 0000:1b:00.0`, `link 0-1`, `mlx5_0/1 at …`."""

    kind: str
    name: str
    evidence: str

    @property
    def figure(self) -> tuple[str, str]:
        """Part and metric, without the values."""
        return self.name, self.evidence.partition(" ")[0]


class NodePast(NamedTuple):
    """What the node's own last gates say: their number, figures compared and too noisy, slower parts."""

    gates: int
    figures: int
    noisy: int
    slower: tuple[Part, ...] = ()

    @property
    def words(self) -> str:
        """What a reader has to know of it."""
        if self.gates < FEWEST:
            return (
                f"{self.gates} earlier gates of this node: {FEWEST} are needed, so this one is held to "
                "the bounds of the device model alone"
            )
        return f"{self.figures} figures held to the median of {self.gates} gates, {self.noisy} too noisy"


def compare(result: RunResult, history: History) -> NodePast:
    """Hold a run's figures to the last gates of the same node, image, torch and driver that ended fit."""
    like = list(itertools.islice(_fit_gates(result, history), LAST))
    if len(like) < FEWEST:
        return NodePast(len(like), 0, 0)
    past: dict[tuple[str, str], list[float]] = {}
    for earlier in like:
        for name, metric in _figures(earlier):
            past.setdefault(name, []).append(metric.value or 0.0)
    found = [_held(metric, past.get(name, ())) for name, metric in _figures(result)]
    slower = tuple(one for one in found if isinstance(one, Part))
    if result.host.vendor == "cpu":  # other work takes its cores at any time, so its speed refuses no node
        return NodePast(len(like), 0, len(found) - found.count("new"))
    noisy = found.count("noisy")
    return NodePast(len(like), len(slower) + found.count("kept"), noisy, slower)


def slower_before(parts: Sequence[Part], result: RunResult, history: History) -> tuple[Part, ...]:
    """Those parts that the last gate like this one, which did not end fit, found too slow as well."""
    last = next((run for run in _gates(result, history)), None)
    told = last.reasons if last and last.status == "UNFIT" else ()
    return tuple(
        part for part in parts if any(reason.startswith(f"{': '.join(part.figure)} ") for reason in told)
    )


def _fit_gates(result: RunResult, history: History) -> Iterator[RunResult]:
    """The results, the newest first. Without an image only they tell the torch that ran."""
    for run in _gates(result, history):
        if run.status == "PASSED":
            found = results.parse(result_of(history.records.read(run.record)))
            if found.software.get("torch") == result.software.get("torch"):
                yield found


def _gates(result: RunResult, history: History) -> Iterator[Run]:
    """The gates of the same node, image and driver, the newest first."""
    node = metrics.node_id(device.id for device in result.host.devices)
    stack = result.stack_id or (result.image.reference if result.image else NO_IMAGE)
    image = (result.image.manifest_digest or result.image.config_digest) if result.image else None
    wanted = (stack, image, result.host.driver, "gate")
    for run in history.runs(Query(node=node, limit=10 * LAST)):
        if (run.stack, run.image, run.driver, run.tier) == wanted:
            yield run


def _figures(result: RunResult) -> Iterator[tuple[tuple[str, str], results.Metric]]:
    """The figures that have a better side, by check, name and place among those of one name."""
    for check in result.checks:
        for number, metric in enumerate(check.metrics):
            if metric.value is not None and regressions.better(metric.unit, metric.direction):
                yield (check.id, f"{metric.name} {metric.unit} {number}"), metric


def _held(metric: results.Metric, past: Sequence[float]) -> Part | Literal["kept", "noisy", "new"]:
    """A part if the figure is worse than the node's median by more than its own spread explains."""
    direction = regressions.better(metric.unit, metric.direction)
    if direction is None or metric.value is None or len(past) < FEWEST:
        return "new"
    middle = statistics.median(past)
    limit = max(regressions.FLOOR, regressions.BASELINE_FACTOR * regressions.spread(past))
    if limit >= USELESS or not middle:
        return "noisy"
    if regressions.loss(middle, metric.value, direction) <= limit:
        return "kept"
    usual = f"the median of {len(past)} gates here is {middle:.4g}"
    words = f"{metric.name} {metric.value:.4g} {metric.unit}, {usual}"
    return Part(kind="slower", name=_of_conditions(metric), evidence=f"{words} ({limit:.0%} may be lost)")


def _of_conditions(metric: results.Metric) -> str:
    told = metric.conditions
    if "from" in told:
        return f"link {told['from']}-{told['to']}"
    if "device" in told:
        return f"GPU {told['device']}"
    return "all devices together" if told.get("devices", 1) != 1 else "GPU 0"
