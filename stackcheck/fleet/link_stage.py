"""The links of a fleet, on this host: which groups work together, what they show. In: a run. Out: `Links`.

The nodes that passed alone work in pairs, in rounds, then all together. Their steps are
those of `LinkNode`; what they wrote is read here, and names the link or the node that spoils it.

The circle method of a round-robin tournament tries every link of n nodes in n - 1 rounds (n for an odd n),
in each of which a node is in one pair at most: https://en.wikipedia.org/wiki/Round-robin_tournament.
Of a large fleet about log2 n of these rounds are played: first within each leaf switch, then between leaves.
"""

import dataclasses
import itertools
import json
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, FiniteFloat

from stackcheck.files.atomic import write_atomically
from stackcheck.files.border import Closed
from stackcheck.fleet import gate
from stackcheck.fleet.job import Job
from stackcheck.fleet.spread import outliers

Pair = tuple[str, str]
# Of fewer than five pairs a spread says nothing, and one of unsteady speeds hides a broken link.
FAR = 1 / 3  # of the median
EVERY_PAIR = 40  # nodes, up to which every pair is tried


@dataclass(frozen=True, kw_only=True)
class LinkCulprit:
    """What a bad pair comes from.

    Attributes:
        kind: `node`: most pairs with it are bad; `switch`: most pairs between a leaf and the others are;
            `link`: only this pair is.
    """

    kind: Literal["node", "switch", "link"]
    names: tuple[str, ...]  # one node, one leaf switch, or the two ends of the link
    because: str  # the evidence, in words


def rounds(nodes: Sequence[str], racks: Mapping[str, str] | None = None) -> list[list[Pair]]:
    """Rounds that have each node at most once, and no pair twice.

    Of `EVERY_PAIR` nodes or fewer every pair is tried. Of more, each node meets about log2 m of the m nodes
    of its leaf, then about log2 n nodes of other leaves.

    Args:
        nodes: Their names.
        racks: Node -> its leaf switch; nodes of which nobody knows one count as one leaf.
    """
    if len(nodes) <= EVERY_PAIR:
        return list(_tournament(nodes, len(nodes)))
    leaf_of = {name: (racks or {}).get(name, "") for name in nodes}
    ordered = sorted(nodes, key=leaf_of.__getitem__)
    leaves = [list(group) for _, group in itertools.groupby(ordered, key=leaf_of.__getitem__)]
    inside = itertools.zip_longest(*(_tournament(leaf, _few(leaf)) for leaf in leaves), fillvalue=())
    found = [list(itertools.chain.from_iterable(each)) for each in inside]
    across = _tournament(ordered, _few(ordered))
    found += [[(a, b) for a, b in each if leaf_of[a] != leaf_of[b]] for each in across]
    return [each for each in found if each]


def _few(nodes: Sequence[str]) -> int:
    """Rounds after which a bad node differs from a bad link: two more than log2."""
    return (len(nodes) - 1).bit_length() + 2


def _tournament(nodes: Sequence[str], most: int) -> Iterator[list[Pair]]:
    """At most `most` rounds of a tournament, evenly spread over all: in round r nodes i and r - i meet."""
    count = len(nodes) - (len(nodes) + 1) % 2  # of an even number the last one meets who would meet itself
    played = min(most, count if len(nodes) > 1 else 0)
    for number in range(played):
        turn = number * count // played
        turn -= (turn - number) % 2  # in turns of one kind the last node would meet one half alone
        meets = ((one, (turn - one) % count) for one in range(count))
        pairs = [
            (one, other if other != one else len(nodes) - 1)
            for one, other in meets
            if one < other or (one == other and count < len(nodes))
        ]
        yield [(nodes[one], nodes[other]) for one, other in pairs]


def culprits(
    failed: Mapping[Pair, str], speeds: Mapping[Pair, float], racks: Mapping[str, str] | None = None
) -> list[LinkCulprit]:
    """The nodes, leaf switches and links that explain the bad pairs; the links last.

    Args:
        failed: Pairs that did not work -> why.
        speeds: The pairs that worked -> busbw in GB/s. A pair that is much slower than the others of its kind
            (within a leaf, between leaves) is bad too.
        racks: Node -> its leaf switch, where somebody knows it.
    """
    leaf_of = racks or {}
    between = {pair: speed for pair, speed in speeds.items() if _leaves(pair, leaf_of)}
    inside = {pair: speed for pair, speed in speeds.items() if pair not in between}
    bad = dict(failed) | _slow(inside) | _slow(between)
    found, rest = _common(bad, [*failed, *speeds], leaf_of)
    return found + [LinkCulprit(kind="link", names=pair, because=why) for pair, why in sorted(rest.items())]


