"""How long a fleet's results take. In: a number of nodes. Out: seconds to judge and to keep them, requests.

    python benchmarks/fleet.py [NODES] [RESULT] [HISTORY-INDEX]

Every node has the committed result of a real run (one H200, 508 kB), with figures that differ by half a per
cent, so each judgement looks up real bounds. HISTORY-INDEX is a database URL, such as
postgresql+psycopg://…; by default SQLite. The requests are kubectl's to the API server of the tests, which
has a pod for each node, and answers by pages as a real one does.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import threading
import time
import types
from pathlib import Path
from typing import Any, Self

import psutil

from stackcheck.fleet import run
from stackcheck.fleet.engines import JobState, NodeFacts
from stackcheck.fleet.follow import Followed
from stackcheck.fleet.job import Job, NodeState, read_state
from stackcheck.fleet.kubernetes import Kubernetes
from stackcheck.history.history import History
from stackcheck.imaging.image import Image
from stackcheck.matrix import matrix
from stackcheck.oci.documents import sha256
from stackcheck.suite import inputs
from stackcheck.suite import subject as subjects

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests" / "unit" / "shared"))

import small_kubernetes  # noqa: E402  # of the tests

RESULT = ROOT / "docs" / "results" / "suites-h200-x1-standard.json"
KINDS, RUN_ID = 50, "f" * 32
LOOKS, BETWEEN_S = 10, 5.0  # at the cluster, while all pods end
KEPT = 50  # records: they take longer than the verdicts
DIGEST = "sha256:" + "a" * 64
PYTHON = {
    "path": "/usr/bin/python3",
    "file": "/usr/bin/python3.12",
    "sha256": DIGEST,
    "package": "deb:python3 1",
}


def main() -> None:
    """Make the files, judge them, keep them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", nargs="?", type=int, default=1000, help="nodes")
    parser.add_argument("source", nargs="?", type=Path, default=RESULT, help="the result of each node")
    parser.add_argument("index", nargs="?", help="URL of the history's index [SQLite in a scratch folder]")
    given = parser.parse_args()
    count, source = given.count, given.source
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        for name in ("matrix.yaml", "images", "tests", "trainers"):
            (root / name).symlink_to(ROOT / name)
        job, subject = _job(root, count)
        maker = multiprocessing.Process(target=_leave, args=(job, json.loads(source.read_bytes()), count))
        maker.start()
        maker.join()
        facts = {
            f"n{n:04d}": NodeFacts(name=f"n{n:04d}", rack=f"r{n // 32}", partition="gpu")
            for n in range(count)
        }
        states = {n: state for n in range(count) if (state := read_state(job.attempt(0) / str(n)))}
        over = JobState(phase="ended", word="COMPLETED")
        followed = Followed(state=over, nodes=states, facts=facts)
        before, start, used = _memory_mb(), time.monotonic(), _processor_s()
        with _Peak() as peak:
            done = run.judged(job, "1", subject, followed, history=None)
        wall, cpu = time.monotonic() - start, _processor_s() - used
        reasons = {node.reasons[0][:90] for node in done.nodes if node.reasons}
        assert all(node.figures for node in done.nodes), f"not judged: {sorted(reasons)[:3]}"
        load = os.getloadavg()[0]
        print(f"{count} nodes: judged in {wall:.1f} s, {cpu:.1f} s of processors, load {load:.1f}")
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"{own:.0f} MB at most ({before:.0f} before), each process {peak.mb:.0f}, all {peak.all_mb:.0f}"
        )
        print(f"status {done.status}, {len(done.stragglers)} stragglers, reasons: {sorted(reasons)[:3]}")
        print(_requests(job, root))
        index = given.index or f"sqlite:///{root / 'index.sqlite'}"
        start, used = time.monotonic(), _processor_s()
        some = job.model_copy(update={"nodes": min(count, KEPT)})
        run.judged(some, "1", subject, followed, history=History(str(root / "records"), index))
        wall, cpu = time.monotonic() - start, _processor_s() - used
        kind = index.partition(":")[0]
        print(f"judged and kept {min(count, KEPT)} in {wall:.1f} s, {cpu:.1f} s of a processor ({kind})")


def _memory_mb() -> float:
    return psutil.Process().memory_info().rss / 2**20


class _Peak:
    """The most memory that one of the processes below this one had, and all with this one; twice a second."""

    def __enter__(self) -> Self:
        self.mb, self.all_mb, self._over = 0.0, 0.0, threading.Event()
        self._looks = threading.Thread(target=self._look)
        self._looks.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.5):
            found = []
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    found.append(child.memory_info().rss / 2**20)
            self.mb = max(self.mb, *found, 0.0)
            self.all_mb = max(self.all_mb, _memory_mb() + sum(found))

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._looks.join()


