"""Run the rows of a founding document that fit this machine, and print published, ours and their ratio.

    python trainers/tools/table.py amd-container --out rows.jsonl
    python trainers/tools/table.py frontier --ranks 2 --only tensor,pipeline --seconds 20
    python trainers/tools/table.py mosaicml-june --device CPU --tiny

Out: a Markdown table; every row of the document is in it, and one that did not run has its reason. With --out
one JSON line a row, with the records; rows that are there already are not run again. Exit code 0: every row
that fits ran. 1: one failed. 2: no such document, or no such machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run by path: find the rooms of trainers/ as train.py does, and not tools/ itself
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import peaks
import rows
from errors import RefusedError
from tools import measures
from tools.fit import Machine

HEAD = ("row", "published on", "published", "ours", "ratio", "unit", "how")


def main(arguments: list[str]) -> int:
    """The exit code."""
    # argparse gives what follows -- to the first positional argument that is still open: none here.
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options = _parser().parse_args(arguments[:cut])
    options.flags = arguments[cut + 1 :]
    try:
        document = rows.document(options.document)
        machine = machine_of(options)
    except RefusedError as error:
        print(f"table.py: {error}", file=sys.stderr)
        return 2
    print(f"{document.title}; here: {machine.count} x {machine.model}\n", flush=True)
    results = run(document, machine, options)
    return 1 if any(result.get("failed") for result in results) else 0


def run(document: rows.Document, machine: Machine, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure and print row by row, so that a time limit loses nothing."""
    done = _kept(options.out)
    bench = measures.Bench(
        machine=machine,
        ranks=options.ranks or machine.count,
        tiny=options.tiny,
        seconds=options.seconds,
        more=tuple(options.flags),
    )
    print(_line(HEAD))
    print(_line(["---"] * len(HEAD)), flush=True)
    results = []
    for row in document.rows:
        if options.only and not any(word in row.id for word in options.only.split(",")):
            continue
        result = done.get((document.name, row.id)) or measured(row, bench)
        results.append(result)
        print(_line(cells(row, result)), flush=True)
        if options.out and (document.name, row.id) not in done:
            with options.out.open("a") as out:
                out.write(json.dumps(result) + "\n")
    return results


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
        result.get("how") or f"not run: {result['reason']}",
    ]


def _number(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return " to ".join(_number(one) for one in value)
    return f"{value:,.0f}" if value >= 10_000 else f"{value:.4g}"


def _line(values: Any) -> str:
    return f"| {' | '.join(values)} |"


def _kept(path: Path | None) -> dict[tuple[str, str], dict[str, Any]]:
    """Results of an earlier call that ran: what failed or did not fit is tried again."""
    if path is None or not path.exists():
        return {}
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return {(one["document"], one["row"]): one for one in found if one["ours"] is not None}


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
    add("document", help=f"one of {', '.join(rows.load())}")
    add("--only", help="rows whose id has one of these words, separated by commas")
    add("--ranks", type=int, help="GPUs to use [all]")
    add(
        "--seconds",
        type=float,
        default=20,
        help="seconds of a timed job, with its warm-up and without its start",
    )
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
    sys.exit(main(sys.argv[1:]))
