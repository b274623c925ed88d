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
    """Add up what the driver says. A time without an answer counts as busy: it refuses no healthy image."""
    backend, last = vendors.module(host.vendor), time.monotonic()
    missed = dict.fromkeys(found, 0.0)
    while not done.wait(PERIOD_S):
        try:
            shares = backend.busy()
        except (OSError, RuntimeError, ValueError):
            shares = {}
        now = time.monotonic()
        for name, seconds in found.items():
            share = shares.get(name)
            if share is None:
                missed[name] += now - last
            else:
                found[name] = (seconds or 0.0) + share * (now - last) + missed[name]
                missed[name] = 0.0
        last = now
    for name, seconds in found.items():
        found[name] = None if seconds is None else seconds + missed[name]
