"""Predict the speed of a training job on many GPUs.

In: a job of the scaling model, GPU counts. Out: predicted, measured, published rates.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import scaling
import scaling_data
import scaling_plot
import typer

from stackcheck.cli.options import AsJson, new_app
from stackcheck.cli.output import print_json, print_note, print_table
from stackcheck.errors import ConfigurationError
from stackcheck.files.atomic import write_atomically

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scaling_data import JobFile

app = new_app()

PARTS = ("compute", "slowest", "bubble", "optimizer", "contention", "exposed")
BAR = 20  # characters of an ideal efficiency
COLUMNS = ("GPUS", "TOKENS/S/GPU", "EFFICIENCY", "OF IDEAL", "WHERE A STEP GOES", "WAITS FOR")

JobName = Annotated[
    str | None, typer.Argument(metavar="JOB", help="A job of the file.", show_default="list the jobs")
]
Gpus = Annotated[str, typer.Option("--gpus", metavar="N,N,…", help="Counts; the first is the base.")]
Batch = Annotated[
    float | None,
    typer.Option(
        "--batch",
        metavar="SAMPLES",
        min=1,
        help="Global batch; with --weak, that of each replica.",
        show_default="the job's own",
    ),
]
Weak = Annotated[bool, typer.Option("--weak", help="The same batch for each replica, not for all together.")]
File = Annotated[
    Path | None,
    typer.Option("--file", metavar="FILE", help="Clusters and jobs (YAML).", show_default="ours"),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        help="Also draw the efficiency against the ideal (SVG).",
        show_default="no picture",
    ),
]


@app.command("scale")
def scale(
    job: JobName = None,
    *,
    gpus: Gpus = "1,2,4,8,64,1024,16384",
    batch: Batch = None,
    weak: Weak = False,
    file: File = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Predict the speed of a training job on many GPUs, beside what was measured and published.

    A prediction can warn. It certifies nothing.
    """
    known = scaling_data.load(file or scaling_data.OWN)
    if job is None:
        jobs = {name: one.about for name, one in known.jobs.items()}
        print_json({"jobs": jobs}) if as_json else print_table(("JOB", "WHAT"), list(jobs.items()))
        return
    chosen, cluster = known.of(job)
    asked = _counts(gpus)
    counts = _of_a_replica(asked, chosen.job().replica)
    found = _predicted(chosen, cluster, counts, batch, weak=weak)
    if small := [count for count in asked if count not in counts]:
        print_note(f"left out, because one replica needs {chosen.job().replica} GPUs: {small}")
    if large := [count for count in counts if count > found[-1].gpus]:
        print_note(
            f"left out, because the global batch has less than one micro-batch for each replica: {large}"
        )
    beside = [*_compared(chosen, cluster)]
    if plot:
        _draw(plot, chosen, cluster, found, weak=weak)
    if as_json:
        print_json(
            {"job": job, "source": chosen.source, "predicted": _as_json(chosen, found), "compared": beside}
        )
        return
    base = found[0]
    print_table(COLUMNS, [_row(chosen, one, base) for one in found])
    print("\nPredicted; docs/reference/scaling.md has the formulas. What is known beside it:")
    names = ("what", "got", "predicted", "difference", "source")
    print_table([name.upper() for name in names], [[str(one[name]) for name in names] for one in beside])


def _draw(
    file: Path, chosen: JobFile, cluster: scaling.Cluster, found: list[scaling.Prediction], *, weak: bool
) -> None:
    """Write the picture. Every point is relative to the first count of the prediction."""
    dots = [*_dots(chosen, cluster, found, weak=weak)]
    base = f"{found[0].gpus} {'GPU' if found[0].gpus == 1 else 'GPUs'}"
    title = f"{chosen.about}: {'weak' if weak else 'strong'} scaling against {base}"
    write_atomically(file, (scaling_plot.plot(title, dots).encode(),))
    print_note(f"drawn: {file}")


