"""Manifests by the schemas of Kubernetes, and the real kubectl against a small API server.

No kubelet runs here: what pods would leave is written by the test (docs/guides/fleet.md says what was not
run on a cluster).
"""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import result_files
import small_fleet
import small_kubernetes
from small_checkout import CPU_STACK, FakeEngine, call
from small_checkout import make_checkout as make_small_checkout
from small_kubernetes import Api
from stackcheck.fleet.job import Job
from stackcheck.fleet.kubernetes import Kubernetes
from stackcheck.fleet.manifests import QUEUE, Manifests
from stackcheck.suite.results import ReportedInterpreter

pytestmark = pytest.mark.integration
KUBERNETES = "1.33"
PYTHON = ReportedInterpreter(**result_files.INTERPRETER)
REPOSITORY = "registry.example.org/team/stacks"


@pytest.fixture
def checkout(tmp_path, monkeypatch, capsys) -> Path:
    """A small checkout with a built image, and an engine that only writes files."""
    root = make_small_checkout(tmp_path, monkeypatch)
    fake = FakeEngine()
    monkeypatch.setattr("stackcheck.cli.build.connected", lambda _report, **_options: fake)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(root)
    assert call(capsys, "build", CPU_STACK).code == 0
    return root


@pytest.fixture
def cluster(tmp_path, kubectl: Path, monkeypatch) -> Iterator[Api]:  # noqa: ARG001
    with small_kubernetes.running(tmp_path) as (api, config):
        monkeypatch.setenv("KUBECONFIG", str(config))
        yield api


def job_of(checkout: Path, vendor: str) -> Job:
    job, _ = small_fleet.make_job(
        checkout, 4, engine="kubernetes", vendor=vendor, devices=0 if vendor == "cpu" else 8
    )
    return job


