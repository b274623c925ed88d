"""The child that listens for faults during a whole run. In: a vendor, a pipe that closes with its parent.

Out: JSON lines in a file: {"listening": pid} or {"absence": why}, {"index", "what", "time"} for each fault,
and {"error": words} should the library fail while it listens.
"""

import datetime as dt
import json
import os
import select
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import vendors
from vendors import Absence, Event


def main() -> None:
    name, parent, path = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    with path.open("a", encoding="utf-8", buffering=1) as file:
        try:
            events = vendors.module(name).listen()
            if isinstance(events, Absence):
                _write(file, {"absence": events})
                return
            _write(file, {"listening": os.getpid()})
            _follow(events, parent, file)
        # A process boundary: the check that reads the file says what happened.
        except Exception as error:  # noqa: BLE001
            _write(file, {"error": f"{type(error).__name__}: {error}"})


def _follow(events: Iterator[Event | None], parent: int, file: Any) -> None:
    for event in events:
        if event is not None:
            now = dt.datetime.now(dt.timezone.utc).isoformat(timespec="milliseconds")
            _write(file, {"index": event.index, "what": event.what, "time": now})
        if select.select([parent], [], [], 0)[0]:  # nobody writes to it: it is readable when it is closed
            return


def _write(file: Any, line: dict[str, Any]) -> None:
    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
