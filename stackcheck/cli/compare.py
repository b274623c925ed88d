"""The verb `compare`. In: two runs, or with --paired two images. Out: what got worse, and likely causes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from stackcheck.cli import options as opt
from stackcheck.cli.output import Progress, counted, print_facts, print_json, print_table
from stackcheck.errors import ChecksFailedError, ConfigurationError
from stackcheck.files.checkout import exclusive
from stackcheck.policy import Tier as TierName

if TYPE_CHECKING:
    from stackcheck.compare.paired_runs import PairedMetric, PairedRuns
    from stackcheck.compare.two_runs import Compared, Comparison
    from stackcheck.flow import FlowSettings

app = opt.new_app()

COLUMNS = ("VERDICT", "METRIC", "A", "B", "UNIT", "B/A", "INTERVAL", "CHECK")
PAIRED_COLUMNS = ("VERDICT", "METRIC", "A", "B", "UNIT", "LOSS", "COUNTS FROM", "FINDS", "CHECK")
SHOWN_VALUE = 60  # characters of a differing value; an environment variable can have thousands

RunName = Annotated[
    str,
    opt.argument(
        "A",
        "A run id, a result.json, a stack or image (its newest run), driver=VERSION; with "
        "--paired a stack id or an image.",
    ),
]


@app.command("compare")
def compare_runs(
    a: RunName,
    b: Annotated[str, opt.argument("B", "The same, for the other side.")],
    *,
    paired: Annotated[
        bool, opt.option("--paired", "Run both images in turn on this node; slow-downs from 2 % are found.")
    ] = False,
    checks: Annotated[
        str | None,
        opt.option(
            "--checks EXPRESSION",
            "With --paired, which checks: an expression for pytest's -k.",
            "those that measure speed",
        ),
    ] = None,
    rounds: Annotated[int, opt.option("--rounds", "With --paired, runs of each side.", min=3)] = 5,
    every: Annotated[bool, opt.option("--all", "Also list the metrics that are equal.")] = False,
    accept_python: opt.AcceptPython = None,
    tier: Annotated[TierName, opt.option("--tier", "How thorough the suites are.")] = "standard",
    vendor: opt.Vendor = None,
    as_json: opt.AsJson = False,
    dry_run: opt.DryRun = False,
    root: opt.Root = opt.HERE,
) -> None:
    """Compare every metric of two runs, the worst first; then list what differs between them.

    With --paired, exit 6 if B is slower in a metric.
    """
    from stackcheck.cli.images import settings_of

    folder = root.resolve()
    accepted = opt.accepted_python(accept_python, a, b)
    if accepted and not paired:
        raise ConfigurationError(
            "--accept-python is for --paired",
            got="two runs to compare, and no image to run",
            expected="--paired, which runs the images",
            next_step="leave the option out",
        )
    if not paired:
        _compare(a, b, folder, every=every, as_json=as_json)
    elif dry_run:
        runs = counted(rounds, "run")
        print(f"{a} against itself, then {b} against {a}: {runs} of each side, {4 * rounds} in all")
    else:
        settings = settings_of(folder, vendor=vendor, accepted=accepted)
        _pair(a, b, settings, checks=checks, rounds=rounds, tier=tier, as_json=as_json)


def _compare(a: str, b: str, root: Path, *, every: bool, as_json: bool) -> None:
    from stackcheck.compare import two_runs
    from stackcheck.history.history import open_history

    history = open_history(root)
    one, run = two_runs.find(a, history)
    other, _ = two_runs.find(b, history, like=run)
    found = two_runs.compare(one, other)
    if as_json:
        print_json(_document(found))
        return
    _print(found, every=every)


def _print(found: Comparison, *, every: bool) -> None:
    margin = f"a difference counts from {found.margin:.0%}"
    where = "one machine" if found.a.node == found.b.node else "two machines"
    print_facts({"A": found.a.label, "B": found.b.label, "margin": f"{margin} ({where})"})
    shown = [each for each in found.metrics if every or each.verdict != "equal"]
    print()
    if shown:
        print_table(COLUMNS, [_row(each) for each in shown])
    counts = {each.verdict: found.count(each.verdict) for each in found.metrics}
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "no metric")
    print()
    if found.differences:
        print("what differs, the likeliest cause first:")
        rows = [(each.group, each.name, _short(each.a), _short(each.b)) for each in found.differences]
        print_table(("", "NAME", "A", "B"), rows)
    else:
        print("nothing differs in driver, device, software, environment, choices, suites, machine and image")


def _row(each: Compared) -> tuple[str, ...]:
    low, high = each.interval or (None, None)
    return (
        each.verdict,
        each.name,
        _number(each.a),
        _number(each.b),
        each.unit,
        _number(each.ratio, 4),
        f"{low:.4f} to {high:.4f}" if low is not None else "-",
        each.check,
    )


def _number(value: float | None, digits: int = 5) -> str:
    return "-" if value is None else f"{value:.{digits}g}"


def _short(value: str | None) -> str:
    if value is None:
        return "(none)"
    return value if len(value) <= SHOWN_VALUE else f"{value[: SHOWN_VALUE - 1]}…"


def _document(found: Comparison) -> dict[str, Any]:
    return {
        "a": found.a.label,
        "b": found.b.label,
        "margin": found.margin,
        "metrics": [dataclasses.asdict(each) for each in found.metrics],
        "differences": [dataclasses.asdict(each) for each in found.differences],
    }


def _pair(
    a: str, b: str, settings: FlowSettings, *, checks: str | None, rounds: int, tier: TierName, as_json: bool
) -> None:
    from stackcheck import flow
    from stackcheck.cli import build as building
    from stackcheck.compare import paired_runs
    from stackcheck.suite import subject as subjects

    report, root = Progress(), settings.root
    with exclusive(root, "stackcheck compare --paired", report):
        engine = building.connected(report, builds=not all(map(subjects.is_reference, (a, b))))
        one, other = (flow.find_subject(name, engine, settings, report) for name in (a, b))
        found = paired_runs.paired(
            one,
            other,
            engine,
            root=root,
            tier=tier,
            only=checks or paired_runs.SPEED,
            rounds=rounds,
            report=report,
        )
    print_json(dataclasses.asdict(found)) if as_json else _print_pair(found)
    _require_equal(found, root)


def _print_pair(found: PairedRuns) -> None:
    print_facts({"A": found.a, "B": found.b, "runs": f"{found.rounds} of each, in turn, on this node"})
    print()
    print_table(PAIRED_COLUMNS, [_paired_row(each) for each in found.metrics])


def _paired_row(each: PairedMetric) -> tuple[str, ...]:
    from statistics import median

    pair = each.pair
    finds = f"{pair.resolves:.2%}" if pair.resolves < 1 else "nothing"
    numbers = (f"{pair.loss:+.2%}", f"{pair.limit:.2%}", finds)
    return (
        pair.verdict,
        each.name,
        f"{median(each.a):.5g}",
        f"{median(each.b):.5g}",
        each.unit,
        *numbers,
        each.check,
    )


def _require_equal(found: PairedRuns, root: Path) -> None:
    slower = found.slower()
    if slower:
        worst = [f"{each.name} of {each.check}: {each.pair.loss:.1%} slower" for each in slower[:5]]
        raise ChecksFailedError(
            f"B is slower than A in {len(slower)} of {counted(len(found.metrics), 'metric')}",
            got="\n    ".join(worst),
            expected="a loss below the margin of each metric on this node",
            next_step=f"read {root / 'build' / 'paired' / 'result.json'}, which has every run",
        )