def _processor_s() -> float:
    """Of this process, those that it started, and those that the server of processes started."""
    servers = (child.cpu_times() for child in psutil.Process().children())
    return sum(os.times()[:4]) + sum(sum(server[:4]) for server in servers)


def _requests(job: Job, root: Path) -> str:
    """What kubectl asks while the pods of a job end between two looks, as `fleet run` looks at them."""
    name, names = f"stackcheck-{job.id}", [f"n{rank:05d}" for rank in range(job.nodes)]
    labels = {
        "metadata": {"labels": {"stackcheck.fleet": job.id}},
        "spec": {"containers": [{"image": f"registry@{DIGEST}"}]},
    }
    document: dict[str, Any] = {"metadata": {"name": name}, "spec": {"template": labels}, "status": {}}
    with small_kubernetes.running(root) as (api, config):
        os.environ["KUBECONFIG"] = str(config)
        api.put("jobs", document)
        for rank, node in enumerate(names):
            api.node(node, f"zone{rank // 32}")
            api.started(document, rank, node, {"running": {}})
        engine = Kubernetes(manifests=types.SimpleNamespace(jobset=False))
        start = time.monotonic()
        for look in range(1 + LOOKS):
            engine.state(name)
            seen = engine.node_states(job, 0)
            engine.nodes(names)
            if look == 0:
                first, first_s = len(api.asked), time.monotonic() - start
            for rank in range(look, job.nodes if look < LOOKS else 0, LOOKS):
                api.started(document, rank, names[rank], {"terminated": {"exitCode": 1}})
            time.sleep(BETWEEN_S)
        seconds, later = time.monotonic() - start - first_s, len(api.asked) - first
        ended = sum(state.state == "ended" for state in seen.values())
        for one in engine._watched.values():
            one.close()
    return (
        f"API: {first} requests of the first look, {first_s:.2f} s; while {ended} of {len(names)} pods ended "
        f"{later} in {seconds:.0f} s, {later / seconds:.2f} a second"
    )


def _job(root: Path, count: int) -> tuple[Job, subjects.Subject]:
    image = Image(
        stack_id=None,
        reference="registry.example.org/team/image:1",
        config_digest=DIGEST,
        manifest_digest=DIGEST,
        layout=root / "oci",
        size_bytes=1,
        layers=(),
        reused=True,
        seconds=0,
    )
    policy = matrix.load_matrix(root / "matrix.yaml").policy
    subject = subjects.of_image(image, policy, None, name=image.reference, vendor="nvidia")
    job = Job(
        id="00000000",
        name=image.reference,
        root=str(root),
        config_digest=DIGEST,
        manifest_digest=DIGEST,
        reference=image.reference,
        stack_id=None,
        vendor="nvidia",
        tier="standard",
        inputs=inputs.freeze(ROOT, root / "frozen").as_json(),
        nodes=count,
        limit_s=60,
        created=dt.datetime.now(dt.UTC),
    )
    return job, subject


def _leave(job: Job, document: dict[str, object], count: int) -> None:
    """The files of each node; of KINDS kinds, as each takes longer to make than to judge."""
    noise = random.Random(1)
    now = dt.datetime.now(dt.UTC).isoformat()
    image = {"reference": job.reference, "config_digest": DIGEST, "manifest_digest": DIGEST}
    told = {"run_id": RUN_ID, "tier": "standard", "stack_id": None, "image": image, "inputs": job.inputs}
    host = json.loads(json.dumps(document["host"]))
    same = told | {"host": host, "interpreter": PYTHON, "started": now, "finished": now}
    same["seen_devices"] = [device["id"] for device in host["devices"]]
    bodies = []
    for _ in range(min(count, KINDS)):
        factor, checks = noise.gauss(1.0, 0.005), json.loads(json.dumps(document["checks"]))
        for check in checks:
            for metric in check["metrics"]:
                metric["value"] = None if metric["value"] is None else metric["value"] * factor
        bodies.append(json.dumps(document | same | {"checks": checks}, indent=1).encode())
    about, machine = json.dumps(told | {"interpreter": PYTHON}).encode(), json.dumps(host)
    for rank in range(count):
        folder, own = job.attempt(0) / str(rank), f"{rank:032x}".encode()
        folder.mkdir(parents=True)
        body = bodies[rank % KINDS].replace(RUN_ID.encode(), own)
        (folder / "result.json").write_bytes(body)
        (folder / "run.json").write_bytes(about.replace(RUN_ID.encode(), own))
        (folder / "host.json").write_text(machine)
        NodeState(rank=rank, node=f"n{rank:04d}", state="ended", result=sha256(body)).write(folder)


if __name__ == "__main__":
    main()
