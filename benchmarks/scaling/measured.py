"""What of the scaling model was measured. In: a fleet's history, or training records. Out: a `Cluster`.

The history is `stackcheck history export --to FILE.csv`: one row a figure, with its node. The records are
those of docs/results/training-*.json: the step, and the kernels' own times where a run was profiled.
"""

from __future__ import annotations

import csv
import json
import statistics
from typing import TYPE_CHECKING, Any

from scale import FORWARD, Cluster, Job, messages, slowest_of

from stackcheck.errors import ConfigurationError
from stackcheck.fleet.spread import FEWEST

if TYPE_CHECKING:
    from pathlib import Path

COMMUNICATION, OPTIMIZER = "communication", "optimizer"


def with_spread(cluster: Cluster, path: Path, metric: str) -> Cluster:
    """The cluster with the spread of a fleet's own nodes: the deviation of their times from the median.

    Each node counts with its median. It is no robust deviation: a straggler is what a job waits for.

    Raises:
        ConfigurationError: Too few nodes have the figure, or some of its rows are simulated.
    """
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["name"] == metric]
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row["node"], []).append(float(row["value"]))
    real = all(row["simulated"] == "False" for row in rows)
    kinds = {(row["device_model"], row["direction"]) for row in rows}
    if len(found) < FEWEST or len(kinds) != 1 or not real or kinds == {("", "")}:
        raise ConfigurationError(
            "no spread of a fleet is there",
            where=str(path),
            got=f"{metric} of {len(found)} nodes, {len(kinds)} kinds{'' if real else ', some simulated'}",
            expected=f"a figure of one device model that {FEWEST} nodes or more measured",
            next_step=f"stackcheck history export --metric '{metric}' --device MODEL --to {path.name}",
        )
    ((_, direction),) = kinds
    values = [statistics.median(one) for one in found.values()]
    middle = statistics.median(values)
    times = [middle / value if direction == "min" else value / middle for value in values]
    return cluster.model_copy(update={"chip_spread": statistics.stdev(times)})


def with_overlap(cluster: Cluster, job: Job, path: Path, name: str, alone: str) -> Cluster:
    """The cluster with what its links take from compute and leave exposed, by two profiled records of a job.

    Compute kernels that are slower than those of one GPU were slowed by what ran beside them. What of a step
    is no kernel of compute, beyond that of one GPU, and no waiting for the slowest chip, was exposed. Both
    are shares of the modelled messages.

    Raises:
        ConfigurationError: A record is not there, or was not profiled.
    """
    records = json.loads(path.read_bytes())["records"]
    many, one = (_profiled(records, path, each) for each in (name, alone))
    travel, gathers = messages(job, cluster, many["gpus"])
    whole = (1 + gathers) * travel
    hidden = min(travel, FORWARD * job.micro_batch_s) + min(
        gathers * travel, (1 - FORWARD) * job.micro_batch_s
    )
    busy = _compute(many) - _compute(one)
    exposed = _waits(many) - _waits(one) - slowest_of(many["gpus"]) * cluster.chip_spread * _compute(one)
    if not hidden or _kind(many) != _kind(one):
        raise ConfigurationError(
            "the records are not of one job on one and on more GPUs",
            where=str(path),
            got=f"{name}: {_kind(many)}; {alone}: {_kind(one)}",
            expected="equal micro-batches and precision, and messages between GPUs in the first",
        )
    told = {"contention": max(0.0, busy / hidden), "exposed_share": max(0.0, exposed / whole)}
    return cluster.model_copy(update=told)


def _profiled(records: list[dict[str, Any]], path: Path, name: str) -> dict[str, Any]:
    for record in records:
        if record["name"] == name and record["extra"].get("where", {}).get("kernel_ms"):
            return record
    raise ConfigurationError(
        "there is no such profiled record",
        where=str(path),
        got=name,
        expected="the name of a record with kernel_ms",
        next_step="train with --profile: docs/guides/trainers.md",
    )


def _kind(record: dict[str, Any]) -> str:
    """What two records must have in common."""
    plan, flags = record["plan"], record["flags"]
    words = flags.split() if isinstance(flags, str) else flags
    precision = words[words.index("--precision") + 1]
    return f"{plan['accumulate']} x {plan['micro_batch']} x {plan['seq_len']} {precision}"


def _compute(record: dict[str, Any]) -> float:
    """Seconds of a step in kernels of compute; each rank has its own part of the optimizer."""
    kinds = record["extra"]["where"]["kernel_ms"]
    return sum(ms for kind, ms in kinds.items() if kind not in {COMMUNICATION, OPTIMIZER}) / 1000


def _waits(record: dict[str, Any]) -> float:
    """Seconds of a step in no kernel of compute or of the optimizer."""
    optimizer = record["extra"]["where"]["kernel_ms"].get(OPTIMIZER, 0.0) / 1000
    return float(record["performance"]["step_s"]["median"]) - _compute(record) - optimizer
