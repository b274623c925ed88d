"""How long each device was busy, by the driver's own counter, read on this host while an image runs.

In: a host. Out: seconds for each device id, or None where the driver does not say. No program of the image
has a part in it, so a child that claims work on a device which did nothing is seen.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from stackcheck import vendors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stackcheck.vendors import Host

PERIOD_S = 0.5
JOIN_S = 5.0  # a driver that hangs must not hold the run


@contextlib.contextmanager
def watched(host: Host) -> Iterator[dict[str, float | None]]:
    """Device id -> the seconds that it was busy; complete when the body has ended. Empty for a processor."""
    found: dict[str, float | None] = {}
    if host.vendor == "cpu":
        yield found
        return
    found.update((device.id, None) for device in host.devices)
    done = threading.Event()
    thread = threading.Thread(target=_read, args=(host, found, done), daemon=True)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join(JOIN_S)


def _read(host: Host, found: dict[str, float | None], done: threading.Event) -> None:
    backend, last = vendors.module(host.vendor), time.monotonic()
    while not done.wait(PERIOD_S):
        try:
            shares = backend.busy()
        except Exception:  # noqa: BLE001  # a counter that fails is not read; the run goes on
            shares = {}
        now = time.monotonic()
        for name, share in shares.items():
            if name in found and share is not None:
                found[name] = (found[name] or 0.0) + share * (now - last)
        last = now