def _dots(
    chosen: JobFile, cluster: scaling.Cluster, found: list[scaling.Prediction], *, weak: bool
) -> Iterator[scaling_plot.Dot]:
    """Measured rates of the same batch as the prediction: of each GPU in weak scaling, else of all.

    A published efficiency has a base of its own, which the prediction compares with the base of this tool.
    """
    job, base = chosen.job(), found[0]
    for one in found:
        yield scaling_plot.Dot(gpus=one.gpus, efficiency=scaling.efficiency(one, base), kind="predicted")
    for row in chosen.measured:
        if row.samples == (base.samples * row.gpus / base.gpus if weak else base.samples):
            share = row.rate / _rate(chosen, base)
            yield scaling_plot.Dot(gpus=row.gpus, efficiency=share, kind="measured")
    for other in () if weak else chosen.published:
        start = scaling.strong(job, cluster, (other.base, base.gpus), chosen.global_batch)
        share = other.efficiency * scaling.efficiency(start[0], start[1])
        yield scaling_plot.Dot(gpus=other.gpus, efficiency=share, kind="published")


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigurationError("--gpus is not a list of counts", got=text, expected="1,2,8") from error
    if min(counts) < 1:
        raise ConfigurationError("--gpus has a count below 1", got=text, expected="1,2,8")
    return counts


def _of_a_replica(counts: tuple[int, ...], replica: int) -> tuple[int, ...]:
    """The counts that are enough for one replica."""
    kept = tuple(count for count in counts if count >= replica)
    if not kept:
        got = ",".join(map(str, counts))
        raise ConfigurationError("no count is enough for one replica", got=got, expected=f"{replica} or more")
    return kept


def _predicted(
    chosen: JobFile, cluster: scaling.Cluster, counts: tuple[int, ...], batch: float | None, *, weak: bool
) -> list[scaling.Prediction]:
    job = chosen.job()
    if weak:
        return scaling.weak(job, cluster, counts, batch or chosen.micro_batch * chosen.pipeline)
    samples = batch or chosen.global_batch
    most = int(samples / chosen.micro_batch) * job.replica
    fitting = tuple(count for count in counts if count <= most) or counts[:1]
    return scaling.strong(job, cluster, fitting, samples)


def _row(chosen: JobFile, one: scaling.Prediction, base: scaling.Prediction) -> tuple[str, ...]:
    share = scaling.efficiency(one, base)
    parts = {name: getattr(one, f"{name}_s") / one.step_s for name in PARTS}
    where = ", ".join(f"{name} {100 * part:.1f} %" for name, part in parts.items() if part >= 0.0005)
    return (
        str(one.gpus),
        f"{_rate(chosen, one):,.{0 if _rate(chosen, one) > 100 else 2}f}",
        f"{100 * share:.1f} %",
        "█" * round(BAR * min(share, 1.0)),
        where,
        one.limit or "-",
    )


def _rate(chosen: JobFile, one: scaling.Prediction) -> float:
    return one.samples_per_s_per_gpu * chosen.tokens_per_sample


def _compared(chosen: JobFile, cluster: scaling.Cluster) -> Iterator[dict[str, Any]]:
    job = chosen.job()
    for row in chosen.measured:
        rate = _rate(chosen, scaling.predict(job, cluster, row.gpus, row.samples))
        yield {
            "what": f"{row.gpus} GPUs, batch {row.samples:g}, measured",
            "got": f"{row.rate:,.0f} tokens/s/GPU",
            "predicted": f"{rate:,.0f}",
            "difference": f"{100 * (rate / row.rate - 1):+.1f} %",
            "source": row.source,
        }
    for other in chosen.published:
        one, base = scaling.strong(job, cluster, (other.gpus, other.base), chosen.global_batch)
        share = scaling.efficiency(one, base)
        yield {
            "what": f"{other.gpus} against {other.base} GPUs, published",
            "got": f"{100 * other.efficiency:.1f} %",
            "predicted": f"{100 * share:.1f} %",
            "difference": f"{100 * (share - other.efficiency):+.1f} points",
            "source": other.source,
        }


def _as_json(chosen: JobFile, found: list[scaling.Prediction]) -> list[dict[str, Any]]:
    return [
        {
            "gpus": one.gpus,
            "samples": one.samples,
            "tokens_per_s_per_gpu": _rate(chosen, one),
            "efficiency": scaling.efficiency(one, found[0]),
            "step_s": one.step_s,
            **{f"{name}_s": getattr(one, f"{name}_s") for name in PARTS},
            "limit": one.limit,
        }
        for one in found
    ]


if __name__ == "__main__":
    app()
