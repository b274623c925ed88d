"""What Kubernetes is asked for: an Indexed Job with a headless Service, or a JobSet. In: a job. Out: YAML.

Each pod is one node and runs the image itself, by digest, with the command of one machine. Suites and
run.json come from the job's folder, which the pods see through a volume.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from stackcheck import vendors
from stackcheck.engine import launch_lines
from stackcheck.engine.container import USER_ENV
from stackcheck.errors import ConfigurationError
from stackcheck.fleet.rendezvous import JOB, NODES, SERVICE
from stackcheck.suite import inputs, run, steering

if TYPE_CHECKING:
    from stackcheck.fleet.job import Job
    from stackcheck.suite.results import ReportedInterpreter

LABEL = "stackcheck.fleet"
HOSTNAME = "kubernetes.io/hostname"
REPLICATED = "nodes"
RANK = "STACKCHECK_RANK"
JOBSET = "jobset.x-k8s.io/v1alpha2"
# https://kueue.sigs.k8s.io/docs/tasks/run/jobs/ and …/docs/concepts/topology_aware_scheduling/
QUEUE, TOPOLOGY = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/podset-preferred-topology"


@dataclass(frozen=True, kw_only=True)
class Manifests:
    """What the manifests of a cluster have in common.

    Attributes:
        claim: A PersistentVolumeClaim that holds the checkout; None: the nodes see its path themselves.
        queue: Kueue's LocalQueue, which starts the job once it has quota for all nodes; None: no Kueue.
        topology: The label of nodes whose values Kueue keeps together (a rack's), where it can.
    """

    repository: str  # HOST/REPO that has the image; the manifest names it by its digest
    python: ReportedInterpreter  # the image's Python, identified on this host
    declared: tuple[str, ...] = ()  # names of the variables in the image's ENV
    claim: str | None = None
    jobset: bool = False  # whether to make a JobSet in place of a Job
    nodes_named: tuple[str, ...] = ()  # only nodes of these names; empty: any
    queue: str | None = None
    topology: str | None = None

    def render(self, job: Job) -> str:
        """The manifests: a headless Service and an Indexed Job; or a JobSet, which makes a Service. Pure."""
        documents = [self._jobset(job)]
        if not self.jobset:
            documents = [launch_lines.service(_metadata(job), {LABEL: job.id}), self._job(job)]
        remarks = [
            f"# {job.name}: {job.tier} suites on {job.nodes} nodes",
            f"# image config {job.config_digest}",
            "# Who leaves no result has failed; one pod that fails does not end the others.",
        ]
        return "\n".join(remarks) + "\n" + yaml.safe_dump_all(documents, sort_keys=False, width=110)

    def _jobset(self, job: Job) -> dict[str, Any]:
        spec = self._job(job)["spec"]
        del spec["template"]["spec"]["subdomain"]  # JobSet sets its own
        spec.pop("suspend", None)  # Kueue starts the JobSet, and that its Jobs
        return {
            "apiVersion": JOBSET,
            "kind": "JobSet",
            "metadata": _metadata(job, self.queue),
            "spec": self._suspended()
            | {
                "network": {"enableDNSHostnames": True, "subdomain": name_of(job)},
                "failurePolicy": {"maxRestarts": 0},
                "replicatedJobs": [{"name": REPLICATED, "replicas": 1, "template": {"spec": spec}}],
            },
        }

    def _job(self, job: Job) -> dict[str, Any]:
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": _metadata(job, self.queue),
            "spec": self._suspended()
            | {
                "completionMode": "Indexed",
                "completions": job.nodes,
                "parallelism": job.nodes,
                "backoffLimitPerIndex": 0,
                "maxFailedIndexes": job.nodes,
                "template": {"metadata": self._pod_metadata(job), "spec": self._pod(job)},
            },
        }

    def _suspended(self) -> dict[str, Any]:
        return {"suspend": True} if self.queue else {}

    def _pod_metadata(self, job: Job) -> dict[str, Any]:
        together = {"annotations": {TOPOLOGY: self.topology}} if self.topology else {}
        return {"labels": {LABEL: job.id}, **together}

    def _pod(self, job: Job) -> dict[str, Any]:
        user = steering.uid()
        return launch_lines.pod(
            self._container(job),
            self._mounts(job),
            {"name": "job", **self._source(job)},
            shm=str(run.SHM_SIZE_BYTES[job.vendor]),
            capabilities={"drop": ["ALL"]},
            activeDeadlineSeconds=job.limit_s,
            subdomain=name_of(job),
            affinity=self._affinity(job),
            **self._tolerations(job),
            securityContext={"runAsUser": user, "runAsGroup": user, "runAsNonRoot": True},
        )

    def _tolerations(self, job: Job) -> dict[str, Any]:
        """GPU nodes often carry a taint of their plug-in's name, so that only pods with GPUs go there."""
        resource = vendors.module(job.vendor).launch_words().resource
        found = [{"key": resource, "operator": "Exists", "effect": "NoSchedule"}]
        return {"tolerations": found} if resource else {}

    def _affinity(self, job: Job) -> dict[str, Any]:
        """One pod on each node; and only on the nodes that the user named."""
        alone = [{"labelSelector": {"matchLabels": {LABEL: job.id}}, "topologyKey": HOSTNAME}]
        found: dict[str, Any] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": alone}}
        if self.nodes_named:
            named = {"key": HOSTNAME, "operator": "In", "values": list(self.nodes_named)}
            terms = {"nodeSelectorTerms": [{"matchExpressions": [named]}]}
            found["nodeAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
        return found

    def _source(self, job: Job) -> dict[str, Any]:
        if self.claim:
            return {"persistentVolumeClaim": {"claimName": self.claim}}
        return {"hostPath": {"path": str(job.folder), "type": "Directory"}}

    def _below(self, job: Job) -> str:
        """The job's folder inside the volume, as the beginning of a subPath."""
        if not self.claim:
            return ""
        return f"{job.folder.relative_to(job.checkout)}/"

    def _container(self, job: Job) -> dict[str, Any]:
        resource = vendors.module(job.vendor).launch_words().resource
        if resource and not job.devices:
            raise ConfigurationError(
                "nothing says how many GPUs a node has",
                where=job.name,
                expected="--gpus-per-node N: the device plug-in gives a pod only what it asks for",
                next_step="repeat the command with --gpus-per-node 8",
            )
        return {
            "name": "suites",
            "image": f"{self.repository}@{job.manifest_digest}",
            "imagePullPolicy": "IfNotPresent",
            "command": [self.python.path],
            "args": list(run.command(job.vendor, job.tier, job.only)),
            "workingDir": "/tmp",  # noqa: S108  # the container's own
            "env": self._variables(job),
            "resources": {"limits": {resource: job.devices} if resource else {}},
        }

    def _mounts(self, job: Job) -> list[dict[str, Any]]:
        """The suites and run.json of the job's folder, and the folder that takes the result."""
        below = self._below(job)
        own = f"{below}attempt-0/$({RANK})"
        return [
            *(
                {"name": "job", "mountPath": f"/stackcheck/{name}", "subPath": f"{below}suite/{name}"}
                | {"readOnly": True}
                for name in ("tests", "trainers", inputs.RUNNER)
            ),
            {"name": "job", "mountPath": "/stackcheck/run.json", "subPathExpr": f"{own}/run.json"}
            | {"readOnly": True},
            {"name": "job", "mountPath": "/stackcheck/out", "subPathExpr": f"{own}/out"},
        ]

    def _variables(self, job: Job) -> list[dict[str, Any]]:
        """As on one machine. A variable of the image cannot be removed here, so it becomes empty.

        Those that choose devices are the device plug-in's.
        """
        # A JobSet names its Job, and so its pods, after itself, the replicated job and that one's index.
        own = f"{name_of(job)}-{REPLICATED}-0" if self.jobset else name_of(job)
        names = {SERVICE: name_of(job), JOB: own, NODES: str(job.nodes)}
        values = steering.environment(self.declared, job.vendor, USER_ENV) | names
        return [
            launch_lines.from_annotation(RANK, launch_lines.INDEX),
            *(
                {"name": name, "value": value or ""}
                for name, value in values.items()
                if not vendors.hides_devices(name)
            ),
        ]


def name_of(job: Job) -> str:
    """The name of the objects of a job."""
    return f"stackcheck-{job.id}"


def _metadata(job: Job, queue: str | None = None) -> dict[str, Any]:
    labels = {LABEL: job.id, "app.kubernetes.io/name": "stackcheck-fleet"} | ({QUEUE: queue} if queue else {})
    return {"name": name_of(job), "labels": labels}
