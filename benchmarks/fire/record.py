"""What a campaign has done so far: a file of one JSON line for each schedule, and processes that add to it.

In: schedules, and the function that does one. Out: lines; of lines, figures. A campaign that was stopped goes
on where it was.
"""

from __future__ import annotations

import json
import os
import statistics
import struct
import traceback
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

Schedule = tuple[str, int]  # part, number
SPREADS = ("recovery_s", "publication_s")
SUMS = ("count", "cpu_s")
COUNTS = ("outcomes", "planted")


def lines_of(record: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


def do_all(
    schedules: Sequence[Schedule], do: Callable[[Schedule], dict[str, Any]], record: Path, workers: int
) -> None:
    """Do each schedule that the record lacks, in some processes, and add a line for each."""
    done = {(line["part"], line["number"]) for line in lines_of(record)}
    left = [index for index, schedule in enumerate(schedules) if schedule not in done]
    source, sink = os.pipe()  # each process takes its next schedule from it
    children = [child for _ in range(workers) if (child := _worker(source, sink, schedules, do, record))]
    os.close(source)
    for index in left:
        os.write(sink, struct.pack("I", index))
    os.close(sink)
    codes = [os.waitpid(child, 0)[1] for child in children]
    if any(codes):
        raise RuntimeError(f"a process of the campaign ended: {codes}")


def _worker(
    source: int,
    sink: int,
    schedules: Sequence[Schedule],
    do: Callable[[Schedule], dict[str, Any]],
    record: Path,
) -> int:
    """The new process; it ends when the pipe is empty and closed."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.close(sink)
        with record.open("a", encoding="utf-8") as lines:
            while number := os.read(source, struct.calcsize("I")):
                schedule = schedules[struct.unpack("I", number)[0]]
                line = {"part": schedule[0], "number": schedule[1]} | do(schedule)
                lines.write(json.dumps(line) + "\n")
                lines.flush()
        code = 0
    except Exception:  # noqa: BLE001  # this process ends here, and its parent is told
        traceback.print_exc()
    finally:
        os._exit(code)


def figures(lines: Iterable[dict[str, Any]], parts: Sequence[str]) -> dict[str, Any]:
    """For each part: how many schedules, what they ended with, and the spread of times."""
    of_parts = {part: [line for line in lines if line["part"] == part] for part in parts}
    return {part: _figures(found) for part, found in of_parts.items() if found}


def _figures(lines: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"schedules": len(lines)}
    for name in SUMS:
        if name in lines[0]:
            found[name] = sum(line[name] for line in lines)
    for name in COUNTS:
        counts = sum((Counter(line.get(name, {})) for line in lines), Counter[str]())
        counts.update(line["outcome"] for line in lines if name == "outcomes" and "outcome" in line)
        found |= {name: dict(counts)} if counts else {}
    for name in SPREADS:
        values = [line[name] for line in lines if name in line]
        found |= {name: spread(values)} if values else {}
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    at_95 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))]
    return {
        "median": round(statistics.median(ordered), 2),
        "p95": round(at_95, 2),
        "max": round(ordered[-1], 2),
    }
