"""Send one blob to a registry: in one request, or in parts, of which a broken one is resumed.

In: an address for uploads, a blob and its bytes. Out: the registry has it. Proxies in front of registries
limit what one request may carry, and after a broken one a layer of gigabytes must not start again.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stackcheck.oci.documents import Descriptor, RegistryError

if TYPE_CHECKING:
    import requests

    from stackcheck.oci.transport import Transport

WHOLE_BYTES = 64 << 20  # up to here one request
PART_BYTES = 32 << 20  # kept in memory until the registry has it
ATTEMPTS = 4  # for one part, and for a blob whose upload state the registry lost
OCTETS = {"Content-Type": "application/octet-stream"}
_RANGE = re.compile(r"(?:bytes=)?0-([0-9]{1,18})")


class _Body:
    """A request body of known length; without it requests would send chunks, which some registries refuse."""

    def __init__(self, chunks: Iterable[bytes], length: int) -> None:
        self._chunks = chunks
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._chunks)


class _ForgottenError(Exception):
    """The registry lost the state of the upload: the blob is sent again from its first byte."""


@dataclass(frozen=True, kw_only=True)
class Uploading:
    """One blob on its way."""

    http: Transport
    address: str  # where uploads of the repository begin
    blob: Descriptor

    def send(self, chunks: Callable[[], Iterable[bytes]]) -> None:
        """Send the blob.

        Raises:
            RegistryError: The registry refused it, or broke off too often.
        """
        if self.blob.size <= WHOLE_BYTES:
            self._finish(self._begin(), lambda: _Body(chunks(), self.blob.size))
            return
        for attempt in range(ATTEMPTS):
            try:
                self._in_parts(chunks())
            except _ForgottenError as error:
                if attempt == ATTEMPTS - 1:
                    raise RegistryError(
                        "the registry broke off an upload again and again",
                        where=f"{self.address} {self.blob.digest}",
                        got=f"{ATTEMPTS} attempts",
                        next_step="run the same command again",
                    ) from error
            else:
                return

    def _begin(self) -> str:
        return self._next(self.http.request("POST", self.address, expected=(202,)))

    def _in_parts(self, chunks: Iterable[bytes]) -> None:
        location, offset = self._begin(), 0
        for part in _parts(chunks):
            location = self._part(location, part, offset)
            offset += len(part)
        self._finish(location, lambda: b"")

    def _part(self, location: str, part: bytes, offset: int) -> str:
        """Send one part, or what the registry lacks of it; where the next one goes."""
        sent = 0
        for attempt in range(ATTEMPTS):
            rest = part[sent:]
            first = offset + sent
            headers = {**OCTETS, "Content-Range": f"{first}-{first + len(rest) - 1}"}
            try:
                done = self.http.request(
                    "PATCH", location, expected=(202,), headers=headers, body=functools.partial(bytes, rest)
                )
            except RegistryError as error:
                if attempt == ATTEMPTS - 1:
                    raise
                location, there = self._state(location, error)
                sent = there - offset
                if not 0 <= sent <= len(part):
                    raise _ForgottenError from error
                if sent == len(part):
                    return location
            else:
                return self._next(done)
        raise AssertionError  # the last attempt returns or raises

    def _state(self, location: str, error: RegistryError) -> tuple[str, int]:
        """Where the upload goes on, and how many bytes the registry has."""
        try:
            found = self.http.request("GET", location, expected=(204,))
        except RegistryError:
            raise _ForgottenError from error
        stated = _RANGE.fullmatch(found.headers.get("Range", ""))
        if stated is None:
            raise _ForgottenError from error
        last = int(stated[1])
        following = self._next(found) if found.headers.get("Location") else location
        return following, last + 1 if last else 0  # registries say 0-0 of an upload that has nothing

    def _finish(self, location: str, body: Callable[[], bytes | _Body]) -> None:
        address = location + ("&" if "?" in location else "?") + f"digest={self.blob.digest}"
        self.http.request("PUT", address, expected=(201,), headers=OCTETS, body=body)

    def _next(self, response: requests.Response) -> str:
        return self.http.next_address(response, response.headers.get("Location", ""))


def _parts(chunks: Iterable[bytes]) -> Iterator[bytes]:
    held = bytearray()
    for chunk in chunks:
        held += chunk
        while len(held) >= PART_BYTES:
            yield bytes(held[:PART_BYTES])
            del held[:PART_BYTES]
    if held:
        yield bytes(held)
