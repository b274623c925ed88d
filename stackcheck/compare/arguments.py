"""The run that a user named for a comparison. In: an id, a file, a stack, an image, a driver. Out: `Side`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic_core import from_json

from stackcheck.compare.two_runs import Side, facts_of
from stackcheck.errors import ConfigurationError, NothingSelectedError
from stackcheck.history import metrics, record_reader, records
from stackcheck.history.runs import Query
from stackcheck.suite import results

if TYPE_CHECKING:
    from stackcheck.history.history import History
    from stackcheck.history.runs import Run

_PREFIX = re.compile(r"(sha256:)?[0-9a-f]{4,64}")
_DRIVER = "driver="
SHOWN = 8  # digits of a run id


def find(name: str, history: History, *, like: Run | None = None) -> tuple[Side, Run | None]:
    """The side that a name stands for, and its run; None for a file that is not in the history.

    Args:
        name: The beginning of a run id, record or image digest; a result.json; a stack id or image, or a
            pattern on them: its newest run; `driver=VERSION`: the newest run with this driver.
        history: Where to look.
        like: For `driver=`, the other side: the run has to be of its stack and device model.

    Raises:
        NothingSelectedError: Nothing has this name.
        ConfigurationError: Several runs have it.
        ResultError: The file is damaged.
    """
    if Path(name).is_file():
        return _of_file(Path(name)), None
    run = _of_digits(name, history) or _newest(name, history, like)
    if run is None:
        raise NothingSelectedError(
            "the history has no such run",
            got=name,
            expected="a run id, a result.json, a stack id, an image or driver=VERSION",
            next_step="stackcheck history",
        )
    return _of_run(run, history), run


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
