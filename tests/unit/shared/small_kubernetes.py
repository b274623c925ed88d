"""A small API server of Kubernetes on loopback, for kubectl: discovery, and objects that are kept in memory.

It is no cluster: nothing schedules and nothing runs. `started` plays the Job controller and the kubelets:
it makes the pods of an Indexed Job with the fields that the real ones set
(https://kubernetes.io/docs/reference/kubernetes-api/).
"""

import contextlib
import json
import re
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import loopback

INDEX = "batch.kubernetes.io/job-completion-index"
VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
CORE = {"services": ("Service", True), "pods": ("Pod", True), "nodes": ("Node", False)}
PATH = re.compile(r"/(?:api/v1|apis/[^/]+/[^/]+)(?:/namespaces/([^/]+))?/(\w+)(?:/([^/]+))?$")


def _listing(version: str, kinds: dict[str, tuple[str, bool]]) -> dict[str, Any]:
    found = [
        {"name": name, "singularName": kind.lower(), "kind": kind, "namespaced": inside, "verbs": VERBS}
        for name, (kind, inside) in kinds.items()
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": found}


def _group(name: str, version: str) -> dict[str, Any]:
    one = {"groupVersion": f"{name}/{version}", "version": version}
    return {"name": name, "versions": [one], "preferredVersion": one}


DISCOVERY: dict[str, dict[str, Any]] = {
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {
        "kind": "APIGroupList",
        "apiVersion": "v1",
        "groups": [_group("batch", "v1"), _group("jobset.x-k8s.io", "v1alpha2")],
    },
    "/api/v1": _listing("v1", CORE),
    "/apis/batch/v1": _listing("batch/v1", {"jobs": ("Job", True)}),
    "/apis/jobset.x-k8s.io/v1alpha2": _listing("jobset.x-k8s.io/v1alpha2", {"jobsets": ("JobSet", True)}),
}


class Api:
    """The objects of a cluster, by resource and name."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, dict[str, Any]]] = {}
        self.asked: list[str] = []
        self.events: list[tuple[str, dict[str, Any]]] = []  # resource and event; its version is its place
        self.oldest = 0  # a watch from an earlier version is answered 410 Gone
        self.cuts = 0  # how often all watches were ended
        self.put("namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "gpus"}})

    def put(self, resource: str, document: dict[str, Any]) -> None:
        there, name = self.objects.setdefault(resource, {}), document["metadata"]["name"]
        self.changed(resource, "MODIFIED" if name in there else "ADDED", document)
        there[name] = document

    def changed(self, resource: str, kind: str, document: dict[str, Any]) -> None:
        document["metadata"]["resourceVersion"] = str(len(self.events) + 1)
        self.events.append((resource, {"type": kind, "object": document}))

    def compact(self) -> None:
        """Forget the events, and end every watch, as an API server that begins again."""
        self.oldest, self.cuts = len(self.events), self.cuts + 1

    def watched(self, url: str) -> Iterator[bytes]:
        """The lines of a watch, until somebody cuts it."""
        place, query = urlsplit(url).path, parse_qs(urlsplit(url).query)
        match, at, cuts = PATH.match(place), int(query["resourceVersion"][0]), self.cuts
        self.asked.append(f"WATCH {place}")
        assert match is not None
        if at < self.oldest:
            yield json.dumps({"type": "ERROR", "object": _status(410, "Expired", "too old")}).encode() + b"\n"
            return
        while self.cuts == cuts:
            while at < len(self.events):
                resource, event = self.events[at]
                at += 1
                if resource == match[2] and _selected(event["object"], query):
                    yield json.dumps(event).encode() + b"\n"
            time.sleep(0.02)

    def node(self, name: str, zone: str, *, ready: bool = True) -> None:
        labels = {"topology.kubernetes.io/zone": zone, "agentpool": "gpus"}
        condition = {"type": "Ready", "status": "True" if ready else "Unknown", "message": "kubelet stopped"}
        kind = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
        self.put("nodes", {**kind, "status": {"conditions": [condition]}})

    def started(
        self, job: dict[str, Any], rank: int, node: str, state: dict[str, Any], **status: Any
    ) -> None:
        """The pod of one index, on a node, in a state of its container."""
        template = job["spec"]["template"]
        image = template["spec"]["containers"][0]["image"]
        told = {"name": "suites", "image": image, "imageID": image, "state": state}
        self.put(
            "pods",
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": f"{job['metadata']['name']}-{rank}-x7k2p",
                    "labels": template["metadata"]["labels"],
                    "annotations": {INDEX: str(rank)},
                },
                "spec": {"nodeName": node},
                "status": {"phase": "Running", "containerStatuses": [told]} | status,
            },
        )

    def answer(  # noqa: PLR0911  # one answer for each kind of question
        self, method: str, url: str, body: bytes
    ) -> tuple[int, dict[str, Any]]:
        place, query = urlsplit(url).path, parse_qs(urlsplit(url).query)
        self.asked.append(f"{method} {place}")
        if place in DISCOVERY:
            return 200, DISCOVERY[place]
        match = PATH.match(place)
        if match is None:
            return 404, _status(404, "NotFound", f"nothing at {place}")
        _, resource, name = match.groups()
        there = self.objects.setdefault(resource, {})
        if method == "POST":
            document = json.loads(body)
            self.put(resource, document)
            return 201, document
        if name is None:
            meta = {"resourceVersion": str(len(self.events))}
            items = [each for each in there.values() if _selected(each, query)]
            at, most = int(query.get("continue", ["0"])[0]), int(query.get("limit", [str(len(items))])[0])
            if at + most < len(items):
                meta["continue"] = str(at + most)
            return 200, {"kind": "List", "apiVersion": "v1", "metadata": meta, "items": items[at : at + most]}
        if name not in there:
            return 404, _status(404, "NotFound", f'{resource} "{name}" not found')
        if method == "DELETE":
            self.changed(resource, "DELETED", there.pop(name))
            return 200, _status(200, None, "")
        if method == "PATCH":
            _merge(there[name], json.loads(body))
            self.changed(resource, "MODIFIED", there[name])
        return 200, there[name]


def _selected(each: dict[str, Any], query: dict[str, list[str]]) -> bool:
    labels = dict(pair.split("=") for pair in query.get("labelSelector", [""])[0].split(",") if pair)
    name = query.get("fieldSelector", [""])[0].removeprefix("metadata.name=")
    own = each["metadata"]
    return labels.items() <= own.get("labels", {}).items() and name in {"", own["name"]}


def _merge(document: dict[str, Any], change: dict[str, Any]) -> None:
    for name, value in change.items():
        if isinstance(value, dict) and isinstance(document.get(name), dict):
            _merge(document[name], value)
        else:
            document[name] = value


def _status(code: int, reason: str | None, message: str) -> dict[str, Any]:
    word = "Success" if code < 400 else "Failure"
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": word,
        "reason": reason,
        "message": message,
        "code": code,
    }


@contextlib.contextmanager
def running(folder: Path) -> Iterator[tuple[Api, Path]]:
    """A server, and the KUBECONFIG that leads to it."""
    api = Api()

    class Handler(BaseHTTPRequestHandler):
        def _any(self) -> None:
            if "watch=true" in self.path:
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                with contextlib.suppress(OSError):
                    for line in api.watched(self.path):
                        self.wfile.write(line)
                return
            length = int(self.headers.get("Content-Length") or 0)
            code, document = api.answer(self.command, self.path, self.rfile.read(length))
            text = json.dumps(document).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_DELETE = do_PATCH = _any  # noqa: N815  # http.server's names

    config = folder / "kubeconfig"
    with loopback.serving(Handler) as host:
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "small", "cluster": {"server": f"http://{host}"}}],
            "contexts": [{"name": "small", "context": {"cluster": "small", "namespace": "gpus"}}],
            "current-context": "small",
        }
        config.write_text(json.dumps(document))
        yield api, config
