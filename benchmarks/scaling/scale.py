"""Predict how well a training job scales, as an interval. In: scaling.yaml. Out: efficiencies.

    python benchmarks/scaling/scale.py [JOB [GPUS,…]] [--weak]
        [--spread CSV METRIC] [--overlap JSON RECORD ALONE]

docs/reference/scaling.md has the formulas. What many GPUs add to a step is multiplied by a bias, fitted on
the known rows; the interval is their largest leave-one-out residual. It warns, and certifies nothing.
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path
from statistics import NormalDist
from typing import Literal, NamedTuple

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from stackcheck.errors import ConfigurationError
from stackcheck.files import yamlfile
from stackcheck.files.border import Closed

OWN = Path(__file__).with_name("scaling.yaml")
COUNTS = "8,64,512,1024,4096,16384"
FORWARD = 1 / 3  # of a pass: one product in three


class Level(Closed):
    """Links of one kind: seconds of a message, and bytes a second (of a whole node between nodes)."""

    alpha_s: NonNegativeFloat
    bytes_per_s: PositiveFloat


class Cluster(Closed):
    """Equal nodes; `gpu_mtbf_h`, `checkpoint_s` and `restart_s` are for the share of useful time."""

    gpus_per_node: PositiveInt
    inside: Level
    between: Level
    chip_spread: NonNegativeFloat
    contention: NonNegativeFloat  # seconds that a hidden collective takes from compute, for each of its own
    exposed_share: NonNegativeFloat = 0.0  # of all messages, beyond what compute is too short to hide
    gpu_mtbf_h: PositiveFloat
    checkpoint_s: PositiveFloat
    restart_s: NonNegativeFloat
    sources: dict[str, str]


class Known(Closed):
    """A known efficiency against `base` GPUs, each with its global batch."""

    gpus: PositiveInt
    base: PositiveInt
    samples: PositiveFloat
    base_samples: PositiveFloat
    efficiency: PositiveFloat
    source: str


class Job(Closed):
    """A job, with its times on one replica of `tensor` x `pipeline` GPUs."""

    about: str
    cluster: str
    layout: Literal["zero1", "fsdp"]
    micro_batch: PositiveFloat
    micro_batch_s: PositiveFloat
    optimizer_s: NonNegativeFloat
    weight_bytes: PositiveFloat
    units: PositiveInt
    tensor: PositiveInt = 1
    pipeline: PositiveInt = 1
    chunks: PositiveInt = 1  # of layers on each stage (interleaved schedule)
    batch: PositiveFloat
    known: tuple[Known, ...] = ()

    @property
    def replica(self) -> int:
        return self.tensor * self.pipeline


class ScalingFile(Closed):
    """The whole file."""

    schema_: Literal["2"] = Field(alias="schema")
    clusters: dict[str, Cluster]
    jobs: dict[str, Job]


def collective_s(size: float, nodes: int, beside: int, rings: int, cluster: Cluster) -> tuple[float, str]:
    """One all-gather or reduce-scatter of `size` bytes over `beside` GPUs of each node, and its algorithm."""
    inside, between = cluster.inside, cluster.between
    local = (beside - 1) * inside.alpha_s + size * (beside - 1) / beside / inside.bytes_per_s
    if nodes == 1:
        return local, "ring"
    far = size * rings * (nodes - 1) / nodes / between.bytes_per_s
    members = nodes * beside
    ring = (members - 1) * between.alpha_s + max(far, size * (members - 1) / members / inside.bytes_per_s)
    levels = (nodes - 1) * between.alpha_s + local + far
    tree = math.ceil(math.log2(nodes)) * between.alpha_s + local + far
    return min((ring, "ring"), (levels, "hierarchical ring"), (tree, "hierarchical tree"))


def messages(job: Job, cluster: Cluster, gpus: int) -> tuple[float, int]:
    """Seconds of all gathers of a pass, as long as its scatters; and how often it gathers."""
    replicas, nodes = gpus // job.replica, -(-gpus // cluster.gpus_per_node)
    beside = min(replicas, max(1, cluster.gpus_per_node // job.replica))
    rings = cluster.gpus_per_node // beside if nodes > 1 else 1
    unit = job.weight_bytes / job.replica / job.units
    one = collective_s(unit, min(nodes, replicas), beside, rings, cluster)[0] if replicas > 1 else 0.0
    return job.units * one, 2 if job.layout == "fsdp" else 1


def step(job: Job, cluster: Cluster, gpus: int, samples: float, *, exact: bool = True) -> Parts:
    """A step without failures; without `exact`, of others' trainers, micro-batches need not be whole.

    Raises:
        ConfigurationError: The job cannot run on so many GPUs.
    """
    replicas, left = divmod(gpus, job.replica)
    passes = samples / (max(replicas, 1) * job.micro_batch)
    whole = gpus < cluster.gpus_per_node or gpus % cluster.gpus_per_node == 0
    if left or not replicas or passes < 1 or (exact and passes % 1 > 1e-6) or not whole:
        raise ConfigurationError(
            "the job does not run on so many GPUs",
            got=f"{gpus} GPUs, {samples:g} samples a step",
            expected=f"whole replicas of {job.replica}, whole nodes, micro-batches of {job.micro_batch:g}",
        )
    compute = passes * job.micro_batch_s
    bubble = (job.pipeline - 1) / job.chunks * job.micro_batch_s
    slowest = slowest_of(gpus) * cluster.chip_spread * (compute + bubble)
    rounds = passes if job.layout == "fsdp" else 1
    travel, gathers = messages(job, cluster, gpus)
    forward, backward = FORWARD * job.micro_batch_s, (1 - FORWARD) * job.micro_batch_s
    exposed = max(0.0, travel - forward) + max(0.0, gathers * travel - backward)
    exposed += cluster.exposed_share * (1 + gathers) * travel
    busy = cluster.contention * min(travel, forward) + cluster.contention * min(gathers * travel, backward)
    added = bubble + slowest + rounds * (exposed + busy) + 2 * travel / job.units
    share = gpus / samples
    return Parts((compute + job.optimizer_s / replicas) * share, added * share)


class Parts(NamedTuple):
    """GPU seconds for each sample: what one replica needs too, and what many GPUs add."""

    own: float
    added: float


def slowest_of(count: int) -> float:
    """Distance of the slowest of n GPUs from the mean, in standard deviations (Blom)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


