"""An OCI image layout on disk as a store: the embedded default, `dist/`.

In: a folder. Out: blobs, manifests and tags in it, as OCI's image-layout.md has them, so that skopeo, crane
and oras open it. Every file appears whole or not at all (temporary file, fsync, rename); index.json, the only
file that changes, is written under a lock.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from stackcheck.files.atomic import TEMPORARY, file_error, write_atomically
from stackcheck.files.regular import open_regular, read_regular
from stackcheck.oci.documents import (
    CHUNK_BYTES,
    INDEX_LIMIT_BYTES,
    MANIFEST_LIMIT_BYTES,
    OCI_INDEX,
    OCI_MANIFEST,
    REF_NAME,
    DanglingError,
    Descriptor,
    Index,
    IntegrityError,
    Manifest,
    MissingError,
    RegistryError,
    agree,
    checked,
    descriptor,
    is_digest,
    json_object,
    no_such_tag,
    parse_index,
)
from stackcheck.oci.store import Store

LAYOUT_FILE = {"imageLayoutVersion": "1.0.0"}
# The members of a manifest or index that name plain blobs, and those that name other manifests.
LEAVES = ("config", "layers", "blobs")
BRANCHES = ("manifests", "subject")
MISSING_SHOWN = 3


class OciLayout:
    """A folder with `oci-layout`, `index.json` and `blobs/sha256/`; made on the first write."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.target = f"oci:{root}"
        self._known: tuple[tuple[int, int, int], Index] | None = None

    def blob_path(self, digest: str) -> Path:
        """The file of a blob; `RegistryError` if it is not a digest: no name may lead out of the folder."""
        if not is_digest(digest):
            raise RegistryError("this is not a digest", where=self.target, got=digest)
        return self.root / "blobs" / "sha256" / digest.removeprefix("sha256:")

    def has_blob(self, digest: str) -> bool:
        """Whether the blob is there and whole; a damaged one counts as absent and is written again."""
        try:
            for _ in self.read_blob(digest):
                pass
        except (MissingError, IntegrityError):
            return False
        return True

    def read_blob(self, digest: str) -> Iterator[bytes]:
        """The blob's bytes, checked after the last one."""
        return checked(self._chunks(digest), digest, str(self.blob_path(digest)))

    def write_blob(self, blob: Descriptor, chunks: Callable[[], Iterable[bytes]]) -> None:
        """Store a blob; a file that is not what its digest names never appears."""
        path = self.blob_path(blob.digest)
        write_atomically(path, checked(chunks(), blob.digest, str(path), blob.size))

    def mount_blob(self, digest: str, source: Store) -> bool:  # noqa: ARG002  # the protocol's signature
        """Two layouts share no bytes: a hard link would let a change in one reach the other."""
        return False

    def read_manifest(self, name: str) -> Manifest:
        """The manifest of a tag or digest."""
        if is_digest(name):
            entry = self._index().by_digest.get(name)
            body = self._manifest_body(name)
            known = entry.media_type if entry else OCI_MANIFEST
            stated = json_object(body, name).get("mediaType") or known
            if not isinstance(stated, str):
                raise RegistryError(
                    "mediaType of a manifest must be a string", where=name, got=repr(stated)[:200]
                )
            return Manifest(media_type=stated, body=body)
        entry = self._index().by_name.get(name)
        if entry is None:
            raise no_such_tag(name, self.target, self._names())
        try:
            body = self._manifest_body(entry.digest)
        except MissingError as error:
            raise DanglingError(
                "the layout names a manifest that is not there",
                where=f"{self.target}:{name}",
                got=f"no file {error.where}",
                expected="the manifest of each tag: without one, a revocation could be hidden",
                next_step="copy the layout again from where it was published",
            ) from error
        manifest = Manifest(media_type=entry.media_type, body=body)
        agree(entry, manifest, str(self.root / "index.json"))
        return manifest

    def write_manifest(self, manifest: Manifest, name: str) -> bool:
        """Store a manifest under a tag (which moves) or its digest; a layout lists no referrers itself."""
        self.write_blob(manifest.as_descriptor(), lambda: (manifest.body,))
        if is_digest(name):
            if manifest.digest not in self._index().by_digest:
                self._write_entries([*self._entries(), manifest.as_descriptor()])
            return False
        kept = [entry for entry in self._entries() if entry.annotations.get(REF_NAME) != name]
        kept = [entry for entry in kept if entry.digest != manifest.digest or entry.annotations]
        self._write_entries([*kept, manifest.as_descriptor(annotations={REF_NAME: name})])
        return False

    def referrers(self, digest: str) -> None:  # noqa: ARG002  # the protocol's signature
        """A layout keeps no list of its own; the fallback tag does."""
        return

    def tags(self) -> tuple[str, ...]:
        """Every tag, in the order of index.json."""
        return tuple(self._names())

    def delete_tag(self, tag: str) -> bool:  # the protocol's signature
        """Remove a tag; its manifest stays reachable by digest."""
        entries = self._entries()
        gone = [entry for entry in entries if entry.annotations.get(REF_NAME) == tag]
        kept = [entry for entry in entries if entry not in gone]
        held = {entry.digest for entry in kept}
        untagged = [Descriptor(media_type=e.media_type, digest=e.digest, size=e.size) for e in gone]
        self._write_entries([*kept, *(entry for entry in untagged if entry.digest not in held)])
        return True

    def delete_manifest(self, digest: str) -> bool:
        """Remove a manifest and its tags; other blobs stay."""
        self._write_entries([entry for entry in self._entries() if entry.digest != digest])
        self.blob_path(digest).unlink(missing_ok=True)
        return True

    @contextlib.contextmanager
    def writing(self, report: Callable[[str], None]) -> Iterator[None]:
        """Hold the layout's lock file, which the kernel frees even when the process dies.

        Unfinished files of a killed writer are removed first.
        """
        self._create()
        with (self.root / ".lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                report(f"waiting for another writer of {self.target} (lock file {self.root / '.lock'})")
                fcntl.flock(lock, fcntl.LOCK_EX)
            for unfinished in (*self.root.glob(f"{TEMPORARY}*"), *self.root.glob(f"blobs/*/{TEMPORARY}*")):
                unfinished.unlink(missing_ok=True)
            yield

    @contextlib.contextmanager
    def tidied(self) -> Iterator[None]:
        """If the body succeeds, remove the blobs that it left without a reference; used while `writing`."""
        before = self._reachable_if_readable()
        yield
        after = self._reachable_if_readable()
        if before is not None and after is not None:
            self._remove(before - after)

    def unreferenced(self) -> dict[str, int]:
        """The blobs that no entry of index.json reaches, each with its size in bytes.

        An entry reaches its manifest, an index its manifests, and a manifest its config, layers, subject and
        referrers (the manifests of the layout that name it as their subject).

        Raises:
            MissingError: There is no layout, or index.json names a manifest that is not there.
            RegistryError: A manifest is damaged, so that its references are not known.
        """
        self.check_version()
        kept = self._reachable()
        return {digest: size for digest, size in self._blobs().items() if digest not in kept}

    def collect_garbage(self, report: Callable[[str], None]) -> dict[str, int]:
        """Remove the unreferenced blobs under the layout's lock; gives each with its size in bytes.

        Programs that do not take the lock (skopeo, oras) must not write into the layout meanwhile.

        Raises:
            RegistryError: As `unreferenced`; nothing is removed then.
        """
        self.check_version()
        with self.writing(report):
            found = self.unreferenced()
            self._remove(found)
        return found

    def state(self) -> tuple[int, int]:
        """A value that changes when index.json changes; a reader that sees two values reads again."""
        try:
            status = (self.root / "index.json").stat()
        except OSError as error:
            raise self._no_layout("index.json", error) from error
        return status.st_ino, status.st_mtime_ns

    def check_version(self) -> None:
        """Raise `RegistryError` unless the folder declares the layout version that this class reads."""
        path = self.root / "oci-layout"
        try:
            found = json_object(read_regular(path, MANIFEST_LIMIT_BYTES), str(path))
        except OSError as error:
            raise self._no_layout("oci-layout", error) from error
        if found != LAYOUT_FILE:
            raise RegistryError(
                "unsupported layout version", where=str(path), got=str(found)[:200], expected=str(LAYOUT_FILE)
            )

    def check_blob(self, blob: Descriptor) -> None:
        """Raise `IntegrityError` unless the blob has the size and digest of its descriptor."""
        path = self.blob_path(blob.digest)
        for _ in checked(self._chunks(blob.digest), blob.digest, str(path), blob.size):
            pass

    def only_manifest(self) -> Manifest:
        """The manifest of a layout that holds one image.

        Raises:
            RegistryError: The layout has no image, or several.
        """
        digests = {entry.digest for entry in self._entries()}
        if len(digests) != 1:
            raise RegistryError(
                "the layout does not hold exactly one image",
                where=self.target,
                got=f"{len(digests)} manifests",
            )
        return self.read_manifest(digests.pop())

    def _reachable_if_readable(self) -> set[str] | None:
        """The digests of `_reachable`; None for a damaged layout, where no blob is known to be garbage."""
        try:
            return self._reachable()
        except RegistryError:
            return None

    def _reachable(self) -> set[str]:
        """The digests of all blobs that the entries of index.json reach, and of their referrers."""
        stored = self._blobs()
        referrers = self._referrers(stored)
        todo = [entry.digest for entry in self._entries()]
        if absent := [digest for digest in todo if digest not in stored]:
            raise MissingError(
                "a manifest that index.json names is missing",
                where=self.target,
                got=", ".join(absent[:MISSING_SHOWN]),
                next_step="publish the image again, or remove its entry from index.json",
            )
        manifests: set[str] = set()
        leaves: set[str] = set()
        while todo:
            digest = todo.pop()
            if digest in manifests or digest not in stored:  # of an index, other platforms may be elsewhere
                continue
            manifests.add(digest)
            manifest = Manifest(media_type=OCI_MANIFEST, body=self._manifest_body(digest))
            leaves |= {blob.digest for key in LEAVES for blob in manifest.descriptors(key)}
            todo += [item.digest for key in BRANCHES for item in manifest.descriptors(key)]
            todo += referrers.get(digest, ())
        return manifests | leaves

    def _referrers(self, stored: dict[str, int]) -> dict[str, list[str]]:
        """Manifest -> what names it as its subject; a client may store a referrer without listing it."""
        found: dict[str, list[str]] = {}
        for digest, size in stored.items():
            if size > MANIFEST_LIMIT_BYTES:
                continue
            with contextlib.suppress(RegistryError):  # a layer, or no manifest
                document = json_object(self._small(digest), digest)
                if "subject" in document:
                    found.setdefault(descriptor(document["subject"], digest).digest, []).append(digest)
        return found

    def _small(self, digest: str) -> bytes:
        """The bytes of a blob; nothing if it was removed meanwhile. A disk that fails is an error."""
        try:
            return read_regular(self.blob_path(digest), MANIFEST_LIMIT_BYTES)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise file_error(error) from error

    def _blobs(self) -> dict[str, int]:
        """Every blob and its size in bytes; other files of the folder are not of this project."""
        folder = self.root / "blobs" / "sha256"
        files = {f"sha256:{path.name}": path for path in sorted(folder.glob("*")) if path.is_file()}
        return {digest: path.stat().st_size for digest, path in files.items() if is_digest(digest)}

    def _remove(self, digests: Iterable[str]) -> None:
        """Remove blobs, manifests first: an interrupted removal leaves no manifest without its layers."""
        paths = [path for path in map(self.blob_path, digests) if path.exists()]
        for path in sorted(paths, key=lambda path: not _is_manifest(path)):
            path.unlink(missing_ok=True)

    def _create(self) -> None:
        try:
            (self.root / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise file_error(error) from error
        if not (self.root / "oci-layout").exists():
            write_atomically(self.root / "oci-layout", (json.dumps(LAYOUT_FILE).encode(),))
        if not (self.root / "index.json").exists():
            self._write_entries([])

    def _no_layout(self, file: str, error: OSError) -> RegistryError:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            return RegistryError(
                "the layout cannot be read", where=str(self.root), got=f"{file}: {error.strerror}"
            )
        if self.root.is_dir():
            return MissingError(
                "the folder is not an OCI image layout",
                where=str(self.root),
                got=f"{file}: {error.strerror}",
                expected="a folder with oci-layout and index.json",
                next_step="check the folder's name",
            )
        return MissingError(
            "the folder of the OCI image layout does not exist",
            where=str(self.root),
            got="a file" if self.root.exists() else None,
            next_step="check the folder's name, or publish an image into it: stackcheck images",
        )

    def _chunks(self, digest: str) -> Iterator[bytes]:
        try:
            with open_regular(self.blob_path(digest)) as file:
                while chunk := file.read(CHUNK_BYTES):
                    yield chunk
        except OSError as error:
            kind = MissingError if isinstance(error, FileNotFoundError) else RegistryError
            raise kind(
                "a blob cannot be read", where=str(self.blob_path(digest)), got=error.strerror
            ) from error

    def _manifest_body(self, digest: str) -> bytes:
        path = self.blob_path(digest)
        return b"".join(checked(self._chunks(digest), digest, str(path), limit=MANIFEST_LIMIT_BYTES))

    def _names(self) -> list[str]:
        return [entry.annotations[REF_NAME] for entry in self._entries() if REF_NAME in entry.annotations]

    def _entries(self) -> tuple[Descriptor, ...]:
        return self._index().entries

    def _index(self) -> Index:
        """What index.json lists; it is read again only when the file is another one."""
        path = self.root / "index.json"
        try:
            with open_regular(path) as file:
                status = os.fstat(file.fileno())
                state = (status.st_ino, status.st_mtime_ns, status.st_size)
                if self._known is None or self._known[0] != state:
                    self._known = (state, parse_index(file.read(INDEX_LIMIT_BYTES + 1), str(path)))
        except OSError as error:
            raise self._no_layout("index.json", error) from error
        return self._known[1]

    def _write_entries(self, entries: list[Descriptor]) -> None:
        document: dict[str, Any] = {
            "schemaVersion": 2,
            "mediaType": OCI_INDEX,
            "manifests": [entry.as_json() for entry in entries],
        }
        write_atomically(self.root / "index.json", (json.dumps(document, indent=1).encode() + b"\n",))


def _is_manifest(path: Path) -> bool:
    if path.stat().st_size > MANIFEST_LIMIT_BYTES:
        return False
    with contextlib.suppress(OSError, RegistryError):
        document = json_object(read_regular(path, MANIFEST_LIMIT_BYTES), str(path))
        return any(key in document for key in ("layers", *BRANCHES))
    return False
