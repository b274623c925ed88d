"""The verb `baseline`. In: result files. Out: a table and a diff; the thresholds file only on request."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stackcheck.cli.options import HERE, AsJson, Root
from stackcheck.cli.output import print_json, print_table
from stackcheck.proof import baseline, thresholds
from stackcheck.suite import results

app = typer.Typer(rich_markup_mode=None)

COLUMNS = ("METRIC", "CONDITIONS", "NOW", "PROPOSED", "UNIT", "", "MEDIAN", "SPREAD")


@app.command("baseline")
def propose_thresholds(
    files: Annotated[
        list[Path], typer.Argument(metavar="RESULT.json…", help="Results of healthy runs, 3 or more.")
    ],
    *,
    write: Annotated[
        bool, typer.Option("--write", help="Put the proposals into the thresholds file.")
    ] = False,
    as_json: AsJson = False,
    root: Root = HERE,
) -> None:
    """Propose thresholds from n healthy runs: the median minus 5 % or three robust spreads."""
    found = baseline.propose([results.load(path) for path in files], root=root.resolve())
    file = thresholds.load(root.resolve(), found.vendor, found.model)
    entries = [proposal.entry for proposal in found.proposals]
    thresholds.require_clean(root.resolve(), found.model, file.merged(entries), file.path)
    if write and entries:
        thresholds.write(file, entries)
    if as_json:
        print_json(_document(found, file, written=write))
        return
    print_table(COLUMNS, [_row(proposal) for proposal in found.proposals])
    for line in found.left_out:
        print(f"left out: {line}")
    print(file.diff(entries), end="")
    done = "written; review it and commit it" if write else "nothing was written; --write does"
    print(f"{file.path}: {len(entries)} entries of {found.runs} runs: {done}")


def _row(proposal: baseline.Proposal) -> tuple[str, ...]:
    entry, now = proposal.entry, proposal.now
    conditions = " ".join(f"{key}={value}" for key, value in entry.conditions.items())
    held = f"{now.bound:g}" if now else "-"
    figures = f"{proposal.median:.4g}", f"{proposal.spread:.2%}"
    return entry.metric, conditions, held, f"{entry.bound:g}", entry.unit, proposal.change, *figures


def _document(
    found: baseline.Baseline, file: thresholds.ThresholdsFile, *, written: bool
) -> dict[str, object]:
    return {
        "vendor": found.vendor,
        "model": found.model,
        "runs": found.runs,
        "file": str(file.path),
        "written": written,
        "left_out": list(found.left_out),
        "proposals": [
            {
                "entry": proposal.entry.model_dump(),
                "now": proposal.now.model_dump() if proposal.now else None,
                "change": proposal.change,
                "median": proposal.median,
                "spread": proposal.spread,
                "values": list(proposal.values),
            }
            for proposal in found.proposals
        ],
    }