def useful(cluster: Cluster, gpus: int) -> float:
    """The share of time that is no checkpoint, lost work or restart, at Young's interval (2 C M)^1/2."""
    mean = cluster.gpu_mtbf_h * 3600 / gpus
    return max(0.0, 1 - math.sqrt(2 * cluster.checkpoint_s / mean) - cluster.restart_s / mean)


def both(job: Job, cluster: Cluster, row: Known, *, exact: bool = True) -> tuple[Parts, Parts]:
    """The parts on the GPUs of a row, and on its base."""
    return (
        step(job, cluster, row.gpus, row.samples, exact=exact),
        step(job, cluster, row.base, row.base_samples, exact=exact),
    )


def efficiency(pair: tuple[Parts, Parts], factor: float) -> float:
    """Of the first against the second, where what many GPUs add takes `factor` times as long."""
    one, base = pair
    return (base.own + factor * base.added) / (one.own + factor * one.added)


def factor_of(pair: tuple[Parts, Parts], known: float) -> float:
    """The factor with which the model gives a known efficiency."""
    one, base = pair
    return (base.own - known * one.own) / (known * one.added - base.added)


class Fit(NamedTuple):
    """The logarithm of the factor, and the largest leave-one-out residual."""

    bias: float
    residual: float

    def interval(self, pair: tuple[Parts, Parts]) -> tuple[float, float, float]:
        """Lowest, middle and highest efficiency."""
        low, middle, high = (efficiency(pair, math.exp(self.bias + at * self.residual)) for at in (1, 0, -1))
        return low, middle, high


def known_rows(file: ScalingFile) -> list[tuple[str, Known, tuple[Parts, Parts]]]:
    """Job, known row and its parts."""
    return [
        (name, row, both(job, file.clusters[job.cluster], row, exact=False))
        for name, job in file.jobs.items()
        for row in job.known
    ]


