"""One repository of a registry as a store: plain OCI distribution calls.

In: host and repository. Out: blobs, manifests, tags and referrers of it, as in
https://github.com/opencontainers/distribution-spec/blob/main/spec.md. Layers are streamed both ways.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

import requests

from stackcheck.files import users
from stackcheck.oci.documents import (
    CHUNK_BYTES,
    DOCKER_INDEX,
    DOCKER_MANIFEST,
    MANIFEST_LIMIT_BYTES,
    OCI_INDEX,
    OCI_MANIFEST,
    TIMEOUT_S,
    Descriptor,
    IntegrityError,
    Manifest,
    RegistryError,
    checked,
    is_digest,
)
from stackcheck.oci.patience import Patience
from stackcheck.oci.store import Store
from stackcheck.oci.transport import RETRY_DELAYS_S, Transport
from stackcheck.oci.upload import Uploading

ACCEPT = f"{OCI_MANIFEST}, {OCI_INDEX}, {DOCKER_MANIFEST}, {DOCKER_INDEX}"
OK, CREATED, ACCEPTED, PARTIAL = 200, 201, 202, 206
# A repository that is not there yet has no tags; where a registry cannot list tags, that is an error.
NO_TAGS = (404,)
NO_REFERRERS = DELETE_UNSUPPORTED = (404, 405)
BLOB_UNKNOWN = "MANIFEST_BLOB_UNKNOWN"  # the specification's code
PAGES = 1000  # of tags or referrers


class Repository:
    """One repository of a registry; http only to loopback addresses or on request."""

    def __init__(
        self,
        host: str,
        repository: str,
        *,
        plain_http: bool = False,
        timeout_s: tuple[float, float] = TIMEOUT_S,
        retry_delays_s: tuple[float, ...] = RETRY_DELAYS_S,
        patience: Patience | None = None,
    ) -> None:
        self.target = f"{host}/{repository}"
        if host == "docker.io" and "/" not in repository:
            repository = f"library/{repository}"
        self.host = host
        self.repository = repository
        self._retry_delays_s = retry_delays_s
        self._http = Transport(
            host, plain_http=plain_http, timeout_s=timeout_s, retry_delays_s=retry_delays_s, patience=patience
        )
        self._root = f"{self._http.base}/v2/{repository}"

    def has_blob(self, digest: str) -> bool:
        """Whether the blob is there."""
        return self._http.request("HEAD", self._blob(digest), expected=(200, 404)).status_code == OK

    def read_blob(self, digest: str) -> Iterator[bytes]:
        """The blob's bytes as they arrive, checked after the last one; a broken answer is resumed."""
        return checked(self._chunks(digest), digest, self._blob(digest))

    def write_blob(self, blob: Descriptor, chunks: Callable[[], Iterable[bytes]]) -> None:
        """Upload a blob, whose bytes are checked on their way out; a large one in parts."""
        where = f"{self.target}@{blob.digest}"
        content = functools.partial(checked, digest=blob.digest, where=where, size=blob.size)
        uploading = Uploading(http=self._http, address=f"{self._root}/blobs/uploads/", blob=blob)
        uploading.send(lambda: content(chunks()))

    def mount_blob(self, digest: str, source: Store) -> bool:  # the protocol's signature
        """Use a blob of another repository of the same registry, without moving its bytes."""
        if not isinstance(source, Repository) or source.host != self.host:
            return False
        url = f"{self._root}/blobs/uploads/?mount={digest}&from={source.repository}"
        return self._http.request("POST", url, expected=(201, 202)).status_code == CREATED

    def head_manifest(self, name: str) -> str | None:
        """The digest of a tag as the registry states it; None if it does not state one.

        Nothing is downloaded: Docker Hub limits downloads.
        """
        url = self._manifest(name)
        response = self._http.request("HEAD", url, expected=(200,), headers={"Accept": ACCEPT})
        stated = response.headers.get("Docker-Content-Digest", "")
        return stated if is_digest(stated) else None

    def read_manifest(self, name: str) -> Manifest:
        """The manifest of a tag or digest."""
        url = self._manifest(name)
        response = self._http.request("GET", url, expected=(200,), headers={"Accept": ACCEPT}, stream=True)
        body = self._http.body(response, MANIFEST_LIMIT_BYTES)
        media_type = response.headers.get("Content-Type", "").partition(";")[0].strip()
        manifest = Manifest(media_type=media_type, body=body)
        stated = name if is_digest(name) else response.headers.get("Docker-Content-Digest", manifest.digest)
        if stated != manifest.digest:
            raise IntegrityError(
                "the manifest is not the one that was asked for",
                where=url,
                got=manifest.digest,
                expected=stated,
            )
        return manifest

    def write_manifest(self, manifest: Manifest, name: str) -> bool:
        """Store a manifest under a tag (which moves) or its digest.

        A blob that another client uploads at the same moment may be there when it is asked for, and unknown
        when a manifest names it: docker-registry 2.8 did that to publishers at once. So this is asked again.
        """
        for delay in (*self._retry_delays_s, None):
            try:
                return self._put_manifest(manifest, name)
            except RegistryError as error:
                if delay is None or BLOB_UNKNOWN not in (error.got or ""):
                    raise
                time.sleep(delay)
        raise AssertionError  # the last delay is None

    def _put_manifest(self, manifest: Manifest, name: str) -> bool:
        response = self._http.request(
            "PUT",
            self._manifest(name),
            expected=(201,),
            headers={"Content-Type": manifest.media_type},
            body=lambda: manifest.body,
        )
        return "OCI-Subject" in response.headers

    def referrers(self, digest: str) -> tuple[Descriptor, ...] | None:
        """What the registry's referrers API lists; None where there is no such API."""
        found: list[Descriptor] = []
        for page in self._pages(f"{self._root}/referrers/{digest}", NO_REFERRERS):
            if page is None:
                return None
            found += page.descriptors("manifests")
        return tuple(found)

    def tags(self) -> tuple[str, ...]:
        """Every tag; none when the repository is not there yet."""
        found: list[str] = []
        for page in self._pages(f"{self._root}/tags/list", NO_TAGS):
            listed = (page.document.get("tags") if page else None) or []
            if not isinstance(listed, list):
                raise RegistryError(
                    "the registry sent an invalid list of tags", where=self.target, got=str(listed)[:200]
                )
            found += map(str, listed)
        return tuple(found)

    def _pages(self, url: str | None, nothing: tuple[int, ...]) -> Iterator[Manifest | None]:
        """The pages of a list; None if the status of the first answer is in `nothing`: there is no list."""
        seen: set[str] = set()
        while url:
            if url in seen or len(seen) == PAGES:
                raise RegistryError(
                    "the registry's pagination never ends", where=url, got=f"{len(seen)} pages"
                )
            seen.add(url)
            absent = nothing if len(seen) == 1 else ()  # an incomplete list is an error
            response = self._http.request("GET", url, expected=(200, *absent), stream=True)
            if response.status_code != OK:
                yield None
                return
            body = self._http.body(response, MANIFEST_LIMIT_BYTES)
            yield Manifest(media_type=OCI_INDEX, body=body)
            following = response.links.get("next", {}).get("url")
            url = self._http.next_address(response, following) if following else None

    def delete_tag(self, tag: str) -> bool:  # noqa: ARG002  # the protocol's signature
        """Do nothing: a registry deletes by digest, and that would delete the history too."""
        return False

    def delete_manifest(self, digest: str) -> bool:
        """Delete a manifest, where the registry allows it."""
        response = self._http.request("DELETE", self._manifest(digest), expected=(202, *DELETE_UNSUPPORTED))
        return response.status_code == ACCEPTED

    @contextlib.contextmanager
    def writing(self, report: Callable[[str], None]) -> Iterator[None]:
        """Let one process of this host write at a time; a writer on another host is seen by reading back."""
        name = hashlib.sha256(self.target.encode()).hexdigest()[:16]
        # Only this user can write there: in /tmp anybody could create the lock, or a link, first. A login has
        # XDG_RUNTIME_DIR and cron does not, so two writers would use two locks.
        path = users.folder("XDG_STATE_HOME") / "stackcheck" / f"{name}.lock"
        with _opened(path) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                report(f"waiting for another writer of {self.target} (lock file {path})")
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def tidied(self) -> contextlib.AbstractContextManager[None]:
        """Nothing to do: a registry collects its own garbage."""
        return contextlib.nullcontext()

    def _chunks(self, digest: str) -> Iterator[bytes]:
        received = 0
        for delay in (*self._retry_delays_s, None):
            try:
                for chunk in self._from_byte(received, digest):
                    received += len(chunk)
                    yield chunk
            except requests.exceptions.ChunkedEncodingError as error:  # the answer ended before its last byte
                if delay is None:
                    raise self._http.unreachable(error) from error
                time.sleep(delay)
            except requests.RequestException as error:
                raise self._http.unreachable(error) from error
            else:
                return

    def _from_byte(self, first: int, digest: str) -> Iterator[bytes]:
        """The blob from this byte on, also from a registry that does not know ranges."""
        address, headers = self._blob(digest), {"Range": f"bytes={first}-"} if first else {}
        expected = (OK, PARTIAL) if first else (OK,)
        response = self._http.request("GET", address, expected=expected, headers=headers, stream=True)
        content_range = response.headers.get("Content-Range", "")
        if response.status_code == PARTIAL and not content_range.startswith(f"bytes {first}-"):
            response.close()
            raise RegistryError(
                "the registry sent another part of the blob than was asked for",
                where=address,
                got=f"Content-Range {content_range!r}",
                expected=f"bytes {first}-…",
                next_step="run the same command again",
            )
        skipped = first if response.status_code == OK else 0
        for chunk in response.iter_content(CHUNK_BYTES):
            if rest := chunk[skipped:]:
                yield rest
            skipped = max(0, skipped - len(chunk))

    def _blob(self, digest: str) -> str:
        if not is_digest(digest):
            raise RegistryError("this is not a digest", where=self.target, got=digest)
        return f"{self._root}/blobs/{digest}"

    def _manifest(self, name: str) -> str:
        return f"{self._root}/manifests/{name}"


def _opened(path: Path) -> IO[str]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+")
    except OSError as error:
        raise RegistryError(
            "cannot create the lock file for writing to a repository",
            where=str(path),
            got=error.strerror,
            next_step="choose a folder that you can write to: XDG_STATE_HOME=FOLDER stackcheck …",
        ) from error
