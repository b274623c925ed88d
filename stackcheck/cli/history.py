"""The verb `history`. In: filters. Out: runs, or a metric over runs; a table; a new index."""

import dataclasses
import itertools
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from stackcheck.cli import options
from stackcheck.cli import options as opt
from stackcheck.cli.output import Progress, counted, print_facts, print_fitted, print_json, print_table
from stackcheck.errors import ConfigurationError, NothingSelectedError
from stackcheck.history import alerts, export, recorder
from stackcheck.history.history import open_history
from stackcheck.history.recorder import Imported
from stackcheck.history.runs import HistoryError, Point, Query, Run, named

app = opt.new_app()
group = opt.new_app()
app.add_typer(group, name="history")

RUN_COLUMNS = ("STARTED", "STACK", "DEVICE", "DRIVER", "TIER", "VERDICT", "FAILED", "RUN", "")
SERIES_COLUMNS = (
    *("METRIC", "CHECK", "STACK", "DEVICE", "RUNS", "MEDIAN", "NEWEST", "UNIT", "OWN NIGHTS", "OVER TIME"),
)
WATCH_COLUMNS = ("RULE", "SINCE", "LOSS", "STACK", "WHAT")
WATCHED_RUNS = 2000
LEVELS, WIDTH = "▁▂▃▄▅▆▇█", 40  # of a sparkline
SHOWN_DIGITS = 8  # of a run id

ANY = "any"
Stack = Annotated[
    str | None, opt.option("--stack PATTERN", "Stack id or image; here and below * and ? are wildcards.", ANY)
]
Device = Annotated[str | None, opt.option("--device-model --device PATTERN", "Device model.", ANY)]
Driver = Annotated[
    str | None, opt.option("--driver PATTERN", "Driver version, or a pattern of versions.", ANY)
]
Check = Annotated[
    str | None,
    opt.option(
        "--check PATTERN",
        "Runs in which this check failed or was waived; with --metric, metrics of this check.",
        ANY,
    ),
]
Metric = Annotated[
    str | None,
    opt.option("--metric PATTERN", "Show this metric over the runs, with a sparkline.", "list the runs"),
]
Since = Annotated[
    str | None,
    opt.option("--since TIME", "Runs since then: 30d, 12h, yesterday, or a date such as 2026-11-01.", ANY),
]
StatusOption = Annotated[
    Literal["PASSED", "FAILED", "UNFIT"] | None, opt.option("--status", "Runs with this verdict.", ANY)
]
Limit = Annotated[int, opt.option("--limit", "At most so many runs, or values of metrics.", min=1)]


def _query(
    *,
    stack: Stack = None,
    device_model: Device = None,
    driver: Driver = None,
    check: Check = None,
    metric: Metric = None,
    since: Since = None,
) -> Query:
    """The runs that the options of these verbs choose."""
    return Query(
        stack=stack,
        device_model=device_model,
        driver=driver,
        check=check,
        metric=metric,
        since=options.since(since, "--since") if since else None,
    )


filtered = opt.taking("query", _query, late=("device_model", "driver"))


@group.callback(invoke_without_command=True)
@filtered
def show_history(
    context: typer.Context,
    *,
    query: Query,
    status: StatusOption = None,
    limit: Limit = 1000,
    as_json: opt.AsJson = False,
    root: opt.Root = opt.HERE,
) -> None:
    """List the runs that were kept, the newest first; with --metric, one metric over the runs."""
    if context.invoked_subcommand is not None:
        return
    history = open_history(root.resolve())
    query = dataclasses.replace(query, status=status, limit=limit)
    if query.metric is None:
        found = history.runs(query)
        print_json([_run_json(run) for run in found]) if as_json else _print_runs(found)
        return
    points = history.points(query)
    if as_json:
        print_json([dataclasses.asdict(point) | {"run": _run_json(run)} for run, point in points])
    else:
        _print_series(points)


