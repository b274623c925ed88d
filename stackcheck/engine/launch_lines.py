"""Lines and manifests that start a user's own job in a certified image, and the parts of a fleet's. Pure.

In: a `LaunchedJob`. Out: text for docker, podman, Apptainer, Slurm or Kubernetes, for the user to read,
change and start. It asks for what `stackcheck run` gives a container. The network of the host, InfiniBand and
unlimited pinned memory are asked for only where several nodes work together.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import yaml

from stackcheck.engine.container import OWN_NAME, USER_ENV
from stackcheck.errors import ConfigurationError
from stackcheck.vendors import LaunchWords

Form = Literal["docker", "podman", "apptainer", "slurm", "pyxis", "kubernetes"]
FORMS: tuple[Form, ...] = get_args(Form)
WORKSPACE = "/workspace"
SHM_GIB = 16
PORT = 29500  # torchrun's own default
NAME = "stackcheck-job"
# What the Pod Security level `restricted` asks of a pod; it allows no network of the host and no IPC_LOCK.
RESTRICTED = {
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "runAsGroup": 1000,
    "fsGroup": 1000,
    "seccompProfile": {"type": "RuntimeDefault"},
}
REQUESTED_CPUS, REQUESTED_GIB = 4, 16  # for each device, to begin with
RDMA_RESOURCE = "rdma/hca"
INFINIBAND = "/dev/infiniband"
INDEX = "batch.kubernetes.io/job-completion-index"  # the annotation with the rank of a pod
# podman refuses keep-id to root, who needs no mapping of users.
PODMAN_USER = '$([ "$(id -u)" = 0 ] && echo host || echo keep-id)'


@dataclass(frozen=True, kw_only=True)
class LaunchedJob:
    """What a user wants to start."""

    image: str  # HOST/REPO@sha256:…, or a name that the engine of the host knows
    command: tuple[str, ...]
    words: LaunchWords  # how the engines are asked for the devices (`vendors.module(vendor).launch_words()`)
    devices: int  # GPUs of each node
    nodes: int = 1  # how many nodes work together
    certified_for: str = ""  # the machine that the certificate names, for a remark
    in_registry: bool = True  # whether `image` is in a registry; else only the engine of this host has it
    name: str = NAME  # of the job in Slurm and Kubernetes


def render(form: Form, job: LaunchedJob) -> str:
    """The text for one form, with an end of line.

    Raises:
        ConfigurationError: The form fetches the image from a registry, and it is in none.
    """
    if form == "slurm" or form == "pyxis":  # noqa: PLR1714  # so that the types are narrowed
        return slurm_script(job, pyxis=form == "pyxis")
    if form == "kubernetes":
        return kubernetes_manifest(job)
    return _remarks(job, form) + container_line(form, job) + "\n"


def container_line(form: Literal["docker", "podman", "apptainer"], job: LaunchedJob) -> str:
    """One shell line that runs the command on this node, with the current folder as /workspace.

    With several nodes it needs the variables NODE_RANK and MASTER_ADDR, which torchrun gets as its own.
    """
    if form == "apptainer":
        source = f"docker://{job.image}" if job.in_registry else f"docker-daemon://{job.image}"
        return _joined(_apptainer(job), source, job.command)
    if form == "podman":
        own = [f'--userns="{PODMAN_USER}"', *job.words.podman]
    else:
        own = ['--user="$(id -u):$(id -g)"', *job.words.docker]
    return _joined([f"{form} run", *_common(job), *own], job.image, job.command)


def rendezvous(job: LaunchedJob) -> dict[str, str]:
    """The variables that torchrun reads as its own options, as shell words; none on one node."""
    if job.nodes == 1:
        return {}
    return {
        "PET_NNODES": str(job.nodes),
        "PET_NPROC_PER_NODE": str(job.devices),
        "PET_NODE_RANK": '"${NODE_RANK:?}"',
        "PET_MASTER_ADDR": '"${MASTER_ADDR:?}"',
        "PET_MASTER_PORT": str(PORT),
    }


def slurm_script(job: LaunchedJob, *, pyxis: bool = False) -> str:
    """A batch script: one task for each node, which runs the image with Apptainer, or with pyxis and enroot.

    Raises:
        ConfigurationError: The image is in no registry.
    """
    _require_registry(job, "pyxis" if pyxis else "slurm")
    head: dict[str, object] = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "exclusive": True,
    }
    if job.words.resource:
        head["gpus-per-node"] = job.devices
    lines = ["#!/bin/sh", *sbatch_lines(head)]
    lines += [line for line in _remarks(job, "slurm").splitlines() if line]
    if job.nodes > 1:
        first = '"$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"'
        lines += ["# MASTER_ADDR must be the node's name on the network that the ranks use"]
        lines += [f"MASTER_ADDR={first}", "export MASTER_ADDR", "ulimit -l unlimited"]
    head_line = "srun --kill-on-bad-exit=1"
    if pyxis:
        return "\n".join([*lines, f"{head_line} {_pyxis(job)}", ""])
    # Each task is a shell of its node: it sets its own rank.
    task = ("NODE_RANK=$SLURM_NODEID\n" if job.nodes > 1 else "") + container_line("apptainer", job)
    return "\n".join([*lines, f"{head_line} sh -c {shlex.quote(task)}", ""])


def kubernetes_manifest(job: LaunchedJob) -> str:
    """A Job; for several nodes an Indexed Job and the headless Service that gives its pods names.

    Raises:
        ConfigurationError: The image is in no registry.
    """
    _require_registry(job, "kubernetes")
    metadata = {"name": job.name}
    many = {"completions": job.nodes, "parallelism": job.nodes, "completionMode": "Indexed"}
    own = {**(many if job.nodes > 1 else {}), "backoffLimit": 0, "template": {"spec": _pod(job)}}
    documents = [service(metadata, {"job-name": job.name})] if job.nodes > 1 else []
    documents += [{"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": own}]
    remarks = ["# /workspace is the PersistentVolumeClaim `workspace`: make it, or name your own"]
    remarks += ["# runAsUser must own it; cpu and memory are a beginning: change them to what the job needs"]
    if job.nodes > 1:
        remarks += ["# no Pod Security level but the most open one allows the network of the host"]
        remarks += [f"# {RDMA_RESOURCE} is InfiniBand, under the name that your RDMA device plugin gives it"]
    text = yaml.safe_dump_all(documents, sort_keys=False, width=110)
    return _remarks(job, "kubernetes") + "\n".join(remarks) + "\n" + text


def _remarks(job: LaunchedJob, form: Form) -> str:
    lines = [f"# certified for {job.certified_for}: use such nodes"] if job.certified_for else []
    if form == "podman":
        lines.append("# --init needs the package catatonit, podman without root the package uidmap")
    if job.nodes > 1 and form in {"docker", "podman", "apptainer"}:
        lines += [f"# on each of {job.nodes} nodes, with NODE_RANK=0 … {job.nodes - 1} and MASTER_ADDR set"]
    return "".join(f"{line}\n" for line in lines)


def _joined(options: list[str], image: str, command: tuple[str, ...]) -> str:
    """Each option on a line of its own, for a person to read and change; then the image and the command."""
    last = " ".join(map(shlex.quote, (image, *command)))
    return " \\\n  ".join([*options, last])


def _common(job: LaunchedJob) -> list[str]:
    """What docker and podman are asked for alike."""
    network = ["--network=host", "--ulimit=memlock=-1", f"--device={INFINIBAND}"]
    alone = ["--network=none", f"--hostname={OWN_NAME['hostname']}"]
    alone += [f"--add-host={name}:{address}" for name, address in OWN_NAME["extra_hosts"].items()]
    variables = {name: shlex.quote(value) for name, value in USER_ENV.items()} | rendezvous(job)
    return [
        *("--rm", "--init", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges"),
        *("--tmpfs=/tmp:rw,exec,nosuid,nodev,mode=1777", f"--shm-size={SHM_GIB}g"),
        *(alone if job.nodes == 1 else network),
        *(f"--env={name}={value}" for name, value in variables.items()),
        *(f'--volume="$PWD:{WORKSPACE}"', f"--workdir={WORKSPACE}"),
    ]


def _apptainer(job: LaunchedJob) -> list[str]:
    """Apptainer shares the host's network and limits anyway; `--containall` keeps home and variables out."""
    variables = {name: shlex.quote(value) for name, value in USER_ENV.items() if name != "HOME"}
    infiniband = [f"--bind={INFINIBAND}"] if job.nodes > 1 else []
    return [
        *("apptainer exec", "--containall", *job.words.apptainer, *infiniband),
        *(f'--bind="$PWD:{WORKSPACE}"', f"--pwd={WORKSPACE}"),
        *(f"--env={name}={value}" for name, value in (variables | rendezvous(job)).items()),
    ]


