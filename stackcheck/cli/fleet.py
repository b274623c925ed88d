"""The verb `fleet`. In: a stack, a number of nodes. Out: nodes x checks, outliers first, and an exit code."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, cast

import typer

from stackcheck.cli import build as building
from stackcheck.cli import fleet_outcome
from stackcheck.cli import options as opt
from stackcheck.cli.output import Progress, print_json
from stackcheck.errors import ChecksFailedError, ConfigurationError, MachineUnfitError
from stackcheck.fleet.engines import FleetEngine, LinkedEngine
from stackcheck.fleet.follow import JobPatience
from stackcheck.fleet.manifests import Manifests
from stackcheck.matrix import matrix
from stackcheck.suite import interpreter
from stackcheck.suite.subject import Subject

if TYPE_CHECKING:
    from stackcheck.fleet.job import Job
    from stackcheck.fleet.run import FleetRun

app = opt.new_app()
fleet = opt.new_app()
app.add_typer(fleet, name="fleet")

# How often the engine is asked: a thousand nodes every ten seconds, as each answer takes it longer.
LEAST_POLL_S, POLL_S_OF_A_NODE = 2.0, 0.01
EXIT_CODES = {"FAILED": ChecksFailedError.exit_code, "UNFIT": MachineUnfitError.exit_code}

Nodes = Annotated[int, opt.option("--nodes N", "How many nodes.", min=1)]
EngineName = Annotated[
    Literal["slurm", "kubernetes"], opt.option("--engine", "What starts the job on the nodes.")
]
Only = Annotated[
    str | None, opt.option("--only EXPRESSION", "Only these checks (pytest -k); never a verdict.")
]
Gpus = Annotated[int | None, opt.option("--gpus-per-node N", "GPUs of a node.", "as the stack names")]
ContainerName = Annotated[
    Literal["docker", "podman"], opt.option("--container", "What starts the container on a Slurm node.")
]
Partition = Annotated[str | None, opt.option("--partition NAME", "Slurm's partition.")]
OnlyNodes = Annotated[list[str] | None, opt.option("--node NAME", "Use this node; may be repeated.")]
Exclude = Annotated[list[str] | None, opt.option("--exclude NAME", "Leave this node out; may be repeated.")]
Lines = Annotated[
    list[str] | None, opt.option("--sbatch OPTION", "One more option of sbatch; may be repeated.")
]
Repository = Annotated[
    str | None,
    opt.option(
        "--repository HOST/REPO",
        "Where Kubernetes' nodes pull the image, by digest.",
        "`publish` in matrix.yaml",
    ),
]
Claim = Annotated[
    str | None,
    opt.option(
        "--claim NAME",
        "The PersistentVolumeClaim that holds the checkout.",
        "none: the nodes see the checkout's path",
    ),
]
Namespace = Annotated[str | None, opt.option("--namespace NAME", "Kubernetes' namespace.", "kubectl's")]
AsJobSet = Annotated[bool, opt.option("--jobset", "Make a JobSet in place of an Indexed Job.")]
Queue = Annotated[str | None, opt.option("--queue NAME", "Kueue's LocalQueue; the job waits there.", "none")]
Topology = Annotated[
    str | None,
    opt.option("--topology LABEL", "With --queue: the node label that Kueue keeps together.", "none"),
]
RackLabel = Annotated[
    str, opt.option("--rack-label LABEL", "The label of a Kubernetes node that names its rack.")
]
Results = Annotated[
    str | None,
    opt.option(
        "--results URL",
        "Each node stores its result there (Slurm), such as s3://BUCKET/FOLDER.",
        "the job's folder",
    ),
]
AsArray = Annotated[
    bool, opt.option("--array", "As a job array (Slurm): each node is tested as soon as it is free.")
]
Limit = Annotated[int | None, opt.option("--limit SECONDS", "Longest run of a node.", "by the tier", min=1)]
StartLimit = Annotated[
    int, opt.option("--start-limit SECONDS", "Longest wait for a node's first message.", min=1)
]
QueueLimit = Annotated[
    int | None, opt.option("--queue-limit SECONDS", "Longest wait of the job for nodes.", "none", min=1)
]
WithLinks = Annotated[
    bool,
    opt.option(
        "--links",
        "Then try the links of the nodes that passed (Slurm): pairs, then all; with the host's network.",
    ),
]
WithTraining = Annotated[
    bool,
    opt.option(
        "--training",
        "Then train the tiny Llama on all nodes that passed (Slurm): FSDP and HSDP; a lost node is "
        "named, and the rest goes on from the checkpoint.",
    ),
]
Drain = Annotated[bool, opt.option("--drain", "Drain the nodes that did not pass, with the reason.")]
Python = Annotated[str, opt.option("--python PATH", "The nodes' Python with stackcheck.", "this one")]


@fleet.callback()
def many_machines() -> None:
    """Run the suites on many machines, through the engine that the cluster has."""


@fleet.command("run")
def run_fleet(
    name: opt.Name,
    *,
    nodes: Nodes,
    engine: EngineName = "slurm",
    tier: opt.Tier = None,
    only: Only = None,
    accept_python: opt.AcceptPython = None,
    vendor: opt.Vendor = None,
    gpus: Gpus = None,
    container: ContainerName = "docker",
    partition: Partition = None,
    node: OnlyNodes = None,
    exclude: Exclude = None,
    lines: Lines = None,
    repository: Repository = None,
    claim: Claim = None,
    namespace: Namespace = None,
    jobset: AsJobSet = False,
    queue: Queue = None,
    topology: Topology = None,
    rack_label: RackLabel = "topology.kubernetes.io/zone",
    results: Results = None,
    array: AsArray = False,
    limit: Limit = None,
    start_limit: StartLimit = 600,
    queue_limit: QueueLimit = None,
    links: WithLinks = False,
    training: WithTraining = False,
    drain: Drain = False,
    python: Python = sys.executable,
    as_json: opt.AsJson = False,
    dry_run: opt.DryRun = False,
    root: opt.Root = opt.HERE,
) -> None:
    """Run the suites alone on each of N nodes, judge every node here, and show who stands out.

    The image is the one that `build` or `test` left in this checkout, which every node has to see under the
    same path. Exit 0: every node passed; 6: one failed, or left no result; 9: none failed, and one is unfit.
    """
    what = {"tier": tier, "only": only, "vendor": vendor, "devices": gpus}
    where: dict[str, Any] = {"nodes": nodes, "limit_s": limit, "container": container, "engine": engine}
    where |= {"results": results, "array": array}
    _require_slurm(engine, results=results, array=array, links=links, training=training)
    job, subject = _new_job(name, root.resolve(), accept_python, what | where)
    if engine == "slurm":
        chosen = _slurm(partition, node, exclude, lines, python)
    else:
        own = {"claim": claim, "jobset": jobset, "nodes_named": tuple(node or ())}
        own |= {"queue": queue, "topology": topology}
        chosen = _kubernetes(subject, repository, namespace, rack_label, own)
    if dry_run:
        print(chosen.render(job), end="")
        return
    patience = _patience(nodes, start_limit, queue_limit)
    _run_stages(job, subject, chosen, patience, links=links, training=training, drain=drain, as_json=as_json)


def _new_job(
    name: str, root: Path, accept_python: list[str] | None, chosen: dict[str, Any]
) -> tuple[Job, Subject]:
    from stackcheck.fleet.job import new_job

    accepted = opt.accepted_python(accept_python, name)
    return new_job(name, root, job_id=secrets.token_hex(4), accepted_python=accepted, **chosen)


def _require_slurm(engine: str, **chosen: object) -> None:
    """Refuse what needs stackcheck on the node, outside the image."""
    for name in (each for each, value in chosen.items() if value and engine != "slurm"):
        raise ConfigurationError(
            "a pod has no program outside the image that could serve this option",
            where=f"--{name}",
            got=f"--engine {engine}",
            expected="--engine slurm",
            next_step=f"repeat the command without --{name}",
        )


def _patience(nodes: int, start_s: int, queue_s: int | None) -> JobPatience:

    return JobPatience(poll_s=max(LEAST_POLL_S, nodes * POLL_S_OF_A_NODE), start_s=start_s, queue_s=queue_s)


def _run_stages(
    job: Job,
    subject: Subject,
    engine: FleetEngine,
    patience: JobPatience,
    *,
    links: bool,
    training: bool,
    drain: bool,
    as_json: bool,
) -> NoReturn:
    """The suites alone on each node, then what was asked for of links, training and draining; exit."""
    from stackcheck.fleet import run

    report = Progress()
    done = _run_alone(job, subject, engine, patience, report)
    if links:
        done = run.with_links(done, cast("LinkedEngine", engine), patience, report)
    if training:
        done = run.with_training(done, cast("LinkedEngine", engine), patience, report)
    if drain:
        _drain(done, engine, report)
    _end(done, as_json=as_json)


def _end(done: FleetRun, *, as_json: bool) -> NoReturn:
    print_json(done.as_json()) if as_json else fleet_outcome.show(done)
    raise typer.Exit(EXIT_CODES.get(done.status, 0))


def _slurm(
    partition: str | None,
    named: list[str] | None,
    exclude: list[str] | None,
    lines: list[str] | None,
    python: str,
) -> FleetEngine:
    from stackcheck.fleet.slurm import Slurm

    return Slurm(
        partition=partition,
        nodelist=tuple(named or ()),
        exclude=tuple(exclude or ()),
        options=tuple(lines or ()),
        program=(python, "-m", "stackcheck.fleet.node"),
    )


def _kubernetes(
    subject: Subject, repository: str | None, namespace: str | None, rack_label: str, own: dict[str, Any]
) -> FleetEngine:
    """Kubernetes' side. The image's Python is identified by the engine of this host: no pod can do it."""
    from stackcheck.fleet.kubernetes import Kubernetes, require_registry
    from stackcheck.fleet.node import load_image

    target = repository or matrix.load_matrix(subject_root(subject) / "matrix.yaml").publish
    require_registry(target)
    engine = building.connected(Progress(), builds=False)
    load_image(subject.image, engine, Progress())
    manifests = Manifests(
        repository=target,
        python=interpreter.find(subject.image.reference, engine, subject.accepted_python),
        declared=tuple(engine.inspect(subject.image.reference).env),
        **own,
    )
    return Kubernetes(manifests=manifests, namespace=namespace, rack=rack_label)


def subject_root(subject: Subject) -> Path:
    """The checkout of an image: it is in build/<name>/oci there."""
    return subject.image.layout.parents[2]


def _run_alone(
    job: Job, subject: Subject, engine: FleetEngine, patience: JobPatience, report: Callable[[str], None]
) -> FleetRun:
    from stackcheck.fleet import run
    from stackcheck.history.history import open_history

    job_id = run.start(job, engine, report)
    return run.complete(
        job, job_id, subject, engine, patience=patience, history=open_history(job.checkout), report=report
    )


@fleet.command("collect")
def collect_again(
    job_id: Annotated[str, opt.argument("JOB", "The id of a fleet run: its folder in build/fleet/.")],
    *,
    as_json: opt.AsJson = False,
    root: opt.Root = opt.HERE,
) -> None:
    """Judge again what the nodes of a Slurm run left, for example after `fleet run` itself was killed."""
    from stackcheck.fleet import run
    from stackcheck.history.history import open_history

    base = root.resolve()
    done = run.again(base, job_id, open_history(base))
    _end(done, as_json=as_json)


def _drain(done: FleetRun, engine: FleetEngine, report: Callable[[str], None]) -> None:
    for node in done.nodes:
        if node.status in EXIT_CODES and not node.name.startswith("rank "):
            reason = f"stackcheck {done.job.id}: {node.status}: {node.reasons[0].splitlines()[0][:120]}"
            engine.drain(node.name, reason)
            report(f"{node.name}: drained: {reason}")
