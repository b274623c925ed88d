"""The verb `baseline`. In: result files. Out: a table and a diff; with --write also the thresholds file."""

from pathlib import Path
from typing import Annotated

from stackcheck.cli import options as opt
from stackcheck.cli.output import counted, print_json, print_table
from stackcheck.errors import ConfigurationError
from stackcheck.proof import baseline, thresholds
from stackcheck.suite import results

app = opt.new_app()

WRITTEN = (
    "written; review and commit it, with these results in docs/results; then, in tests/acceptance: "
    "python -m harness.derive"
)
COLUMNS = ("METRIC", "CONDITIONS", "NOW", "PROPOSED", "UNIT", "", "MEDIAN", "SPREAD")


@app.command("baseline")
def propose_thresholds(
    files: Annotated[
        list[Path],
        opt.argument("RESULT.json", "Results of healthy runs, 3 or more; with --one-run, 1.", exists=True),
    ],
    *,
    write: Annotated[bool, opt.option("--write", "Write the proposals to the thresholds file.")] = False,
    one_run: Annotated[
        bool,
        opt.option(
            "--one-run", "Take one run alone, with margins of 10 %, or 15 % where the host decides too."
        ),
    ] = False,
    others: opt.FromOthers = None,
    as_json: opt.AsJson = False,
    root: opt.Root = opt.HERE,
) -> None:
    """Propose thresholds from healthy runs: the median minus 5 % or three robust spreads."""
    found = baseline.propose([_loaded(path) for path in files], root=root.resolve(), one_run=one_run)
    file = thresholds.load_thresholds(root.resolve(), found.vendor, found.model)
    entries = [proposal.entry for proposal in found.proposals]
    thresholds.require_clean(root.resolve(), found.model, file.merged(entries), file.path)
    if write and entries:
        thresholds.write(file, entries)
    if as_json:
        print_json(_document(found, file, written=write))
        return
    print_table(COLUMNS, [_row(proposal) for proposal in found.proposals])
    if others:
        _show_others(others, found, root.resolve())
    for line in found.left_out:
        print(f"left out: {line}")
    print(file.diff(entries), end="")
    done = WRITTEN if write else "nothing written; add --write to write them"
    print(f"{file.path}: from {counted(found.runs, 'run')}, entries: {len(entries)}; {done}")


def _show_others(folder: Path, found: baseline.Baseline, root: Path) -> None:
    """What others measured, beside each proposal that they have a figure for."""
    from stackcheck.proof import contribution

    bundles = list(contribution.folder(folder, root))
    theirs = contribution.medians(bundles, found.model)
    pairs = [(proposal, theirs.get(proposal.entry.key())) for proposal in found.proposals]
    rows = [
        (
            proposal.entry.metric,
            " ".join(f"{key}={value}" for key, value in proposal.entry.conditions.items()),
            f"{proposal.median:.4g}",
            f"{other[0]:.4g}",
            f"{proposal.median / other[0] - 1:+.1%}",
            str(other[1]),
        )
        for proposal, other in pairs
        if other
    ]
    print(f"\nWhat others measured on {found.model}:")
    print_table(("METRIC", "CONDITIONS", "HERE", "OTHERS", "DIFFERENCE", "RUNS"), rows)


def _loaded(path: Path) -> results.RunResult:
    if not path.is_file():
        raise ConfigurationError(
            "no such file", where=str(path), expected="the result.json of a run: build/STACK/run/result.json"
        )
    return results.load_result(path)


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
                "entry": proposal.entry.as_json(),
                "now": proposal.now.as_json() if proposal.now else None,
                "change": proposal.change,
                "median": proposal.median,
                "spread": proposal.spread,
                "values": list(proposal.values),
            }
            for proposal in found.proposals
        ],
    }