def fit(file: ScalingFile, without: int | None = None) -> Fit:
    """The fit on the known rows; `without` leaves one out."""
    rows = [row for number, row in enumerate(known_rows(file)) if number != without]
    logs = [math.log(factor_of(pair, row.efficiency)) for _, row, pair in rows]
    out = [abs(one - statistics.mean(logs[:at] + logs[at + 1 :])) for at, one in enumerate(logs)]
    return Fit(statistics.mean(logs), max(out))


def load_scaling(path: Path = OWN) -> ScalingFile:
    """Read the file; raises `ConfigurationError` with one line a problem."""
    return yamlfile.validated(ScalingFile, yamlfile.load_yaml(path), path.name)


def table(file: ScalingFile, name: str, counts: list[int], *, weak: bool) -> list[str]:
    """Lines of a prediction against one replica."""
    job, fitted = file.jobs[name], fit(file)
    cluster, lines = file.clusters[job.cluster], []
    for gpus in counts:
        samples = job.batch * gpus / job.replica if weak else job.batch
        base = job.batch if weak else samples
        row = Known(gpus=gpus, base=job.replica, samples=samples, base_samples=base, efficiency=1, source="-")
        try:
            low, middle, high = fitted.interval(both(job, cluster, row))
        except ConfigurationError as error:
            lines.append(f"{gpus:>6}  refused: {str(error).splitlines()[-1].strip()}")
            continue
        share = useful(cluster, gpus)
        lines.append(
            f"{gpus:>6}  {100 * middle:.1f} % ({100 * low:.1f} to {100 * high:.1f})"
            f"  useful time {100 * share:.1f} %"
        )
    return lines


def known_lines(file: ScalingFile) -> list[str]:
    """The known rows: the model alone, the interval, and that of a fit which does not know the row."""
    lines, fitted = [], fit(file)
    for number, (name, row, pair) in enumerate(known_rows(file)):
        spans = [one.interval(pair) for one in (fitted, fit(file, number))]
        words = [
            f"{100 * middle:.1f} ({100 * low:.1f} to {100 * high:.1f})"
            f"{'' if low <= row.efficiency <= high else ' outside'}"
            for low, middle, high in spans
        ]
        known, model = 100 * row.efficiency, 100 * efficiency(pair, 1)
        lines.append(
            f"| {name} | {row.base} to {row.gpus} | {known:.1f} | {model:.1f} "
            f"| {words[0]} | {words[1]} | {row.source} |"
        )
    return lines


def with_measured(
    file: ScalingFile, job: Job, spread: tuple[str, str] | None, overlap: tuple[str, str, str] | None
) -> ScalingFile:
    """The file with a cluster that was measured: every job on it is fitted and predicted with it."""
    import measured

    cluster = file.clusters[job.cluster]
    if spread:
        cluster = measured.with_spread(cluster, Path(spread[0]), spread[1])
    if overlap:
        cluster = measured.with_overlap(cluster, job, Path(overlap[0]), *overlap[1:])
    return file.model_copy(update={"clusters": file.clusters | {job.cluster: cluster}})


def main() -> None:
    """Print the known rows, or a prediction."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", nargs="?", help="a job of the file [the known rows]")
    parser.add_argument("gpus", nargs="?", default=COUNTS, help=f"counts [{COUNTS}]")
    parser.add_argument("--weak", action="store_true", help="the job's batch for each replica")
    parser.add_argument("--file", type=Path, default=OWN)
    parser.add_argument("--spread", nargs=2, metavar=("CSV", "METRIC"), help="of a fleet's history")
    parser.add_argument("--overlap", nargs=3, metavar=("JSON", "RECORD", "ALONE"), help="of profiled records")
    given = parser.parse_args()
    file = load_scaling(given.file)
    if given.spread or given.overlap:
        job = file.jobs.get(given.job or "") or parser.error("measured inputs are of a job: name it")
        file = with_measured(file, job, given.spread, given.overlap)
        told = file.clusters[job.cluster].model_dump(include={"chip_spread", "contention", "exposed_share"})
        print(*(f"{name} {value:.4f}" for name, value in told.items()), sep=", ")
    if given.job is None:
        print("\n".join(known_lines(file)))
    elif given.job not in file.jobs:
        parser.error(f"no job {given.job}: {', '.join(file.jobs)}")
    else:
        print("\n".join(table(file, given.job, [int(n) for n in given.gpus.split(",")], weak=given.weak)))


if __name__ == "__main__":
    main()