def _pyxis(job: LaunchedJob) -> str:
    """The options of srun and the command; enroot wants HOST#REPO, and shares the network of the host."""
    host, _, path = job.image.partition("/")
    given = {name: shlex.quote(value) for name, value in USER_ENV.items()} | rendezvous(job)
    given |= {"PET_NODE_RANK": "$SLURM_NODEID"} if job.nodes > 1 else {}
    setting = " ".join(f"{name}={value}" for name, value in given.items())
    task = f"export {setting}; exec {shlex.join(job.command)}"
    infiniband = f",{INFINIBAND}" if job.nodes > 1 else ""
    options = [
        f"--container-image={shlex.quote(f'docker://{host}#{path}')}",
        f'--container-mounts="$PWD:{WORKSPACE}{infiniband}"',
        *(f"--container-workdir={WORKSPACE}", "--no-container-mount-home", "--container-readonly"),
    ]
    return _joined(options, "sh", ("-c", task))


def sbatch_lines(options: Mapping[str, object]) -> list[str]:
    """The `#SBATCH` lines of some options; True is an option without a value, None is left out."""
    stated = {name: value for name, value in options.items() if value is not None}
    return [f"#SBATCH --{name}{'' if value is True else f'={value}'}" for name, value in stated.items()]


def service(metadata: Mapping[str, Any], selector: Mapping[str, str]) -> dict[str, Any]:
    """A headless Service: names for pods from their first second, as ranks look for each other early."""
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def pod(
    container: Mapping[str, Any],
    mounts: Sequence[Mapping[str, Any]],
    volume: Mapping[str, Any],
    *,
    shm: str,
    capabilities: Mapping[str, Any],
    **more: object,
) -> dict[str, Any]:
    """The spec of a pod that writes to its volume, /tmp and shared memory alone, with `more` of its own."""
    rights = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": capabilities}
    own = [
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  # the container's own
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108  # as above
    ]
    return {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        **more,
        "containers": [{**container, "securityContext": rights, "volumeMounts": [*mounts, *own]}],
        "volumes": [
            volume,
            {"name": "tmp", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": shm}},
        ],
    }


def from_annotation(name: str, annotation: str) -> dict[str, Any]:
    """A variable whose value is an annotation of its pod."""
    field = {"fieldPath": f"metadata.annotations['{annotation}']"}
    return {"name": name, "valueFrom": {"fieldRef": field}}


def _pod(job: LaunchedJob) -> dict[str, Any]:
    together: dict[str, object] = {
        "hostNetwork": True,
        "dnsPolicy": "ClusterFirstWithHostNet",
        "subdomain": job.name,
    }
    # Kubernetes has no limit of pinned memory to raise
    adds = {"add": ["IPC_LOCK"]} if job.nodes > 1 else {}
    return pod(
        _container(job),
        [{"name": "workspace", "mountPath": WORKSPACE}],
        {"name": "workspace", "persistentVolumeClaim": {"claimName": "workspace"}},
        shm=f"{SHM_GIB}Gi",
        capabilities={"drop": ["ALL"], **adds},
        securityContext=RESTRICTED,
        **(together if job.nodes > 1 else {}),
    )


def _container(job: LaunchedJob) -> dict[str, Any]:
    limits: dict[str, int] = {job.words.resource: job.devices} if job.words.resource else {}
    if job.nodes > 1:
        limits |= {RDMA_RESOURCE: 1}
    requests = {"cpu": str(REQUESTED_CPUS * job.devices), "memory": f"{REQUESTED_GIB * job.devices}Gi"}
    return {
        "name": "job",
        "image": job.image,
        "command": list(job.command),
        "workingDir": WORKSPACE,
        "env": _pod_variables(job),
        "resources": {"limits": limits, "requests": requests},
    }


def _pod_variables(job: LaunchedJob) -> list[dict[str, Any]]:
    given = rendezvous(job) | ({"PET_MASTER_ADDR": f"{job.name}-0.{job.name}"} if job.nodes > 1 else {})
    plain = {name: value for name, value in (USER_ENV | given).items() if name != "PET_NODE_RANK"}
    found: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in plain.items()]
    if job.nodes > 1:
        found.append(from_annotation("PET_NODE_RANK", INDEX))
    return found


def _require_registry(job: LaunchedJob, form: Form) -> None:
    if not job.in_registry:
        raise ConfigurationError(
            f"{form} needs an image that is in a registry",
            got=job.image,
            expected="HOST/REPO@sha256:…",
            next_step="stackcheck promote REF --to HOST/REPO, then print with that reference",
        )
