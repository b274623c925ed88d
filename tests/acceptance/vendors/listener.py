"""The child process that listens for faults during a run. In: a vendor, a pipe that its parent holds open.

Out: JSON lines on its standard output: {"listening": pid} or {"absence": reason}, then {"index", "what",
"machine", "time"} for each fault, and {"error": text} if the library fails while it listens. The child ends
when the pipe closes.
"""

import datetime as dt
import json
import os
import select
import sys
from collections.abc import Iterator, Mapping
from typing import TextIO

import vendors
from vendors import Absence, Event


def main() -> None:
    name, parent = sys.argv[1], int(sys.argv[2])
    # What a library prints must not mix in: it gets the errors' file.
    with os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1) as file:
        os.dup2(2, 1)
        try:
            events = vendors.module(name).listen()
            if isinstance(events, Absence):
                _write(file, {"absence": events})
                return
            _write(file, {"listening": os.getpid()})
            _follow(events, parent, file)
        # A process boundary: the check that reads the file reports the error.
        except Exception as error:  # noqa: BLE001
            _write(file, {"error": f"{type(error).__name__}: {error}"})


def _follow(events: Iterator[Event | None], parent: int, file: TextIO) -> None:
    for event in events:
        if event is not None:
            now = dt.datetime.now(dt.timezone.utc).isoformat(timespec="milliseconds")
            _write(file, {**vars(event), "time": now})
        closed, _, _ = select.select([parent], [], [], 0)  # nothing writes to the pipe
        if closed:
            return


def _write(file: TextIO, line: Mapping[str, object]) -> None:
    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
