"""Run the published figures of a document that fit this machine, and print published, ours and their ratio.

    python benchmarks/training/table.py amd-container --out rows.jsonl
    python benchmarks/training/table.py frontier --ranks 2 --only tensor,pipeline --seconds 20
    python benchmarks/training/table.py amd-container --beside 0,1 --budget-s 150 --out rows.jsonl
    python benchmarks/training/table.py mosaicml-june --device CPU --tiny
    python benchmarks/training/table.py amd-container --show --out rows.jsonl

Out: a Markdown table; every row of the document is in it, and one that did not run has its reason. With --out
one JSON line a row, with the records; what is there already is not run again, so the same command continues
one that was ended. --beside runs rows of one GPU on several GPUs at once; each row is printed when it is
done. Exit code 0: every row that fits ran. 1: one failed, or no time was left. 2: no such document, no such
machine, or no torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run by path: find the rooms of trainers/ as train.py does
    sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "trainers"))
    from errors import require_torch

    require_torch(__file__)

import measures
import peaks
import rows
from errors import RefusedError
from fit import Machine
from tools import launch

NO_MACHINE = Machine(model="no machine", count=1, memory_bytes=0.0, fp8=True)  # --show runs nothing
SHORT = 3  # lines of a reason that a table shows whole
HEAD = ("row", "published on", "published", "ours", "ratio", "unit", "not the same work", "how")


def main(arguments: list[str]) -> int:
    """The exit code."""
    # argparse gives what follows -- to the first positional argument that is still open: none here.
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options = _parser().parse_args(arguments[:cut])
    options.flags = arguments[cut + 1 :]
    if options.show and not options.out:
        print("table.py: --show prints what a file has; name it with --out", file=sys.stderr)
        return 2
    if options.show and not options.out.is_file():
        print(f"table.py: --out {options.out}: no such file; measure first, without --show", file=sys.stderr)
        return 2
    try:
        document = rows.document(options.document)
        machine = NO_MACHINE if options.show else machine_of(options)
    except RefusedError as error:
        print(f"table.py: {error}", file=sys.stderr)
        return 2
    if options.show:
        show(document, options)
        return 0
    print(f"{document.title}; here: {machine.count} x {machine.model}\n", flush=True)
    results = run(document, machine, options)
    return 1 if any(result.get("failed") for result in results) else 0


def run(document: rows.Document, machine: Machine, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure and print row by row, so that a time limit loses nothing."""
    ranks = 1 if options.beside else options.ranks or machine.count
    kept = [one for one in _read(options.out) if one["document"] == document.name and one["ours"] is not None]
    bench = measures.Bench(
        machine=machine,
        ranks=ranks,
        tiny=options.tiny,
        seconds=options.seconds,
        more=tuple(options.flags),
        limit_s=options.limit_s,
        deadline=time.monotonic() + options.budget_s,
        ran={tuple(record["job"]): record for one in kept for record in one["records"] if "job" in record},
    )
    done = {one["row"]: one for one in kept if one["ranks"] == ranks}
    asked = [row for row in document.rows if _asked(row, options)]
    print(_line(HEAD))
    print(_line(["---"] * len(HEAD)), flush=True)
    work = Work(asked, done, options.out)
    gpus = options.beside or [None]
    with ThreadPoolExecutor(len(gpus)) as pool:
        list(pool.map(lambda gpu: work.all(dataclasses.replace(bench, gpu=gpu)), gpus))
    return work.results


