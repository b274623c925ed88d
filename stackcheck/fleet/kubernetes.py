"""Kubernetes: the objects of a job are made, asked and ended through kubectl. In: a job. Out: facts.

The head of the job writes the suites and run.json to the job's folder, and submits `manifests`. What a pod
cannot show is the machine from outside the image: docs/guides/fleet.md says what that means.
"""

import atexit
import json
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stackcheck.engine.launch_lines import INDEX
from stackcheck.errors import ConfigurationError
from stackcheck.files.atomic import write_atomically
from stackcheck.fleet.engines import JobState, NodeFacts, Phase, ask
from stackcheck.fleet.job import Job, NodeState
from stackcheck.fleet.manifests import LABEL, Manifests, name_of
from stackcheck.fleet.watching import Watched
from stackcheck.suite import inputs, steering

MANIFEST = "job.yaml"
ZONE = "topology.kubernetes.io/zone"
POOLS = ("cloud.google.com/gke-nodepool", "eks.amazonaws.com/nodegroup", "agentpool")
# https://docs.pytest.org/en/stable/reference/exit-codes.html; the result says the same, or does not count.
PYTEST_CODES = (0, 1)


@dataclass(frozen=True, kw_only=True)
class Kubernetes:
    """How this cluster is asked."""

    manifests: Manifests
    namespace: str | None = None  # where the objects go; None: kubectl's own
    rack: str = ZONE  # the node label that names a rack
    _watched: dict[str, Watched] = field(default_factory=dict, compare=False, repr=False)
    _fetched: set[tuple[str, int]] = field(default_factory=set, compare=False, repr=False)

    def render(self, job: Job) -> str:
        """The manifests of a job. Pure."""
        return self.manifests.render(job)

    def submit(self, job: Job) -> str:
        """Write the suites, run.json for each rank and the manifests, and create the objects; the job's name.

        Raises:
            EngineError: The cluster refused it, or does not answer.
        """
        inputs.freeze(job.checkout, job.folder / "suite")
        for rank in range(job.nodes):
            self._prepare(job, rank)
        write_atomically(job.folder / MANIFEST, (self.render(job).encode(),))
        # Without validation by the client: old clients do not know new fields, and the server looks anyway.
        self._kubectl("create", "--validate=false", "--filename", str(job.folder / MANIFEST))
        return name_of(job)

    def _prepare(self, job: Job, rank: int) -> None:
        folder, user = job.attempt(0) / str(rank), steering.uid()
        out = folder / "out"
        out.mkdir(parents=True)
        if os.geteuid() == 0:
            os.chown(out, user, user)
        facts = {
            "run_id": uuid.uuid4().hex,
            "tier": job.tier,
            "stack_id": job.stack_id,
            "image": {
                "reference": job.reference,
                "config_digest": job.config_digest,
                "manifest_digest": job.manifest_digest,
            },
            "inputs": job.inputs,
            "interpreter": self.manifests.python.model_dump(exclude_defaults=True),
        }
        write_atomically(folder / "run.json", (json.dumps(facts, indent=2).encode(),))

    def state(self, job_id: str) -> JobState:
        """How the Job or JobSet is now; one that is gone was deleted.

        Raises:
            EngineError: The cluster does not answer.
        """
        group = "jobset.x-k8s.io/v1alpha2" if self.manifests.jobset else "batch/v1"
        kind = "jobsets" if self.manifests.jobset else "jobs"
        found = self._items(f"/apis/{group}", kind, f"fieldSelector=metadata.name%3D{job_id}")
        if not found:
            return JobState(phase="cancelled", word="DELETED", reason="the object is gone")
        return job_state(found[0].get("status") or {}, self._pods(job_id.removeprefix("stackcheck-")))

    def node_states(self, job: Job, attempt: int) -> dict[int, NodeState]:
        """What the pods are, by rank; the result of each is fetched to where the judge looks for it."""
        del attempt  # a pod that failed is not started again
        found = {}
        for pod in self._pods(job.id):
            state = pod_state(pod, job.manifest_digest)
            if state:
                found[state.rank] = state
                folder = job.attempt(0) / str(state.rank)
                source = folder / "out" / "result.json"
                if state.state == "running" or (job.id, state.rank) in self._fetched:
                    continue
                if source.is_file() and not source.is_symlink():
                    shutil.copyfile(source, folder / "result.json", follow_symlinks=False)
                    self._fetched.add((job.id, state.rank))
        return found

    def nodes(self, names: Sequence[str]) -> dict[str, NodeFacts]:
        """What the cluster knows of nodes: readiness, pool, and the label that names the rack.

        Raises:
            EngineError: The cluster does not answer.
        """
        if not names:
            return {}
        wanted = set(names)
        items = (item for item in self._items("/api/v1", "nodes", "") if item["metadata"]["name"] in wanted)
        return {fact.name: fact for fact in (node_facts(item, self.rack) for item in items)}

    def cancel(self, job_id: str) -> None:
        """Delete the objects of a job.

        Raises:
            EngineError: The cluster does not answer.
        """
        kinds = ("jobset",) if self.manifests.jobset else ("job", "service")
        for one in self._watched.values():
            one.close()
        self._watched.clear()
        for kind in kinds:
            self._kubectl("delete", kind, job_id, "--ignore-not-found", "--wait=false")

    def drain(self, node: str, reason: str) -> None:
        """Keep new pods away from a node (cordon), and say why in an annotation.

        Raises:
            EngineError: The cluster refused.
        """
        cordon(node, reason)

    def _pods(self, short: str) -> list[dict[str, Any]]:
        return self._items("/api/v1", "pods", f"labelSelector={LABEL}%3D{short}")

    def _items(self, group: str, kind: str, query: str) -> list[dict[str, Any]]:
        """The objects of a kind, which are listed once: then the server tells what changes."""
        key = f"{kind}?{query}"
        if key not in self._watched:
            place = "" if kind == "nodes" else f"/namespaces/{self._place()}"
            one = Watched(
                path=f"{group}{place}/{kind}",
                query=query,
                ask=lambda url: self._kubectl("get", "--raw", url),
                command=("kubectl",),
            )
            one.start()
            atexit.register(one.close)
            self._watched[key] = one
        return self._watched[key].items()

    def _place(self) -> str:
        chosen = self.namespace or self._kubectl(
            "config", "view", "--minify", "--output=jsonpath={..namespace}"
        )
        return chosen.strip() or "default"

    def _kubectl(self, *words: str) -> str:
        return kubectl(*words, namespace=self.namespace)