@group.command("watch")
@filtered
def watch_history(*, query: Query, as_json: opt.AsJson = False, root: opt.Root = opt.HERE) -> None:
    """What got worse: the newest run of each stack on each machine, against the machine's own last nights.

    The options choose the runs, of the newest 2000. These are warnings, as each night prints them: the exit
    code is 0. Steps are named if two machines or two metrics show them.
    """
    history = open_history(root.resolve())
    runs = history.runs(dataclasses.replace(query, limit=WATCHED_RUNS))
    newest = {(run.stack, run.node): run for run in reversed(runs) if run.status != "UNFIT"}
    found = {each: None for run in newest.values() for each in alerts.look(history, run)}
    rows = [(each.rule, f"{each.since}", f"{each.loss:.1%}", each.stack, each.words) for each in found]
    if as_json:
        print_json(
            [dataclasses.asdict(each) | {"since": f"{each.since}", "words": each.words} for each in found]
        )
    elif rows:
        print_fitted(WATCH_COLUMNS, rows)
    else:
        print(f"nothing got worse in the newest runs of {counted(len(newest), 'pair')} of stack and machine")


@group.command("export")
@filtered
def export_history(
    *,
    query: Query,
    to: Annotated[Path, opt.option("--to FILE", "The file to write: .parquet or .csv.")],
    table: Annotated[
        Literal["metrics", "runs"], opt.option("--table", "One row for each metric, or for each run.")
    ] = "metrics",
    root: opt.Root = opt.HERE,
) -> None:
    """Write runs with their metrics to one Parquet or CSV file."""
    rows = export.export(open_history(root.resolve()), query, to, table)
    print_facts({"file": str(to), "rows": str(rows)})


@group.command("import")
def import_results(
    paths: Annotated[
        list[Path], opt.argument("RESULT.json|FOLDER", "Results, or folders that hold some.", exists=True)
    ],
    *,
    own_verdicts: Annotated[
        bool, opt.option("--own-verdicts", "Take the verdict.json beside a result instead of judging here.")
    ] = False,
    as_json: opt.AsJson = False,
    root: opt.Root = opt.HERE,
) -> None:
    """Keep results of other machines, judged here; damaged ones are refused, and the others are kept."""
    folder = root.resolve()
    for path in paths:
        if not path.exists():
            raise ConfigurationError("no such file or folder", where=str(path), next_step="check the path")
    found = list(recorder.import_files(paths, open_history(folder), folder, own_verdicts=own_verdicts))
    print_json([_imported_json(each) for each in found]) if as_json else _print_imported(found)
    refused = [each for each in found if each.error]
    if refused:
        raise HistoryError(
            f"{len(refused)} of {counted(len(found), 'file')} refused",
            got="\n    ".join(str(each.error).replace("\n", "\n    ") for each in refused),
            next_step="the other results are kept; get the refused ones again from their machines",
        )
    if all(each.fate == "no result" for each in found):
        raise NothingSelectedError(
            "no result was found in these paths",
            got=", ".join(map(str, paths)),
            expected="the result.json of a run, or a folder that holds some",
        )


@group.command("rebuild")
def rebuild_index(*, root: opt.Root = opt.HERE) -> None:
    """Rebuild the index from the record files; damaged records are named and left out."""
    history = open_history(root.resolve())
    damaged = history.rebuild(Progress())
    runs = len(history.runs(Query()))
    print_facts({"index": history.url, "runs": str(runs), "damaged": str(len(damaged))})
    if damaged:
        raise HistoryError(
            "some records are damaged and are not in the index",
            where=history.records.url,
            got="\n    ".join(str(error).replace("\n", "\n    ") for error in damaged),
            next_step="restore these files from a copy, or import the runs again",
        )


def _print_runs(runs: Sequence[Run]) -> None:
    if not runs:
        print("no run in the history matches; `stackcheck test` and `stackcheck history import` add runs")
        return
    print_fitted(RUN_COLUMNS, [_run_row(run) for run in runs], keep="RUN")


