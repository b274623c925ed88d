"""The referrers API of OCI 1.1 in front of a registry that has none, as hosted registries have it.

It passes every request on; a manifest with a `subject` is remembered, answered with `OCI-Subject`, and listed
under /v2/<name>/referrers/<digest> until it is deleted.
"""

import hashlib
import json
import re
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler
from typing import Any

import requests

import loopback

INDEX = "application/vnd.oci.image.index.v1+json"
HOP_BY_HOP = {"transfer-encoding", "content-length", "connection", "accept-encoding", "host"}


class Handler(BaseHTTPRequestHandler):
    upstream = ""
    listed: dict[str, list[dict[str, Any]]]
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # headers and body in one packet: two wait 40 ms for each other

    def pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if match := re.fullmatch(r"/v2/(.+)/referrers/(sha256:[0-9a-f]{64})", self.path.partition("?")[0]):
            self.list_referrers(match[1], match[2])
            return
        names = {name for name in self.headers if name.lower() not in HOP_BY_HOP}
        headers = {name: ", ".join(self.headers.get_all(name, [])) for name in names}  # Go repeats Accept
        answer = requests.request(
            self.command,
            f"http://{self.upstream}{self.path}",
            data=body or None,
            headers={**headers, "Host": self.headers["Host"], "Accept-Encoding": "identity"},
            allow_redirects=False,
            timeout=300,
        )
        extra = self.remember(body) if answer.ok else {}
        length = answer.headers.get("Content-Length", "0") if self.command == "HEAD" else len(answer.content)
        self.reply(answer.status_code, {**answer.headers, **extra}, answer.content, length)

    do_GET = do_HEAD = do_PUT = do_POST = do_PATCH = do_DELETE = pass_on  # noqa: N815

    def list_referrers(self, repository: str, digest: str) -> None:
        found = self.listed.get(f"{repository}@{digest}", [])
        body = json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": found}).encode()
        self.reply(200, {"Content-Type": INDEX}, body, len(body))

    def remember(self, body: bytes) -> dict[str, str]:
        match = re.fullmatch(r"/v2/(.+)/manifests/(.+)", self.path)
        if match and self.command == "DELETE":
            for entries in self.listed.values():
                entries[:] = [entry for entry in entries if entry["digest"] != match[2]]
        document = json.loads(body) if match and self.command == "PUT" else {}
        if not match or "subject" not in document:
            return {}
        digest = "sha256:" + hashlib.sha256(body).hexdigest()
        entries = self.listed.setdefault(f"{match[1]}@{document['subject']['digest']}", [])
        if all(entry["digest"] != digest for entry in entries):
            entry = {"mediaType": document["mediaType"], "digest": digest, "size": len(body)}
            entries.append(entry | {key: document[key] for key in ("artifactType", "annotations")})
        return {"OCI-Subject": document["subject"]["digest"]}

    def reply(self, status: int, headers: dict[str, str], body: bytes, length: str | int) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in HOP_BY_HOP:
                self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def referrers_proxy(upstream: str) -> AbstractContextManager[str]:
    """Serve on a free loopback port; yields HOST:PORT."""
    return loopback.serving(Handler, upstream=upstream, listed={})
