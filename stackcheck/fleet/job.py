"""One job of a fleet: what every node is to run, and the folder where nodes and this host meet.

In: a stack or image of this checkout, and what the user chose. Out: a `Job`, and `job.json` in a folder of
its own on a file system that the nodes see under the same path. A node reads the file and writes below
`attempt-<n>/<rank>/`; nothing that it writes there is trusted before it is judged.
"""

import dataclasses
import datetime as dt
import json
import tempfile
from pathlib import Path
from typing import Literal, Self

from pydantic import AwareDatetime, ConfigDict, PositiveInt, TypeAdapter, ValidationError

from stackcheck.errors import ConfigurationError
from stackcheck.files.atomic import write_atomically
from stackcheck.files.border import Closed, load_json
from stackcheck.fleet.stored import require_store
from stackcheck.imaging.image import Image
from stackcheck.matrix import matrix
from stackcheck.oci.image_layout import ImageLayout
from stackcheck.oci.tags import label, local_name
from stackcheck.policy import Tier  # pydantic reads the annotation
from stackcheck.suite import inputs
from stackcheck.suite import subject as subjects
from stackcheck.suite.run import TIMEOUT_S
from stackcheck.suite.subject import Subject
from stackcheck.vendors import Vendor

FOLDER = Path("build") / "fleet"
SAID = "said"  # in the folder of an attempt: an empty file RANK.STATE of each thing that a node said
EngineName = Literal["slurm", "kubernetes"]
Container = Literal["docker", "podman"]


