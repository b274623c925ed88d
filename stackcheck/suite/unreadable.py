"""What a machine cannot tell. In: its devices, driver, ROCm or CUDA release. Out: names of readings. Pure.

Each release of a driver and of a management library answers other questions. The list `unreadable` of
devices.json says which, each entry with its source. A check that skips for
such a reading is accepted; for any other it is refused, because the image wrote the skip.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NUMBERS = re.compile(r"\d+(?:\.\d+)*")


def readings(
    table: Sequence[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    *,
    driver: str | None,
    runtime: str | None,
) -> dict[str, str]:
    """Reading -> the source that says that this machine cannot tell it.

    Args:
        table: The list `unreadable` of devices.json.
        rows: The rows of this host's devices; an entry has to hold for all of them.
        driver: The host's driver.
        runtime: The ROCm or CUDA release of the image, which is that of its management library.
    """
    return {
        entry["reading"]: entry["source"]
        for entry in table
        if rows
        and all(_is_of(entry, row) for row in rows)
        and _is_below(driver, entry.get("driver_below"))
        and _is_below(runtime, entry.get("runtime_below"))
    }


def _is_of(entry: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    return entry["vendor"] == row["vendor"] and row["arch"] in entry.get("archs", (row["arch"],))


def _is_below(version: str | None, limit: str | None) -> bool:
    """Whether a version is lower than a limit; a driver of the kernel's own tree has no number."""
    if limit is None:
        return True
    if version is None or not NUMBERS.match(version) or "." not in version:
        return False
    return _numbers(version) < _numbers(limit)


def _numbers(version: str) -> tuple[int, ...]:
    found = NUMBERS.match(version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
