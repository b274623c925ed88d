"""The links of a fleet, on this host: which groups work together, what they show. In: a run. Out: `Links`.

The nodes that passed alone work in pairs, in rounds, then all together. Their steps are
those of `LinkNode`; what they wrote is read here, and names the link or the node that spoils it.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, FiniteFloat

from stackcheck.files.atomic import write_atomically
from stackcheck.files.border import Closed
from stackcheck.fleet import gate
from stackcheck.fleet.job import Job
from stackcheck.fleet.links import LinkCulprit, Pair, culprits, rounds

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
    """What the links of a fleet showed."""

    speeds: Mapping[Pair, float]  # pair -> busbw of the largest message in GB/s
    failed: Mapping[Pair, str]  # pair -> why
    culprits: tuple[LinkCulprit, ...]  # the nodes and links that explain what is bad
    # The busbw of all nodes together; None if they were not tried, or failed
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