class Work:
    """The rows that wait, taken by one bench or by several at once. Out: `results`, printed and kept."""

    def __init__(self, waiting: list[rows.Row], done: dict[str, dict[str, Any]], out: Path | None) -> None:
        self.waiting, self.done, self.out = waiting, done, out
        self.busy: dict[str | None, tuple[Any, ...]] = {}
        self.results: list[dict[str, Any]] = []
        self.lock = threading.Lock()

    def all(self, bench: measures.Bench) -> None:
        """Measure rows on this bench until none waits."""
        while (row := self._next(bench.gpu)) is not None:
            known = self.done.get(row.id)
            result = known or measured(row, bench)
            if launch.STOPPED.is_set() and result["ours"] is None:
                return  # it was ended, and did not fail
            with self.lock:
                self.results.append(result)
                print(_line(cells(row, result)), flush=True)
                if self.out and known is None:
                    with self.out.open("a") as file:
                        file.write(json.dumps(result) + "\n")

    def _next(self, gpu: str | None) -> rows.Row | None:
        """The first row whose job no other GPU runs now: it would wait there for the same record."""
        with self.lock:
            self.busy.pop(gpu, None)
            if not self.waiting or launch.STOPPED.is_set():
                return None
            free = [row for row in self.waiting if _job(row) not in self.busy.values()]
            row = (free or self.waiting)[0]
            self.waiting.remove(row)
            self.busy[gpu] = _job(row)
            return row


def _job(row: rows.Row) -> tuple[Any, ...]:
    return row.flags, row.precision, row.seq_len


def _asked(row: rows.Row, options: argparse.Namespace) -> bool:
    return not options.only or any(word in row.id for word in options.only.split(","))


def show(document: rows.Document, options: argparse.Namespace) -> None:
    """Print what the file has of this document; of a row that never ran there, why it failed last."""
    found = [one for one in _read(options.out) if one["document"] == document.name]
    bench = measures.Bench(machine=NO_MACHINE, ranks=1, tiny=False, seconds=0)
    print(_line(HEAD))
    print(_line(["---"] * len(HEAD)))
    for row in document.rows:
        if not _asked(row, options):
            continue
        of_row = [one for one in found if one["row"] == row.id]
        ran = {(one["machine"], one["ranks"]): one for one in of_row if one["ours"] is not None}
        computed = row.metric not in measures.MEASURED
        for result in [*ran.values()] or ([measured(row, bench)] if computed else of_row[-1:]):
            print(_line(cells(row, result)))
        if not (of_row or computed):
            print(_line(cells(row, {"ours": None, "reason": f"no result in {options.out.name}"})))


def measured(row: rows.Row, bench: measures.Bench) -> dict[str, Any]:
    """One row's result: `ours` and `how`, or `reason`."""
    facts: dict[str, Any] = {
        "document": row.document,
        "row": row.id,
        "published": row.value,
        "unit": row.unit,
        "convention": row.convention,
        "machine": bench.machine.model,
        "ranks": bench.ranks,
    }
    try:
        found = measures.measure(row, bench)
    except measures.CannotRunError as error:
        return {**facts, "ours": None, "reason": str(error), "failed": error.failed}
    ratio = found.value / row.middle if row.middle and found.comparable else None
    return {
        **facts,
        "ours": found.value,
        "ratio": ratio,
        "how": found.how,
        "proxy": found.proxy,
        "records": found.records,
    }


def cells(row: rows.Row, result: dict[str, Any]) -> list[str]:
    """The cells of a line of the table."""
    where = (
        f"{row.count or ''} {row.device or ''}{'' if row.device_unit == 'gpu' else f' ({row.device_unit})'}"
    )
    ours, ratio = result["ours"], result.get("ratio")
    return [
        row.id,
        where.strip() or "-",
        _number(row.value),
        _number(ours),
        "-" if ratio is None else f"{ratio:.2f}",
        row.unit if row.convention == "none" else f"{row.unit} {row.convention}",
        "-" if ratio is None else other_work(row, result),
        result.get("how") or f"not run: {_in_a_cell(result['reason'])}",
    ]


