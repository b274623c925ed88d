"""The time of a training step on many GPUs, from that on one.

In: a `PredictedJob`, a `Cluster`. Out: `Prediction`s.

docs/reference/scaling.md has the formulas and says how far they hold. Pure. Bytes are bytes, times seconds,
rates bytes per second. What is predicted can warn; it certifies nothing.
"""

from __future__ import annotations

import dataclasses
from statistics import NormalDist
from typing import Literal

from stackcheck.errors import ConfigurationError

# A forward pass takes a third of the time of forward and backward: one product in three.
FORWARD = 1 / 3
Layout = Literal["zero1", "fsdp"]
Link = Literal["inside a node", "between nodes"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """A link's speed by message size: latency and bandwidth (alpha and beta of Hockney's model).

    Attributes:
        latency_s: Of one step of a ring.
        bytes_per_s: Bus bandwidth of large messages, by nccl-tests' definition.
    """

    latency_s: float
    bytes_per_s: float

    def ring_s(self, size_bytes: float, members: int) -> float:
        """An all-gather or a reduce-scatter of some bytes over a ring: half of an all-reduce."""
        if members == 1:
            return 0.0
        return (members - 1) * self.latency_s + size_bytes * (members - 1) / members / self.bytes_per_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes.

    Attributes:
        gpus_per_node: As torch counts them.
        inside: Between the GPUs of a node.
        between: Of one node with the others; `bytes_per_s` is that of the whole node.
        chip_spread: Standard deviation of the GPUs' speeds, relative to their mean.
        contention: What an overlapped collective takes from compute: seconds for each second that it takes
            alone inside a node. 0: it is free; 1: overlap hides nothing of what moves inside a node.
    """

    gpus_per_node: int
    inside: Curve
    between: Curve
    chip_spread: float
    contention: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictedJob:
    """A training job, with its times on one replica.

    Attributes:
        layout: `zero1`: gradients are reduced and weights gathered once a step; `fsdp`: weights are gathered
            twice and gradients reduced for each micro-batch.
        micro_batch: Samples of one replica in one forward and backward pass.
        micro_batch_s: Time of that pass of one pipeline stage.
        optimizer_s: Time of the optimizer over all parameters of a replica, before they are divided.
        parameter_bytes: Of the weights as they travel, all of them.
        gradient_bytes: Of the gradients as they travel.
        first_bytes: What forward waits for before it begins: the embedding's weights.
        layers: Parts that travel one after the other.
        tensor: GPUs that share each product; inside a node.
        pipeline: Pipeline stages.
    """

    layout: Layout
    micro_batch: float
    micro_batch_s: float
    optimizer_s: float
    parameter_bytes: float
    gradient_bytes: float
    first_bytes: float
    layers: int
    tensor: int = 1
    pipeline: int = 1

    @property
    def replica(self) -> int:
        """GPUs that hold one copy of the model together."""
        return self.tensor * self.pipeline


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """One step on a number of GPUs, and where its time goes.

    Attributes:
        compute_s: Forward and backward passes, as fast as the mean GPU.
        slowest_s: What the slowest GPU adds: all wait for it.
        bubble_s: Stages of the pipeline that wait.
        contention_s: What overlapped collectives take from compute.
        exposed_s: Collectives that nothing hides.
        limit: The link that the exposed collectives wait for; None if they are less than 1 % of the step.
    """

    gpus: int
    samples: float
    compute_s: float
    slowest_s: float
    bubble_s: float
    optimizer_s: float
    contention_s: float
    exposed_s: float
    limit: Link | None

    @property
    def step_s(self) -> float:
        """The whole step."""
        return (
            self.compute_s
            + self.slowest_s
            + self.bubble_s
            + self.optimizer_s
            + self.contention_s
            + self.exposed_s
        )

    @property
    def samples_per_s_per_gpu(self) -> float:
        """The rate that efficiencies compare."""
        return self.samples / self.step_s / self.gpus


def predict(job: PredictedJob, cluster: Cluster, gpus: int, samples: float) -> Prediction:
    """One step of a job with a global batch of this number of samples.

    Raises:
        ConfigurationError: The GPUs do not divide into replicas, or the batch not into micro-batches.
    """
    replicas, passes = _divided(job, gpus, samples)
    compute = passes * job.micro_batch_s
    bubble = (job.pipeline - 1) * job.micro_batch_s
    travel = _Travel.of(job, cluster, gpus, replicas)
    exposed, local = travel.exposed_and_local(job, passes)
    slowest = slowest_of(gpus) * cluster.chip_spread * (compute + bubble)
    found = Prediction(
        gpus=gpus,
        samples=samples,
        compute_s=compute,
        slowest_s=slowest,
        bubble_s=bubble,
        optimizer_s=job.optimizer_s / replicas,
        contention_s=cluster.contention * local,
        exposed_s=exposed,
        limit=travel.link,
    )
    return found if exposed > 0.01 * found.step_s else dataclasses.replace(found, limit=None)


def _divided(job: PredictedJob, gpus: int, samples: float) -> tuple[int, float]:
    """The number of replicas, and the passes of each in a step."""
    if gpus % job.replica:
        raise ConfigurationError(
            "the GPUs do not divide into replicas",
            got=f"{gpus} GPUs",
            expected=f"a multiple of {job.replica}: {job.tensor} for each product, {job.pipeline} stages",
        )
    replicas = gpus // job.replica
    passes = samples / (replicas * job.micro_batch)
    if passes < 1:
        raise ConfigurationError(
            "the global batch is smaller than one micro-batch for each replica",
            got=f"{samples:g} samples on {replicas} replicas",
            expected=f"at least {replicas * job.micro_batch:g} samples",
        )
    return replicas, passes


def slowest_of(count: int) -> float:
    """Distance of the slowest of n GPUs from the mean, in standard deviations (Blom's approximation)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


@dataclasses.dataclass(frozen=True)
class _Travel:
    """How long weights and gradients travel: over the slower of the two kinds of link, and inside a node."""

    gather_s: float
    scatter_s: float
    first_s: float
    local_gather_s: float  # inside a node alone
    local_scatter_s: float
    link: Link

    @classmethod
    def of(cls, job: PredictedJob, cluster: Cluster, gpus: int, replicas: int) -> _Travel:
        """The collectives of one replica's part among the replicas."""
        nodes = -(-gpus // cluster.gpus_per_node)
        beside = max(1, cluster.gpus_per_node // job.replica) if gpus >= cluster.gpus_per_node else replicas
        beside = min(beside, replicas)

        def both(size: float) -> tuple[float, float]:
            part = size / job.replica
            inside = cluster.inside.ring_s(part, beside)
            if nodes == 1:
                return inside, 0.0
            # The rings of a node's GPUs share its links to the others.
            rings = cluster.gpus_per_node // beside
            return inside, cluster.between.ring_s(part * rings, -(-replicas // beside))

        gathered, scattered, first = map(both, (job.parameter_bytes, job.gradient_bytes, job.first_bytes))
        return cls(
            gather_s=max(gathered),
            scatter_s=max(scattered),
            first_s=max(first),
            local_gather_s=gathered[0],
            local_scatter_s=scattered[0],
            link="inside a node" if gathered[0] >= gathered[1] else "between nodes",
        )

    def exposed_and_local(self, job: PredictedJob, passes: float) -> tuple[float, float]:
        """Seconds of a step that nothing hides, and seconds that collectives take inside nodes."""
        forward, backward = FORWARD * job.micro_batch_s, (1 - FORWARD) * job.micro_batch_s
        last = self.scatter_s / job.layers
        if job.layout == "zero1":
            hidden_gather, hidden_scatter = self.gather_s - self.first_s, self.scatter_s - last
            exposed = max(0.0, hidden_gather - forward) + max(0.0, hidden_scatter - backward)
            return exposed + self.first_s + last, self.local_gather_s + self.local_scatter_s
        again = self.gather_s + self.scatter_s
        exposed = passes * (max(0.0, self.gather_s - forward) + max(0.0, again - backward))
        return exposed + self.first_s + last, passes * (2 * self.local_gather_s + self.local_scatter_s)


def efficiency(one: Prediction, base: Prediction) -> float:
    """The rate of a GPU against that in the base: 1 is ideal."""
    return one.samples_per_s_per_gpu / base.samples_per_s_per_gpu


def strong(job: PredictedJob, cluster: Cluster, counts: tuple[int, ...], samples: float) -> list[Prediction]:
    """Each count with the same global batch."""
    return [predict(job, cluster, count, samples) for count in counts]


def weak(
    job: PredictedJob, cluster: Cluster, counts: tuple[int, ...], samples_per_replica: float
) -> list[Prediction]:
    """Each count with the same batch for every replica."""
    return [predict(job, cluster, count, samples_per_replica * (count // job.replica)) for count in counts]
