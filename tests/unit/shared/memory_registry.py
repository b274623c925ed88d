"""A registry in memory, and hosts that write to it, of which one request can be held back or come too late.

It has what a real registry has and no more: a tag is one value, which the last writer sets, without a lock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from stackcheck.oci.documents import Descriptor, Manifest, MissingError, RegistryError, checked, is_digest

TARGET = "127.0.0.1:1/stacks/small"
WRITES = ("write_manifest", "delete_manifest")
CALLS = (*WRITES, "read_manifest", "referrers", "tags")


class MemoryRegistry:
    """One repository. With `referring` it lists referrers itself, as registries with OCI 1.1's API do."""

    target = TARGET

    def __init__(self, *, referring: bool = False) -> None:
        self.referring = referring
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, Manifest] = {}
        self.names: dict[str, str] = {}

    def copy(self) -> MemoryRegistry:
        """The same content; what is written to the one does not reach the other."""
        made = MemoryRegistry(referring=self.referring)
        made.blobs, made.manifests, made.names = dict(self.blobs), dict(self.manifests), dict(self.names)
        return made

    def has_blob(self, digest: str) -> bool:
        return digest in self.blobs

    def read_blob(self, digest: str) -> Iterator[bytes]:
        if digest not in self.blobs:
            raise MissingError("not found in the registry", where=digest)
        yield self.blobs[digest]

    def write_blob(self, blob: Descriptor, chunks: Callable[[], Iterable[bytes]]) -> None:
        self.blobs[blob.digest] = b"".join(checked(chunks(), blob.digest, TARGET, blob.size))

    def mount_blob(self, _digest: str, _source: object) -> bool:
        return False

    def read_manifest(self, name: str) -> Manifest:
        found = self.manifests.get(name if is_digest(name) else self.names.get(name, ""))
        if found is None:
            raise MissingError("not found in the registry", where=name)
        return found

    def write_manifest(self, manifest: Manifest, name: str) -> bool:
        self.manifests[manifest.digest] = manifest
        if not is_digest(name):
            self.names[name] = manifest.digest
        return self.referring and "subject" in manifest.document

    def referrers(self, digest: str) -> tuple[Descriptor, ...] | None:
        if not self.referring:
            return None
        subjects = {name: item.descriptors("subject") for name, item in self.manifests.items()}
        mine = [name for name, named in subjects.items() if digest in {item.digest for item in named}]
        return tuple(self.manifests[name].as_descriptor() for name in mine)

    def tags(self) -> tuple[str, ...]:
        return tuple(self.names)

    def delete_tag(self, _tag: str) -> bool:
        return False

    def delete_manifest(self, digest: str) -> bool:
        self.names = {tag: named for tag, named in self.names.items() if named != digest}
        return self.manifests.pop(digest, None) is not None

    def writing(self, _report: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    tidied = contextlib.nullcontext


class Host:
    """A client of the registry. At its n-th call, other hosts run to their end before the call arrives.

    With `late` the client gives up on this call, and `arrive` delivers it afterwards.
    """

    def __init__(
        self,
        registry: MemoryRegistry,
        *,
        at: int = 0,
        calls: tuple[str, ...] = CALLS,
        meanwhile: Callable[[], object] = lambda: None,
        late: bool = False,
    ) -> None:
        self.registry = registry
        self.target = registry.target
        self.left = at
        self.count = 0
        self._calls, self._meanwhile, self._late = calls, meanwhile, late
        self.arrive: Callable[[], object] = lambda: None

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.registry, name)
        if name not in self._calls:
            return found

        def call(*arguments: Any) -> Any:
            self.count += 1
            self.left -= 1
            if self.left == 0:
                if self._late:
                    self.arrive = lambda: found(*arguments)
                    raise RegistryError("the registry does not answer", where=name)
                self._meanwhile()
            return found(*arguments)

        return call