@pytest.mark.parametrize(
    ("vendor", "resource"), [("cpu", None), ("amd", "amd.com/gpu"), ("nvidia", "nvidia.com/gpu")]
)
def test_the_schemas_of_kubernetes_accept_the_manifests(vendor, resource, checkout, tmp_path, validators):
    job = job_of(checkout, vendor)
    text = Manifests(repository=REPOSITORY, python=PYTHON, claim="checkout", nodes_named=("a", "b")).render(
        job
    )
    kueue = {"queue": "gpus", "topology": "example.org/rack"}
    jobset = Manifests(repository=REPOSITORY, python=PYTHON, jobset=True, **kueue).render(job)
    queued = Manifests(repository=REPOSITORY, python=PYTHON, **kueue).render(job)
    (wrapped,) = yaml.safe_load_all(jobset)
    (inner,) = wrapped["spec"]["replicatedJobs"]
    spec = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "inner"}, **inner["template"]}
    path = tmp_path / "job.yaml"
    path.write_text(f"{text}---\n{yaml.safe_dump(spec)}---\n{queued}")
    waiting = [wrapped, [*yaml.safe_load_all(queued)][1]]
    assert [(one["spec"]["suspend"], one["metadata"]["labels"][QUEUE]) for one in waiting] == [
        (True, "gpus")
    ] * 2
    assert "suspend" not in text
    assert "suspend" not in inner["template"]["spec"]
    assert "podset-preferred-topology: example.org/rack" in queued
    program = [
        str(validators / "kubernetes-validate"),
        "--strict",
        "--kubernetes-version",
        KUBERNETES,
        str(path),
    ]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    service, batch = yaml.safe_load_all(text)
    (container,) = batch["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"{REPOSITORY}@{job.manifest_digest}"
    assert container["resources"]["limits"] == ({resource: 8} if resource else {})
    assert service["spec"]["clusterIP"] == "None"
    assert "hostNetwork" not in text, "one node alone needs no network of the host"
    assert (wrapped["apiVersion"], wrapped["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert f"stackcheck-{job.id}-nodes-0" in jobset, "the name by which the ranks find pod 0"
    path.write_text(text.replace("backoffLimitPerIndex", "backofLimitPerIndex"))
    assert subprocess.run(program, capture_output=True, check=False).returncode != 0, "the schema can say no"


def leave(job: Job, rank: int, *changes: tuple[str, str]) -> None:
    """What the container of a pod writes: result.json in its own folder, about its run.json."""
    folder = small_fleet.leave(job, rank, *changes)
    document = json.loads((folder / "result.json").read_text())
    told = json.loads((folder / "prepared.json").read_text())
    (folder / "out" / "result.json").write_text(
        json.dumps(document | {name: told[name] for name in ("run_id", "interpreter")})
    )
    (folder / "run.json").write_text(json.dumps(told))
    for name in ("state.json", "host.json", "result.json"):
        (folder / name).unlink()


def playing(api: Api, play: Callable[[dict[str, Any]], None]) -> Callable[..., tuple[int, dict[str, Any]]]:
    """The server, whose controllers act when they first see a job."""
    real, seen = api.answer, set[str]()

    def answer(method: str, url: str, body: bytes) -> tuple[int, dict[str, Any]]:
        found = real(method, url, body)
        for name, job in list(api.objects.get("jobs", {}).items()):
            if method == "GET" and name not in seen:
                seen.add(name)
                play(job)
        return found

    return answer


def test_pods_are_followed_and_judged_through_kubectl(checkout, cluster, capsys, monkeypatch):
    for number in range(5):
        cluster.node(f"gpu-{number}", f"rack{number // 2}", ready=number != 4)

    def play(document: dict[str, Any]) -> None:
        (folder,) = (checkout / "build" / "fleet").iterdir()
        job = small_fleet.Job.load(folder)
        for rank in range(5):
            place = job.attempt(0) / str(rank)
            (place / "run.json").replace(place / "prepared.json")
        leave(job, 0)
        leave(job, 1, ("test_kernels.py::test_gemm", "failed"))
        leave(job, 2)
        for rank, code in ((0, 0), (1, 1), (2, 0), (3, 137)):
            end = {"terminated": {"exitCode": code, "reason": "OOMKilled" if code == 137 else "Completed"}}
            cluster.started(document, rank, f"gpu-{rank}", end)
        pods = cluster.objects["pods"]
        (other,) = (pod for name, pod in pods.items() if "-2-" in name)
        other["status"]["containerStatuses"][0]["imageID"] = f"{REPOSITORY}@sha256:{'e' * 64}"
        cluster.started(document, 4, "gpu-4", {"running": {"startedAt": "2026-01-02T03:04:05Z"}})

    monkeypatch.setattr(cluster, "answer", playing(cluster, play))
    arguments = ("--engine", "kubernetes", "--repository", REPOSITORY, "--drain", "--json")
    done = call(capsys, "fleet", "run", CPU_STACK, "--nodes", "5", *arguments)
    assert done.code == 6, done.err
    nodes = {node["rank"]: node for node in json.loads(done.out)["nodes"]}
    assert {rank: node["status"] for rank, node in nodes.items()} == {0: "MEASURED"} | dict.fromkeys(
        (1, 2, 3, 4), "FAILED"
    )
    assert not list((checkout / "build" / "history").rglob("result.json")), "figures of an image's own word"
    words = {
        0: "certifies nothing",
        1: "test_gemm failed",
        2: "another image",
        3: "OOMKilled",
        4: "not ready: kubelet stopped",
    }
    for rank, text in words.items():
        assert text in nodes[rank]["reasons"][0], nodes[rank]
    assert (nodes[3]["rack"], nodes[3]["partition"]) == ("rack1", "gpus")
    assert not cluster.objects["jobs"], "deleted: a node that is gone would hold it for ever"
    cordoned = [
        name for name, node in cluster.objects["nodes"].items() if node.get("spec", {}).get("unschedulable")
    ]
    assert cordoned == ["gpu-1", "gpu-2", "gpu-3", "gpu-4"]
    assert (
        "another image"
        in cluster.objects["nodes"]["gpu-2"]["metadata"]["annotations"]["stackcheck.fleet/reason"]
    )


def until(told: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not told():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_objects_are_listed_once_and_then_watched(cluster):
    engine = Kubernetes(manifests=Manifests(repository=REPOSITORY, python=PYTHON))
    for number in range(3):
        cluster.node(f"gpu-{number}", "rack0")
    names = [f"gpu-{number}" for number in range(4)]
    alive = lambda: {name: fact.alive for name, fact in engine.nodes(names).items()}  # noqa: E731
    assert alive() == dict.fromkeys(names[:3], True)
    for _ in range(50):
        engine.nodes(names)
    cluster.node("gpu-1", "rack0", ready=False)
    cluster.node("gpu-3", "rack0")
    until(lambda: alive() == {"gpu-0": True, "gpu-1": False, "gpu-2": True, "gpu-3": True})
    asked = [each for each in cluster.asked if each.endswith("/nodes")]
    assert asked == ["GET /api/v1/nodes", "WATCH /api/v1/nodes"]
    cluster.changed("nodes", "DELETED", cluster.objects["nodes"].pop("gpu-0"))
    until(lambda: "gpu-0" not in alive())


def test_a_version_that_the_server_forgot_is_listed_again(cluster):
    engine = Kubernetes(manifests=Manifests(repository=REPOSITORY, python=PYTHON))
    cluster.node("gpu-0", "rack0")
    assert engine.nodes(["gpu-0"])["gpu-0"].alive
    until(lambda: "WATCH /api/v1/nodes" in cluster.asked)
    del cluster.objects["nodes"]["gpu-0"]  # an event that nobody will tell
    cluster.events += [("pods", {"type": "ADDED", "object": {"metadata": {"name": "x"}}})] * 5
    cluster.compact()
    until(lambda: not engine.nodes(["gpu-0"]))
    lists = [each for each in cluster.asked if each == "GET /api/v1/nodes"]
    assert len(lists) == 2, "one more list, for the answer 410"


def test_a_cluster_that_is_not_there_is_an_error_with_a_next_step(checkout, cluster, capsys, monkeypatch):
    del checkout
    monkeypatch.setattr(cluster, "answer", lambda *_asked: (503, {"message": "etcd is full"}))
    arguments = ("--engine", "kubernetes", "--repository", REPOSITORY)
    done = call(capsys, "fleet", "run", CPU_STACK, "--nodes", "2", *arguments)
    assert done.code == 4
    assert "next: kubectl cluster-info" in done.err
