"""What Kubernetes is asked for: an Indexed Job with a headless Service, or a JobSet. In: a job. Out: YAML.

Each pod is one node and runs the image itself, by digest, with the command of one machine. Suites and
run.json come from the job's folder, which the pods see through a volume.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from stackcheck import vendors
from stackcheck.engine.container import USER_ENV
from stackcheck.errors import ConfigurationError
from stackcheck.fleet.rendezvous import JOB, NODES, SERVICE
from stackcheck.suite import container_user, inputs, run, steering

if TYPE_CHECKING:
    from stackcheck.fleet.job import Job
    from stackcheck.suite.interpreter import Interpreter

LABEL = "stackcheck.fleet"
INDEX = "batch.kubernetes.io/job-completion-index"
HOSTNAME = "kubernetes.io/hostname"
REPLICATED = "nodes"
RANK = "STACKCHECK_RANK"
JOBSET = "jobset.x-k8s.io/v1alpha2"


@dataclass(frozen=True, kw_only=True)
class Manifests:
    """What the manifests of a cluster have in common.

    Attributes:
        repository: HOST/REPO that has the image; the manifest names it by its digest.
        python: The image's Python, identified on this host.
        declared: Names of the variables in the image's ENV.
        claim: A PersistentVolumeClaim that holds the checkout; None: the nodes see its path themselves.
        jobset: Whether to make a JobSet in place of a Job.
        nodes_named: Only nodes of these names; empty: any.
    """

    repository: str
    python: Interpreter
    declared: tuple[str, ...] = ()
    claim: str | None = None
    jobset: bool = False
    nodes_named: tuple[str, ...] = ()

    def render(self, job: Job) -> str:
        """The manifests: a headless Service and an Indexed Job; or a JobSet, which makes a Service. Pure."""
        documents = [self._jobset(job)] if self.jobset else [_service(job), self._job(job)]
        remarks = [
            f"# {job.name}: {job.tier} suites on {job.nodes} nodes",
            f"# image config {job.config_digest}",
            "# Who leaves no result has failed; one pod that fails does not end the others.",
        ]
        return "\n".join(remarks) + "\n" + yaml.safe_dump_all(documents, sort_keys=False, width=110)

    def _jobset(self, job: Job) -> dict[str, Any]:
        spec = self._job(job)["spec"]
        del spec["template"]["spec"]["subdomain"]  # JobSet sets its own
        return {
            "apiVersion": JOBSET,
            "kind": "JobSet",
            "metadata": _metadata(job),
            "spec": {
                "network": {"enableDNSHostnames": True, "subdomain": name_of(job)},
                "failurePolicy": {"maxRestarts": 0},
                "replicatedJobs": [{"name": REPLICATED, "replicas": 1, "template": {"spec": spec}}],
            },
        }

    def _job(self, job: Job) -> dict[str, Any]:
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": _metadata(job),
            "spec": {
                "completionMode": "Indexed",
                "completions": job.nodes,
                "parallelism": job.nodes,
                "backoffLimitPerIndex": 0,
                "maxFailedIndexes": job.nodes,
                "template": {"metadata": {"labels": {LABEL: job.id}}, "spec": self._pod(job)},
            },
        }

    def _pod(self, job: Job) -> dict[str, Any]:
        user = container_user.uid()
        spec: dict[str, Any] = {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "activeDeadlineSeconds": job.limit_s,
            "subdomain": name_of(job),
            "affinity": self._affinity(job),
            **self._tolerations(job),
            "securityContext": {"runAsUser": user, "runAsGroup": user, "runAsNonRoot": True},
            "containers": [self._container(job)],
            "volumes": [
                {"name": "job", **self._source(job)},
                {"name": "tmp", "emptyDir": {}},
                {
                    "name": "shm",
                    "emptyDir": {"medium": "Memory", "sizeLimit": str(run.SHM_SIZE_BYTES[job.vendor])},
                },
            ],
        }
        return spec

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
        mounts = {
            "suite/tests": "tests",
            "suite/trainers": "trainers",
            f"suite/{inputs.RUNNER}": inputs.RUNNER,
        }
        below = self._below(job)
        own = f"{below}attempt-0/$({RANK})"
        return {
            "name": "suites",
            "image": f"{self.repository}@{job.manifest_digest}",
            "imagePullPolicy": "IfNotPresent",
            "command": [self.python.path],
            "args": list(run.command(job.vendor, job.tier, job.only)),
            "workingDir": "/tmp",  # noqa: S108  # the container's own
            "env": self._variables(job),
            "resources": {"limits": {resource: job.devices} if resource else {}},
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
            "volumeMounts": [
                *(
                    {
                        "name": "job",
                        "mountPath": f"/stackcheck/{to}",
                        "subPath": f"{below}{what}",
                        "readOnly": True,
                    }
                    for what, to in mounts.items()
                ),
                {
                    "name": "job",
                    "mountPath": "/stackcheck/run.json",
                    "subPathExpr": f"{own}/run.json",
                    "readOnly": True,
                },
                {"name": "job", "mountPath": "/stackcheck/out", "subPathExpr": f"{own}/out"},
                {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  # as above
                {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108  # as above
            ],
        }

    def _variables(self, job: Job) -> list[dict[str, Any]]:
        """As on one machine. A variable of the image cannot be removed here, so it becomes empty.

        Those that choose devices are the device plug-in's.
        """
        # A JobSet names its Job, and so its pods, after itself, the replicated job and that one's index.
        own = f"{name_of(job)}-{REPLICATED}-0" if self.jobset else name_of(job)
        names = {SERVICE: name_of(job), JOB: own, NODES: str(job.nodes)}
        values = steering.environment(self.declared, job.vendor, USER_ENV) | names
        field = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
        return [
            {"name": RANK, "valueFrom": field},
            *(
                {"name": name, "value": value or ""}
                for name, value in values.items()
                if not vendors.hides_devices(name)
            ),
        ]


def name_of(job: Job) -> str:
    """The name of the objects of a job."""
    return f"stackcheck-{job.id}"


def _metadata(job: Job) -> dict[str, Any]:
    return {"name": name_of(job), "labels": {LABEL: job.id, "app.kubernetes.io/name": "stackcheck-fleet"}}


def _service(job: Job) -> dict[str, Any]:
    """Names for the pods, from their first second: ranks look for each other before they are ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job),
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {LABEL: job.id}},
    }
