"""Limits for a slow registry: the lowest rate of an answer, and the longest time of a whole verification.

In: a limit and a clock. Out: an adapter for `requests` whose connections measure every read. A time limit per
read is not enough: a server that sends a byte a minute never exceeds one.
"""

import io
import ssl
import time
from collections.abc import Callable
from typing import Any

from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

GRACE_S = 60.0  # of waiting for an answer, before its rate counts
SLOWEST_BYTES_PER_S = 16_384


class Patience:
    """The time that one registry may still take, over all connections to it.

    Args:
        total_s: The whole work must be done after this many seconds; None: only the rate counts.
        clock: Seconds, from any start.
    """

    def __init__(self, total_s: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.reason = ""  # why the registry took too long; empty before
        self._total_s, self._start = total_s, clock()
        self._waited_s, self._received = 0.0, 0

    def begin(self) -> None:
        """Begin a new request: the rate is measured for each request."""
        self._waited_s, self._received = 0.0, 0

    def spend(self, waited_s: float, received: int) -> None:
        """Count the seconds and the bytes of one read.

        Raises:
            TimeoutError: The registry took too long.
        """
        self._waited_s += waited_s
        self._received += received
        if self._total_s is not None and self.clock() - self._start > self._total_s:
            self.reason = f"no end within {self._total_s:g} s"
        elif self._waited_s > GRACE_S + self._received / SLOWEST_BYTES_PER_S:
            self.reason = f"{self._received} bytes in {self._waited_s:.0f} s"
        if self.reason:
            raise TimeoutError(f"timed out: {self.reason}")


class Adapter(HTTPAdapter):
    """Connections that count the time of every read, from the first byte of the status line."""

    def __init__(self, patience: Patience, context: ssl.SSLContext | None = None) -> None:
        self._context: dict[str, Any] = {"ssl_context": context} if context else {}
        self._pools = {
            "http": _pool(HTTPConnectionPool, HTTPConnection, patience),
            "https": _pool(HTTPSConnectionPool, HTTPSConnection, patience),
        }
        super().__init__()

    def init_poolmanager(self, *arguments: Any, **options: Any) -> None:
        """As requests does, with these connections."""
        super().init_poolmanager(*arguments, **(options | self._context))
        self.poolmanager.pool_classes_by_scheme = self._pools

    def proxy_manager_for(self, *arguments: Any, **options: Any) -> Any:
        """As requests does, with these connections, also through a proxy."""
        manager = super().proxy_manager_for(*arguments, **(options | self._context))
        manager.pool_classes_by_scheme = self._pools
        return manager


def _pool(pool: type[Any], connection: type[Any], patience: Patience) -> type[Any]:
    def connect(self: Any) -> None:
        connection.connect(self)
        self.sock = _Socket(self.sock, patience)

    bound = type(connection.__name__, (connection,), {"connect": connect})
    return type(pool.__name__, (pool,), {"ConnectionCls": bound})


class _Socket:
    """A socket whose answers are measured; all else is the socket's own."""

    def __init__(self, sock: Any, patience: Patience) -> None:
        self._sock, self._patience = sock, patience

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def makefile(self, *_mode: Any, **_options: Any) -> io.BufferedReader:
        return io.BufferedReader(_Answer(self._sock.makefile("rb", buffering=0), self._patience))


class _Answer(io.RawIOBase):
    def __init__(self, raw: io.RawIOBase, patience: Patience) -> None:
        super().__init__()
        self._raw, self._patience = raw, patience

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        before = self._patience.clock()
        count = self._raw.readinto(buffer)
        self._patience.spend(self._patience.clock() - before, count or 0)
        return int(count) if count is not None else None

    def close(self) -> None:
        self._raw.close()
        super().close()