def other_work(row: rows.Row, result: dict[str, Any]) -> str:
    """What the two sides of a ratio do not share, beside the device."""
    differ = []
    if row.count and row.count != result["ranks"]:
        differ.append(f"{result['ranks']} GPU{'s' * (result['ranks'] > 1)} for {row.count}")
    if result.get("proxy"):
        differ.append("a proxy")
    if "16-bit sums" in result["how"]:
        differ.append("16-bit sums and moments")
    return ", ".join(differ) or "the device alone"


def _in_a_cell(text: str) -> str:
    """A reason may be a traceback: its first line says what ended, its last line why; --out has all of it."""
    lines = text.strip().splitlines()
    kept = lines if len(lines) <= SHORT else [lines[0], "…", lines[-1]]
    return " ".join(" ".join(kept).split()).replace("|", "/")


def _number(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return " to ".join(_number(one) for one in value)
    return f"{value:,.0f}" if value >= 10_000 else f"{value:.4g}"


def _line(values: Any) -> str:
    return f"| {' | '.join(values)} |"


def _read(path: Path | None) -> list[dict[str, Any]]:
    """Results of earlier calls: what failed or did not fit is tried again. The end of a last line may be
    missing: a call that was killed wrote it.
    """
    if path is None or not path.exists():
        return []
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    return [json.loads(line) for line in whole.splitlines()]


def machine_of(options: argparse.Namespace) -> Machine:
    """This machine, or the one that --device names, for its arithmetic alone."""
    if options.device == "CPU":
        return Machine(model="CPU", count=options.count or 1, memory_bytes=float("inf"), fp8=False)
    known = {entry["model"]: entry for entry in json.loads(peaks.TABLE.read_text())["devices"]}
    if options.device:
        if options.device not in known:
            raise RefusedError(f"--device {options.device}: not in {peaks.TABLE}; known: {', '.join(known)}")
        entry = known[options.device]
        return Machine(
            model=options.device,
            count=options.count or 1,
            memory_bytes=entry["memory_bytes"],
            fp8="fp8" in entry["peak_tflops"],
        )
    return _seen(known)


def _seen(known: dict[str, Any]) -> Machine:
    """The machine that torch shows."""
    import torch

    from world import Stop, World

    if not torch.cuda.is_available():
        raise RefusedError("no GPU here; --device CPU --tiny runs each row's command on a tiny model")
    peak = peaks.find(World(0, 1, torch.device("cuda", 0), Stop()))
    total = torch.cuda.get_device_properties(0).total_memory
    return Machine(
        model=peak.model,
        count=torch.cuda.device_count(),
        memory_bytes=total,
        fp8="fp8" in known[peak.model]["peak_tflops"],
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("document", help="a document of rows.yaml; a wrong name lists them")
    add("--only", help="rows whose id has one of these words, separated by commas")
    add("--ranks", type=int, help="GPUs to use [all]")
    add(
        "--seconds",
        type=float,
        default=20,
        help="seconds of a timed job, with its warm-up and without its start",
    )
    add(
        "--beside",
        type=lambda text: text.split(","),
        metavar="I,J",
        help="run rows on one GPU each, side by side on these GPUs",
    )
    add(
        "--budget-s",
        type=float,
        default=math.inf,
        help="seconds of all rows together; what has not begun by then is for the next call",
    )
    add(
        "--limit-s",
        type=float,
        default=measures.START_S,
        help="longest time of one job beside its --seconds: a job that hangs ends there, with its stacks",
    )
    add("--show", action="store_true", help="run nothing; print the table of what is in --out")
    add("--tiny", action="store_true", help="a tiny model in place of each: shows that the commands run")
    add(
        "--device", help="CPU, or a device model whose arithmetic is asked for without running [this machine]"
    )
    add("--count", type=int, help="number of devices, with --device")
    add("--out", type=Path, help="keep results here, a JSON line a row, and run only what is missing")
    parser.set_defaults(flags=[])
    parser.epilog = "More flags of train.py for every row follow after --."
    return parser


if __name__ == "__main__":
    launch.stop_runs_on_sigterm()
    sys.exit(main(sys.argv[1:]))
