"""The scaling model's clusters and jobs, beside known figures. In: a YAML file. Out: `ScalingFile`."""

from __future__ import annotations

from collections.abc import Mapping  # pydantic reads annotations at run time
from pathlib import Path
from typing import Annotated, Any, Literal

import scaling
from pydantic import Field, ValidationError

from stackcheck.errors import ConfigurationError
from stackcheck.files import yamlfile
from stackcheck.files.border import Closed

OWN = Path(__file__).with_name("scaling.yaml")
# YAML's numbers arrive as text, as everywhere in this project.
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=10_000_000)]
Sentence = Annotated[str, Field(min_length=1, max_length=300)]


class CurveFile(Closed):
    """As `scaling.Curve`."""

    latency_s: NotNegative
    bytes_per_s: Positive


class ClusterFile(Closed):
    """As `scaling.Cluster`, with the source of each figure."""

    gpus_per_node: Count
    inside: CurveFile
    between: CurveFile
    chip_spread: NotNegative
    contention: Annotated[float, Field(ge=0, le=1)]
    sources: Mapping[Literal["inside", "between", "chip_spread", "contention"], Sentence]

    def cluster(self) -> scaling.Cluster:
        """The model's own."""
        return scaling.Cluster(
            gpus_per_node=self.gpus_per_node,
            inside=scaling.Curve(**self.inside.model_dump()),
            between=scaling.Curve(**self.between.model_dump()),
            chip_spread=self.chip_spread,
            contention=self.contention,
        )


class MeasuredRate(Closed):
    """A rate that was measured here, in tokens/s/GPU; `samples` is the global batch."""

    gpus: Count
    samples: Positive
    rate: Positive
    source: Sentence


class PublishedEfficiency(Closed):
    """An efficiency that others published, against their base."""

    gpus: Count
    base: Count
    efficiency: Annotated[float, Field(gt=0, le=2)]
    source: Sentence


class JobFile(Closed):
    """As `scaling.Job`, with what is known of it."""

    about: Sentence
    cluster: str
    layout: scaling.Layout
    micro_batch: Positive
    tokens_per_sample: Positive
    micro_batch_s: Positive
    optimizer_s: NotNegative
    parameter_bytes: Positive
    gradient_bytes: Positive
    first_bytes: NotNegative
    layers: Count
    tensor: Count = 1
    pipeline: Count = 1
    global_batch: Positive
    source: Sentence
    measured: tuple[MeasuredRate, ...] = ()
    published: tuple[PublishedEfficiency, ...] = ()

    def job(self) -> scaling.PredictedJob:
        """The model's own."""
        names = {"about", "cluster", "tokens_per_sample", "global_batch", "source", "measured", "published"}
        return scaling.PredictedJob(**self.model_dump(exclude=names))


class ScalingFile(Closed):
    """The whole file."""

    schema_: Literal["1"] = Field(alias="schema")
    clusters: Mapping[str, ClusterFile]
    jobs: Mapping[str, JobFile]

    def of(self, name: str) -> tuple[JobFile, scaling.Cluster]:
        """A job and its cluster.

        Raises:
            ConfigurationError: No job has this name.
        """
        if name not in self.jobs:
            raise ConfigurationError(
                "no such job",
                got=name,
                expected=", ".join(self.jobs),
                next_step="python benchmarks/scaling/scale.py",
            )
        return self.jobs[name], self.clusters[self.jobs[name].cluster].cluster()


def load(path: Path = OWN) -> ScalingFile:
    """Read a file of clusters and jobs.

    Raises:
        ConfigurationError: One line a problem, each with its place.
    """
    value: Mapping[str, Any] = yamlfile.load(path)
    try:
        found = ScalingFile.model_validate(value)
    except ValidationError as error:
        raise yamlfile.problems(error, path.name) from error
    lost = [
        f"{path.name}: jobs.{name}.cluster: {job.cluster} is not under `clusters`"
        for name, job in found.jobs.items()
        if job.cluster not in found.clusters
    ]
    if lost:
        raise yamlfile.refused(lost)
    return found