def _leaves(pair: Pair, leaf_of: Mapping[str, str]) -> set[str]:
    """The two leaves between which a pair is; none within a leaf."""
    leaves = {leaf for name in pair if (leaf := leaf_of.get(name))}
    return leaves if len(leaves) == 2 else set()


def _slow(speeds: Mapping[Pair, float]) -> dict[Pair, str]:
    """The pairs that stand out from the spread, and those that are far from the median."""
    spread = outliers({_name(pair): value for pair, value in speeds.items()}, direction="min")
    found = {pair: spread[_name(pair)].words() for pair in speeds if _name(pair) in spread}
    middle = statistics.median_high(speeds.values()) if speeds else 0.0
    for pair, speed in speeds.items():
        if speed < FAR * middle:
            found.setdefault(pair, f"less than a third of the median, {middle:.3g} GB/s")
    return {pair: f"{speeds[pair]:.3g} GB/s, {words}" for pair, words in found.items()}


def _common(
    bad: Mapping[Pair, str], tried: Sequence[Pair], leaf_of: Mapping[str, str]
) -> tuple[list[LinkCulprit], dict[Pair, str]]:
    """What more than half of whose pairs are bad, the worst first, and the bad pairs that this leaves.

    A pair of a bad and a healthy node is bad too, so the pairs of a part that is found no longer count.
    """
    found: list[LinkCulprit] = []
    left, pairs = dict(bad), list(tried)
    while left:
        wrong = Counter(part for pair in left for part in _parts(pair, leaf_of))
        total = Counter(part for pair in pairs for part in _parts(pair, leaf_of))
        worst = max(sorted(wrong), key=lambda part: (wrong[part] / total[part], wrong[part]))
        if wrong[worst] < 2 or 2 * wrong[worst] <= total[worst]:
            break
        kind, name = worst
        where = "pairs with other leaves" if kind == "switch" else "pairs"
        because = f"{wrong[worst]} of its {total[worst]} {where} are bad"
        found.append(LinkCulprit(kind=kind, names=(name,), because=because))
        left = {pair: why for pair, why in left.items() if worst not in _parts(pair, leaf_of)}
        pairs = [pair for pair in pairs if worst not in _parts(pair, leaf_of)]
    return found, left


def _parts(pair: Pair, leaf_of: Mapping[str, str]) -> set[tuple[Literal["node", "switch"], str]]:
    """What a pair needs: its two nodes, and the leaves between which it is."""
    return {("node", name) for name in pair} | {("switch", leaf) for leaf in _leaves(pair, leaf_of)}


def _name(pair: Pair) -> str:
    return " - ".join(pair)


LIMIT_S = 300  # for a group, from the time when all its containers are up to their end
ROUND_S = 30  # for the reports of a round, beside the time of its groups
FIRST_PORT, PORTS = 29500, 1000  # a port is free again only after a while, so the next round takes others
PLAN = "links.json"


class NodeGroup(Closed, strict=True):
    """Nodes that work together in one round; the first one is where the others meet it."""

    names: list[str]
    address: str
    port: int


class LinkPlan(Closed, strict=True):
    """The rounds of a links job."""

    rounds: list[list[NodeGroup]]
    limit_s: int
    start_s: int = gate.START_LIMIT_S
    racks: dict[str, str] = Field(default_factory=dict)


class Report(Closed, strict=True):
    """What rank 0 of a group printed, or why a node has nothing to say."""

    error: str | None = None
    ranks: int | None = None
    wrong: list[str] = Field(default_factory=list)
    busbw_gb_per_s: dict[str, FiniteFloat] = Field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Links:
    """What the links of a fleet showed.

    Attributes:
        whole_gb_per_s: The busbw of all nodes together; None if they were not tried, or failed.
    """

    speeds: Mapping[Pair, float]  # pair -> busbw of the largest message in GB/s
    failed: Mapping[Pair, str]  # pair -> why
    culprits: tuple[LinkCulprit, ...]  # the nodes and links that explain what is bad
    whole_gb_per_s: float | None = None
    whole_error: str | None = None

    @property
    def is_good(self) -> bool:
        """Whether nothing is bad."""
        return not self.culprits and not self.failed and self.whole_error is None

    def as_json(self) -> dict[str, Any]:
        """For fleet.json."""
        return {
            "pairs": [[*pair, round(speed, 4)] for pair, speed in self.speeds.items()],
            "failed": [[*pair, why] for pair, why in self.failed.items()],
            "culprits": [dataclasses.asdict(culprit) for culprit in self.culprits],
            "whole_gb_per_s": self.whole_gb_per_s,
            "whole_error": self.whole_error,
        }