def _run_row(run: Run) -> tuple[str, ...]:
    failed = [name for name in run.failed if name not in run.waived]
    first, more = "".join(failed[:1]), f" and {len(failed) - 1} more" if len(failed) > 1 else ""
    return (
        f"{run.started:%Y-%m-%d %H:%M}",
        named(run.stack),
        f"{run.device_model} x{run.device_count}",
        run.driver or "-",
        run.tier,
        run.status,
        first + more or "-",
        run.run_id[:SHOWN_DIGITS],
        "simulated" if run.simulated else "",
    )


def _print_series(points: Sequence[tuple[Run, Point]]) -> None:
    """One line for each metric of each stack and machine model."""
    if not points:
        print("no run in the history has such a metric; `stackcheck history` lists the runs")
        return
    series: dict[tuple[str, ...], list[tuple[Run, Point]]] = defaultdict(list)
    for run, point in reversed(points):
        device = f"{run.device_model} x{run.device_count}"
        series[point.name, point.check, named(run.stack), device, point.unit].append((run, point))
    print_fitted(SERIES_COLUMNS, [_series_row(key, found) for key, found in sorted(series.items())])
    if len(series) == 1:
        print()
        rows = [_value_row(run, point) for run, point in points]
        print_table(("STARTED", "VALUE", "SPREAD", "DRIVER", "VERDICT", "RUN"), rows)


def _series_row(key: tuple[str, ...], pairs: Sequence[tuple[Run, Point]]) -> tuple[str, ...]:
    name, check, stack, device, unit = key
    values = [point.value for _, point in pairs]
    median = statistics.median(values)
    change = f" ({values[-1] / median - 1:+.1%})" if median else ""
    newest = f"{values[-1]:.5g}{change}"
    count, line = str(len(values)), sparkline(values)
    return name, check, stack, device, count, f"{median:.5g}", newest, unit, _own_nights(pairs), line


def _own_nights(pairs: Sequence[tuple[Run, Point]]) -> str:
    """Compare the newest value of each chip with its own last nights; return the worst result."""
    found = alerts.against_own_nights(pairs)
    if not found:
        return "too few"
    worst = max(found, key=lambda each: (each.is_below, each.loss))
    return f"BELOW by {worst.loss:.1%}" if worst.is_below else "as usual"


def _value_row(run: Run, point: Point) -> tuple[str, ...]:
    spread = (
        (max(point.repeats) - min(point.repeats)) / abs(point.value)
        if point.repeats and point.value
        else None
    )
    return (
        f"{run.started:%Y-%m-%d %H:%M}",
        f"{point.value:.5g}",
        "-" if spread is None else f"{spread:.1%}",
        run.driver or "-",
        run.status,
        run.run_id[:SHOWN_DIGITS],
    )


def _run_json(run: Run) -> dict[str, Any]:
    times = {"started": run.started.isoformat(), "finished": run.finished.isoformat()}
    return dataclasses.asdict(run) | times


def _imported_json(each: Imported) -> Mapping[str, Any]:
    error = each.error.what if each.error else None
    return dataclasses.asdict(each) | {"file": str(each.file), "error": error}


def _print_imported(found: Sequence[Imported]) -> None:
    rows = [
        (str(each.file), each.fate, each.status or "-", f"judged {each.judged}" if each.judged else "")
        for each in found
        if each.fate != "no result"
    ]
    print_table(("FILE", "FATE", "VERDICT", ""), rows)
    others = sum(each.fate == "no result" for each in found)
    if others:
        print(f"{others} other JSON files of these folders are not results")


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """One character a value, from least to largest; of more values than `width`, medians of groups."""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [statistics.median(values[a:b]) for a, b in itertools.pairwise(edges)]
    low, high = min(values, default=0.0), max(values, default=0.0)
    if low == high:
        return LEVELS[len(LEVELS) // 2] * len(values)
    return "".join(LEVELS[round((value - low) / (high - low) * (len(LEVELS) - 1))] for value in values)