class Job(Closed, strict=True):
    """What every node runs.

    Attributes:
        accepted_python: Digests of the files that may be the image's Python although no package owns them.
        devices: Number of GPUs that each node has to show; `None`: the number that the stack names.
        stage: Whether the nodes run the suites alone, try their links, or train together.
        array: Whether Slurm starts each node alone, as soon as it is free: an element of a job array.
    """

    id: str  # of this job; also the name of its folder
    name: str  # STACK|IMAGE as the user typed it
    engine: EngineName = "slurm"
    root: str  # the checkout, under the same path on every node
    config_digest: str
    manifest_digest: str
    reference: str  # what the engine of a node calls it
    stack_id: str | None  # the stack that it was built from; None for an image from elsewhere
    vendor: Vendor
    tier: Tier  # how thorough the suites are
    only: str | None = None  # pytest's -k; such a run measures, and never gets a verdict
    inputs: dict[str, str | None]  # digests of suites, trainers, thresholds, matrix and runner
    nodes: PositiveInt  # how many
    accepted_python: tuple[str, ...] = ()
    devices: int | None = None
    container: Container = "docker"
    stage: Literal["alone", "links", "training"] = "alone"
    results: str | None = None  # a URL at which each node stores its result; None: the job's folder
    array: bool = False
    limit_s: PositiveInt  # a node whose run takes longer has failed
    created: AwareDatetime  # when; an older result is of another job

    @property
    def checkout(self) -> Path:
        """`root` as a path."""
        return Path(self.root)

    @property
    def folder(self) -> Path:
        """Where the files of the job are."""
        return Path(self.root) / FOLDER / self.id

    def attempt(self, number: int) -> Path:
        """Where the nodes of one attempt write; a job that was requeued is a new attempt."""
        return self.folder / f"attempt-{number}"

    def save(self) -> None:
        """Write `job.json`, whole or not at all."""
        write_atomically(self.folder / "job.json", (self.model_dump_json(indent=1).encode(),))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read `job.json`.

        Raises:
            ConfigurationError: There is no such file, or another version of stackcheck wrote it.
        """
        return load_json(
            cls,
            folder / "job.json",
            "cannot read what this node is to run",
            expected="the file that `stackcheck fleet run` wrote, under the same path on every node",
            next_step="put the checkout on a file system that every node sees under the same path",
        )


def new_job(  # what a user can choose
    name: str,
    root: Path,
    *,
    job_id: str,
    nodes: int,
    limit_s: int | None = None,
    tier: Tier | None = None,
    only: str | None = None,
    vendor: Vendor | None = None,
    devices: int | None = None,
    container: Container = "docker",
    engine: EngineName = "slurm",
    accepted_python: tuple[str, ...] = (),
    results: str | None = None,
    array: bool = False,
) -> tuple[Job, Subject]:
    """A job for the image that `build` or `test` left in this checkout. Nothing is written.

    Raises:
        ConfigurationError: The image was not built or tested in this checkout, or the checkout has no suites.
    """
    if results is not None:
        require_store(results)
    subject = subject_of(name, root, vendor, accepted_python)
    chosen = tier or subject.policy.certifies[subject.vendor]
    with tempfile.TemporaryDirectory(prefix="stackcheck-fleet-") as scratch:
        frozen = inputs.freeze(root, Path(scratch) / "suite")
    job = Job(
        id=job_id,
        name=name if subjects.is_reference(name) else subject.name,
        root=str(root),
        config_digest=subject.image.config_digest,
        manifest_digest=subject.image.manifest_digest,
        reference=subject.image.reference,
        stack_id=subject.image.stack_id,
        vendor=subject.vendor,
        tier=chosen,
        only=only,
        inputs=frozen.model_dump(),
        nodes=nodes,
        devices=devices if devices is not None else _named_devices(subject),
        container=container,
        engine=engine,
        accepted_python=accepted_python,
        results=results,
        array=array,
        limit_s=limit_s or int(TIMEOUT_S[chosen]),
        created=dt.datetime.now(dt.UTC),
    )
    return job, subject


def subject_of(
    name: str, root: Path, vendor: Vendor | None, accepted_python: tuple[str, ...] = ()
) -> Subject:
    """The image under test, found without an engine: a login node has none.

    The digests in `accepted_python` are for an image that is no stack's.

    Raises:
        ConfigurationError: The image is not in this checkout, or nothing says for which vendor it is.
    """
    image = subjects.find_image(name, root)
    policy = matrix.load_matrix(root / "matrix.yaml").policy
    stack = subjects.find_stack(name, root)
    if stack:
        return subjects.of_stack(stack, image, policy, vendor=vendor)
    # `test` left the id that one engine has for it; every node loads the layout, under this name.
    image = dataclasses.replace(image, reference=local_name(image.stack_id, image.config_digest))
    labelled = subjects.labelled_stack(_labels(image), root, name)
    if labelled is None and vendor is None:
        raise ConfigurationError(
            "nothing says for which GPUs this image is",
            where=name,
            got="no label with a stack; and this host need not be like the nodes",
            expected="--gpu-vendor amd, nvidia or cpu",
            next_step=f"stackcheck fleet run {name} --gpu-vendor nvidia",
        )
    return subjects.of_image(
        image, policy, labelled, name=label(name), vendor=vendor, accepted_python=accepted_python
    )


def _labels(image: Image) -> dict[str, str]:
    config = ImageLayout(image.layout).config()
    found: dict[str, str] = (config.get("config") or {}).get("Labels") or {}
    return found


def _named_devices(subject: Subject) -> int | None:
    """How many devices a node has, where every machine that the stack names has the same number."""
    counts = {machine.count for machine in subject.machines or ()}
    return counts.pop() if len(counts) == 1 and subject.vendor != "cpu" else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeState:
    """What a node says about itself: `state.json` in its folder.

    Attributes:
        state: `running` from its first second; then `ended` (the run came to its end, with a result),
            `failed` (with an error), or `stopped` by a signal.
        result: The digest of the result.json that its own program read and handed over; None from a pod.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    rank: int  # from 0
    node: str
    state: Literal["running", "ended", "failed", "stopped"]
    code: int = 0  # the exit code of the error
    error: str | None = None
    result: str | None = None

    def write(self, folder: Path) -> None:
        """Write the file, whole or not at all; then its name, for one listing of all nodes."""
        write_atomically(folder / "state.json", (json.dumps(dataclasses.asdict(self)).encode(),))
        said = folder.parent / SAID
        said.mkdir(exist_ok=True)
        (said / f"{self.rank}.{self.state}").touch()


_STATE = TypeAdapter(NodeState)


def read_state(folder: Path) -> NodeState | None:
    """What a node says about itself; `None` if it never started, or its file is damaged."""
    try:
        return _STATE.validate_json((folder / "state.json").read_bytes())
    except (OSError, ValidationError):
        return None