def make(
    job: Job,
    names: Sequence[str],
    addresses: Mapping[str, str],
    *,
    racks: Mapping[str, str] | None = None,
    limit_s: int = LIMIT_S,
) -> tuple[Job, LinkPlan]:
    """The job of the links of nodes, and its plan: pairs first, then all of them (of more than two). Pure."""
    groups = [[list(pair) for pair in each] for each in rounds(names, racks)]
    if len(names) > 2:
        groups.append([list(names)])
    planned, port = [], 0
    for each in groups:
        made = [
            NodeGroup(names=group, address=addresses[group[0]], port=FIRST_PORT + (port + number) % PORTS)
            for number, group in enumerate(each)
        ]
        planned.append(made)
        port += len(each)
    limit = (gate.START_LIMIT_S + limit_s + ROUND_S) * len(planned) + gate.AROUND_S
    changes = {
        "id": f"{job.id}-links",
        "nodes": len(names),
        "stage": "links",
        "limit_s": limit,
        "array": False,
    }
    return job.model_copy(update=changes), LinkPlan(rounds=planned, limit_s=limit_s, racks=dict(racks or {}))


def save(job: Job, plan: LinkPlan) -> None:
    """Write the plan where the nodes read it."""
    write_atomically(job.folder / PLAN, (plan.model_dump_json().encode(),))


def folder_of(attempt: Path, number: int) -> Path:
    """Where the nodes write in a round."""
    return attempt / "links" / str(number)


def report_file(attempt: Path, number: int, name: str) -> Path:
    """Where a node writes its report of a round."""
    return folder_of(attempt, number) / f"{name}.json"


def read(attempt: Path, plan: LinkPlan, devices: int) -> Links:
    """What the groups showed, from the files of their nodes. A group without a report has failed."""
    speeds: dict[Pair, float] = {}
    failed: dict[Pair, str] = {}
    whole_speed, whole_error = None, None
    ended = gate.why_ended(attempt)
    for number, groups in enumerate(plan.rounds):
        for group in groups:
            speed, error = _group(attempt, number, group, devices, ended)
            if len(group.names) == 2:
                pair = (group.names[0], group.names[1])
                if error:
                    failed[pair] = error
                else:
                    speeds[pair] = speed
            else:
                whole_speed, whole_error = (None, error) if error else (speed, None)
    return Links(
        speeds=speeds,
        failed=failed,
        culprits=tuple(culprits(failed, speeds, plan.racks)),
        whole_gb_per_s=whole_speed,
        whole_error=whole_error,
    )


def _group(
    attempt: Path, number: int, group: NodeGroup, devices: int, ended: Mapping[str, str]
) -> tuple[float, str | None]:
    """The busbw of the largest message, or why it is missing: first of all what ended a node."""
    files = {name: report_file(attempt, number, name) for name in group.names}
    reports = {
        name: gate.report(Report, path) or Report(error=ended.get(name) or "left no report")
        for name, path in files.items()
    }
    for name in sorted(reports, key=lambda name: files[name].exists()):
        if error := reports[name].error:
            return 0.0, f"{name}: {error}"
    first = reports[group.names[0]]
    if first.ranks != len(group.names) * devices:
        return 0.0, f"{first.ranks} ranks worked together, expected {len(group.names) * devices}"
    if first.wrong:
        return 0.0, "; ".join(first.wrong[:3])
    largest = max(first.busbw_gb_per_s, key=int, default=None)
    if largest is None or first.busbw_gb_per_s[largest] <= 0:
        return 0.0, "no speed was measured"
    return first.busbw_gb_per_s[largest], None


def parse_line(lines: Sequence[str]) -> Report:
    """The report in the last line of rank 0 that is one."""
    for line in reversed(lines):
        if line.startswith("{"):
            try:
                return Report.model_validate(json.loads(line))
            except ValueError:
                continue
    return Report(error="the program printed no report; it ended with: " + " | ".join(lines[-3:]))