def cordon(node: str, reason: str) -> None:
    """Keep new pods away from a node, and say why in an annotation.

    Raises:
        EngineError: The cluster refused.
    """
    kubectl("annotate", "node", node, "--overwrite", f"{LABEL}/reason={reason}")
    kubectl("cordon", node)


def kubectl(*words: str, namespace: str | None = None) -> str:
    """What kubectl prints; raises `EngineError` if it is missing, failed, or does not answer."""
    place = ["--namespace", namespace] if namespace else []
    look = "kubectl cluster-info"
    return ask("Kubernetes", "kubectl", *place, *words, package="kubernetes-client", look=look)


def require_registry(target: str) -> None:
    """Refuse a target that no node can pull from.

    Raises:
        ConfigurationError: It is a folder.
    """
    if target.startswith("oci:"):
        raise ConfigurationError(
            "the nodes of a cluster pull the image from a registry",
            where="--repository",
            got=target,
            expected="HOST/REPO, where the image was published",
            next_step="stackcheck promote REF --to HOST/REPO, then repeat with --repository HOST/REPO",
        )


def job_state(status: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> JobState:
    """The state in the status of a Job or JobSet, and its pods. Pure."""
    conditions = {item["type"]: item for item in status.get("conditions") or () if item["status"] == "True"}
    ended = next((name for name in ("Complete", "Completed", "Failed") if name in conditions), None)
    names = {index: pod["spec"].get("nodeName") for pod in pods if (index := _index(pod)) is not None}
    on = tuple(names[rank] or "" for rank in sorted(names)) if all(names.values()) and names else ()
    reason = conditions[ended].get("reason", "") if ended else ""
    phase: Phase = "running" if any(names.values()) else "waiting"
    if ended:
        phase = "out of time" if reason == "DeadlineExceeded" else "ended"
    return JobState(phase=phase, word=ended or phase.capitalize(), reason=reason, nodes=on)


def pod_state(pod: Mapping[str, Any], manifest_digest: str) -> NodeState | None:
    """What one pod is; None if it never started on a node. Pure."""
    rank, status = _index(pod), pod.get("status") or {}
    node = (pod.get("spec") or {}).get("nodeName") or ""
    if rank is None or not node:
        return None
    told: Mapping[str, Any] = next(iter(status.get("containerStatuses") or ()), {})
    state: Mapping[str, Any] = told.get("state") or {}
    if not {"running", "terminated"} & set(state):
        broken = status.get("phase") == "Failed"
        error = f"the pod failed: {status.get('reason')}: {status.get('message')}"
        return _failed(rank, node, error) if broken else None
    found = str(told.get("imageID", ""))
    if not found.endswith(manifest_digest):
        says = f"the node started another image: {found or 'it names none'}, not {manifest_digest}"
        return _failed(rank, node, says)
    if "running" in state:
        return NodeState(rank=rank, node=node, state="running")
    end = state["terminated"]
    code = int(end["exitCode"])
    if code in PYTEST_CODES and status.get("reason") != "DeadlineExceeded":
        return NodeState(rank=rank, node=node, state="ended", code=code)
    reason = status.get("reason") or end.get("reason") or "no reason given"
    return _failed(rank, node, f"the container ended with exit code {code}: {reason}")


def _failed(rank: int, node: str, error: str) -> NodeState:
    return NodeState(rank=rank, node=node, state="failed", code=6, error=error)


def _index(pod: Mapping[str, Any]) -> int | None:
    text = (pod["metadata"].get("annotations") or {}).get(INDEX)
    return int(text) if text is not None else None


def node_facts(node: Mapping[str, Any], rack: str) -> NodeFacts:
    """What the cluster knows of one node. Pure."""
    labels = node["metadata"].get("labels") or {}
    ready = {item["type"]: item for item in node["status"]["conditions"]}.get("Ready", {})
    alive = ready.get("status") == "True"
    return NodeFacts(
        name=node["metadata"]["name"],
        partition=next((labels[name] for name in POOLS if name in labels), ""),
        rack=labels.get(rack, ""),
        alive=alive,
        words="ready" if alive else f"not ready: {ready.get('message', 'no condition says so')}",
    )
