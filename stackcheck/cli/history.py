"""The verb `history`. In: filters. Out: runs, or a metric over runs; a table; the index made anew."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from stackcheck.cli import times
from stackcheck.cli.options import HERE, AsJson, Root, new_app
from stackcheck.cli.output import Progress, print_facts, print_json, print_table
from stackcheck.errors import ConfigurationError, NothingSelectedError
from stackcheck.history.history import open_history
from stackcheck.history.runs import HistoryError, Point, Query, Run
from stackcheck.history.spark import sparkline

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stackcheck.history.keeping import Imported

app = new_app()
group = new_app()
app.add_typer(group, name="history")

RUN_COLUMNS = ("STARTED", "STACK", "DEVICE", "DRIVER", "TIER", "VERDICT", "FAILED", "RUN", "")
SERIES_COLUMNS = ("METRIC", "CHECK", "STACK", "DEVICE", "RUNS", "MEDIAN", "NEWEST", "UNIT", "OVER TIME")
SHOWN_DIGITS = 8  # of a run id
SHOWN_DIGEST = len("sha256:") + 12

ANY = "any"
Stack = Annotated[
    str | None,
    typer.Option(
        "--stack",
        metavar="PATTERN",
        help="Stack id or image; here and below * and ? are wildcards.",
        show_default=ANY,
    ),
]
Device = Annotated[
    str | None, typer.Option("--device", metavar="PATTERN", help="Device model.", show_default=ANY)
]
Driver = Annotated[
    str | None,
    typer.Option(
        "--driver", metavar="PATTERN", help="Driver version, or a pattern of versions.", show_default=ANY
    ),
]
Check = Annotated[
    str | None,
    typer.Option(
        "--check",
        metavar="PATTERN",
        help="Runs in which this check failed or was waived; with --metric, metrics of this check.",
        show_default=ANY,
    ),
]
Metric = Annotated[
    str | None,
    typer.Option(
        "--metric",
        metavar="PATTERN",
        help="Show this metric over the runs, with a sparkline.",
        show_default="list the runs",
    ),
]
Since = Annotated[
    str | None,
    typer.Option(
        "--since",
        metavar="TIME",
        help="Runs since then: 30d, 12h, or a date such as 2026-11-01.",
        show_default=ANY,
    ),
]
StatusOption = Annotated[
    Literal["PASSED", "FAILED", "UNFIT"] | None,
    typer.Option("--status", help="Runs with this verdict.", show_default=ANY),
]
Limit = Annotated[int, typer.Option("--limit", min=1, help="At most so many runs, or values of metrics.")]


@group.callback(invoke_without_command=True)
def show_history(
    context: typer.Context,
    *,
    stack: Stack = None,
    device: Device = None,
    check: Check = None,
    metric: Metric = None,
    since: Since = None,
    status: StatusOption = None,
    limit: Limit = 1000,
    driver: Driver = None,
    as_json: AsJson = False,
    root: Root = HERE,
) -> None:
    """List the runs that were kept, the newest first; with --metric, one metric over the runs."""
    if context.invoked_subcommand is not None:
        return
    history = open_history(root.resolve())
    query = Query(
        stack=stack,
        device_model=device,
        driver=driver,
        check=check,
        metric=metric,
        since=times.since(since, "--since") if since else None,
        status=status,
        limit=limit,
    )
    if metric is None:
        found = history.runs(query)
        print_json([_run_json(run) for run in found]) if as_json else _print_runs(found)
        return
    points = history.points(query)
    print_json([_point_json(*each) for each in points]) if as_json else _print_series(points)


@group.command("export")
def export_history(
    *,
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="The file to write: .parquet or .csv.")],
    table: Annotated[
        Literal["metrics", "runs"], typer.Option("--table", help="One row for each metric, or for each run.")
    ] = "metrics",
    stack: Stack = None,
    device: Device = None,
    driver: Driver = None,
    check: Check = None,
    metric: Metric = None,
    since: Since = None,
    root: Root = HERE,
) -> None:
    """Write runs with their metrics to one Parquet or CSV file."""
    from stackcheck.history import export

    query = Query(
        stack=stack,
        device_model=device,
        driver=driver,
        check=check,
        metric=metric,
        since=times.since(since, "--since") if since else None,
    )
    rows = export.export(open_history(root.resolve()), query, to, table)
    print_facts({"file": str(to), "rows": str(rows)})


@group.command("import")
def import_results(
    paths: Annotated[
        list[Path], typer.Argument(metavar="RESULT.json|FOLDER", help="Results, or folders that hold some.")
    ],
    *,
    own_verdicts: Annotated[
        bool,
        typer.Option("--own-verdicts", help="Take the verdict.json beside a result instead of judging here."),
    ] = False,
    as_json: AsJson = False,
    root: Root = HERE,
) -> None:
    """Keep results of other machines, judged here; damaged ones are refused, and the others are kept."""
    from stackcheck.history import keeping

    folder = root.resolve()
    for path in paths:
        if not path.exists():
            raise ConfigurationError("no such file or folder", where=str(path), next_step="check the path")
    found = list(keeping.import_files(paths, open_history(folder), folder, own_verdicts=own_verdicts))
    print_json([_imported_json(each) for each in found]) if as_json else _print_imported(found)
    refused = [each for each in found if each.error]
    if refused:
        raise HistoryError(
            f"{len(refused)} of {len(found)} files were refused",
            got="\n    ".join(str(each.error).replace("\n", "\n    ") for each in refused),
            next_step="the other results are kept; get the refused ones again from their machines",
        )
    if all(each.fate == "no result" for each in found):
        raise NothingSelectedError(
            "there is no result in what was named",
            got=", ".join(map(str, paths)),
            expected="the result.json of a run, or a folder that holds some",
        )


@group.command("rebuild")
def rebuild_index(*, root: Root = HERE) -> None:
    """Make the index anew from the record files; damaged records are named and left out."""
    history = open_history(root.resolve())
    damaged = history.rebuild(Progress())
    runs = len(history.runs(Query()))
    print_facts({"index": history.index.url, "runs": str(runs), "damaged": str(len(damaged))})
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
    print_table(RUN_COLUMNS, [_run_row(run) for run in runs])


def _run_row(run: Run) -> tuple[str, ...]:
    first = run.failed[0] if run.failed else ""
    more = f" and {len(run.failed) - 1} more" if len(run.failed) > 1 else ""
    return (
        f"{run.started:%Y-%m-%d %H:%M}",
        _name(run),
        f"{run.device_model} x{run.device_count}",
        run.driver or "-",
        run.tier,
        run.status,
        first + more or "-",
        run.run_id[:SHOWN_DIGITS],
        "simulated" if run.simulated else "",
    )


def _name(run: Run) -> str:
    """The stack id; an image that has no name is shown by the beginning of its digest."""
    return run.stack[:SHOWN_DIGEST] if run.stack.startswith("sha256:") else run.stack


def _print_series(points: Sequence[tuple[Run, Point]]) -> None:
    """One line for each metric of each stack and machine model."""
    if not points:
        print("no run in the history has such a metric; `stackcheck history` lists the runs")
        return
    series: dict[tuple[str, ...], list[Point]] = defaultdict(list)
    for run, point in reversed(points):
        device = f"{run.device_model} x{run.device_count}"
        series[point.name, point.check, _name(run), device, point.unit].append(point)
    print_table(SERIES_COLUMNS, [_series_row(key, found) for key, found in sorted(series.items())])
    if len(series) == 1:
        print()
        rows = [_value_row(run, point) for run, point in points]
        print_table(("STARTED", "VALUE", "SPREAD", "DRIVER", "VERDICT", "RUN"), rows)


def _series_row(key: tuple[str, ...], points: Sequence[Point]) -> tuple[str, ...]:
    name, check, stack, device, unit = key
    values = [point.value for point in points]
    median = statistics.median(values)
    change = f" ({values[-1] / median - 1:+.1%})" if median else ""
    newest = f"{values[-1]:.5g}{change}"
    return name, check, stack, device, str(len(values)), f"{median:.5g}", newest, unit, sparkline(values)


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


def _point_json(run: Run, point: Point) -> dict[str, Any]:
    return dataclasses.asdict(point) | {"run": _run_json(run)}


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
