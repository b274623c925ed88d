"""The run that a user named for a comparison. In: an id, a file, a stack, an image, a driver. Out: `Side`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic_core import from_json

from stackcheck.compare import published_figures
from stackcheck.compare.two_runs import Side, facts_of
from stackcheck.errors import ConfigurationError, NothingSelectedError
from stackcheck.history import metrics, record_reader, records
from stackcheck.history.runs import Point, Query
from stackcheck.suite import results

if TYPE_CHECKING:
    from stackcheck.history.history import History
    from stackcheck.history.runs import Run

_PREFIX = re.compile(r"(sha256:)?[0-9a-f]{4,64}")
_DRIVER = "driver="
_ROW, _OURS = "row:", "ours:"
SHOWN = 8  # digits of a run id


def find(name: str, history: History, root: Path, *, like: Run | None = None) -> tuple[Side, Run | None]:
    """The side that a name stands for, and its run; None for a file that is not in the history.

    Args:
        name: The beginning of a run id, record or image digest; a result.json; a stack id or image, or a
            pattern on them: its newest run; `driver=VERSION`: the newest run with this driver; `row:NAME`: a
            figure of a founding document; `ours:NAME`: what was measured of that row here.
        history: Where to look.
        root: The checkout, which has the founding documents' figures.
        like: For `driver=`, the other side: the run has to be of its stack and device model.

    Raises:
        NothingSelectedError: Nothing has this name.
        ConfigurationError: Several runs have it.
        ResultError: The file is damaged.
    """
    if name.startswith((_ROW, _OURS)):
        return _of_row(name, root), None
    if Path(name).is_file():
        return _of_file(Path(name)), None
    run = _of_digits(name, history) or _newest(name, history, like)
    if run is None:
        raise NothingSelectedError(
            "the history has no such run",
            got=name,
            expected="a run id, a result.json, a stack id, an image, driver=VERSION, row:NAME or ours:NAME",
            next_step="stackcheck history",
        )
    return _of_run(run, history), run


def _of_row(name: str, root: Path) -> Side:
    """A published figure, or ours of the same row: one point, which two rows of one metric share."""
    kind, _, asked = name.partition(":")
    row = published_figures.find(asked, root)
    value, machine, words = row.value, row.machine, row.source
    if kind == "ours":
        measured = [each for each in row.ours if each.value is not None]
        if not measured:
            reasons = "; ".join(f"{each.machine}: {each.words}" for each in row.ours)
            raise NothingSelectedError(
                "this row was not measured here",
                got=reasons or f"no line for {row.name} in {' or '.join(published_figures.MEASURED)}",
                next_step=f"python trainers/tools/table.py {row.document} --only {row.id} --out "
                f"build/rows/{row.document}.jsonl",
            )
        value, machine, words = measured[-1].value, measured[-1].machine, measured[-1].words
    if value is None:
        raise NothingSelectedError("the document gives no number for this row", got=row.name)
    point = Point(
        record=name,
        check="founding documents",
        name=row.metric,
        unit=row.unit,
        value=value,
        repeats=(),
        direction="min",
        bound=None,
        ceiling=None,
    )
    facts = {"row": {"name": row.name, "machine": machine, "convention": row.convention, "source": words}}
    return Side(
        label=f"{kind} {row.name} ({machine})", node=f"{kind} {machine}", points=(point,), facts=facts
    )


def of_result(body: bytes, label: str) -> Side:
    """The side of a result.json."""
    result = from_json(body)
    found = metrics.of(result)
    points = tuple(record_reader.points(found, label))
    return Side(label=label, node=found["run"]["node"], points=points, facts=facts_of(result))


def _of_file(path: Path) -> Side:
    body = results.read_result_file(path)
    results.parse(body, where=str(path))
    return of_result(body, str(path))


def _of_run(run: Run, history: History) -> Side:
    data = history.records.read(run.record)
    machine = f"{run.device_model} x{run.device_count}"
    driver = f", driver {run.driver}" if run.driver else ""
    when = f"{run.started:%Y-%m-%d %H:%M}"
    return of_result(
        records.result_of(data),
        f"{run.run_id[:SHOWN]} ({run.stack}, {machine}{driver}, {when}, {run.status})",
    )


def _of_digits(name: str, history: History) -> Run | None:
    """The one run whose id, record or image begins with these digits."""
    if not _PREFIX.fullmatch(name):
        return None
    found = {run.run_id: run for run in history.index.find(name)}
    images = {run.image for run in found.values()}
    if len(found) > 1 and len(images) == 1 and None not in images:
        return max(found.values(), key=lambda run: run.started)  # several runs of one image: the newest
    if len(found) > 1:
        raise ConfigurationError(
            "several runs begin with these digits",
            got=name,
            expected="one of " + ", ".join(sorted(found)[:5]),
            next_step="give more digits",
        )
    return next(iter(found.values()), None)


def _newest(name: str, history: History, like: Run | None) -> Run | None:
    if not name.startswith(_DRIVER):
        return history.latest(Query(stack=name))
    stack, model = (like.stack, like.device_model) if like else (None, None)
    return history.latest(Query(driver=name.removeprefix(_DRIVER), stack=stack, device_model=model))
