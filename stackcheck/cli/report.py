"""The verb `report`. In: the history and what a target publishes. Out: a page, Markdown, or figures."""

from __future__ import annotations

import dataclasses
import datetime as dt
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from stackcheck import vendors
from stackcheck.certificate.policy import MAX_AGE
from stackcheck.cli import options
from stackcheck.cli import options as opt
from stackcheck.cli.output import Progress, print_json
from stackcheck.errors import ConfigurationError, StackcheckError
from stackcheck.files.atomic import write_atomically
from stackcheck.report import verb_files
from stackcheck.report.standing import StandingMachine
from stackcheck.report.verb_files import Campaign, NightlyFile

if TYPE_CHECKING:
    from stackcheck.history.history import History
    from stackcheck.report.content import Content, Offered

app = opt.new_app()

PAGE = Path("build") / "report.html"
SINCE = "90d"
Format = Literal["html", "markdown", "prometheus"]


Out = Annotated[
    Path | None, opt.option("--out FILE", "Where to write it.", "build/report.html; other formats: stdout")
]
Form = Annotated[
    Format, opt.option("--format", "One HTML page, Markdown for a job summary, or Prometheus' text.")
]
Source = Annotated[
    str | None,
    opt.option(
        "--from TARGET", "Where images are published: oci:DIR or HOST/REPO.", "`publish` in matrix.yaml"
    ),
]
Folder = Annotated[
    Path | None,
    opt.option(
        "--history DIR",
        "A folder with a history.",
        "`history` in matrix.yaml, else build/history",
        exists=True,
    ),
]
Since = Annotated[
    str, opt.option("--since TIME", "Runs since then: 30d, 12h, yesterday, or a date such as 2026-11-01.")
]
Faults = Annotated[
    Path | None,
    opt.option(
        "--faults FILE",
        "What `stackcheck prove --json` printed.",
        "build/faults.json, if it exists",
        exists=True,
    ),
]
ShownFirst = Annotated[
    str | None,
    opt.option(
        "--machine MODEL[/DRIVER]",
        "The machine to show first, such as MI300X/30.30.3; without a driver: CPU.",
        "this host",
    ),
]

Refresh = Annotated[
    str | None,
    opt.option(
        "--refresh TIME",
        "For a wall: the fleet comes first, and a browser loads the page again so often, such as 5m.",
        "never",
    ),
]


@app.command("report")
def write_report(
    *,
    out: Out = None,
    form: Form = "html",
    source: Source = None,
    history: Folder = None,
    since: Since = SINCE,
    faults: Faults = None,
    machine: ShownFirst = None,
    refresh: Refresh = None,
    others: opt.FromOthers = None,
    key: opt.PublicKey = None,
    plain_http: opt.PlainHttp = False,
    as_json: opt.AsJson = False,
    root: opt.Root = opt.HERE,
) -> None:
    """Write the page: what is certified, what failed last night, how fast each stack is."""
    root = root.resolve()
    offered, problem = _offered(source, root, key, plain_http=plain_http)
    asked = _machine(machine) if machine else None
    begin = options.since(since, "--since")
    often = round(options.duration(refresh, "--refresh").total_seconds()) if refresh else None
    kept = opened_history(history, root)
    found = _gathered(kept, offered, root, begin, asked=asked, faults=faults, refresh_s=often, others=others)
    file = out or (root / PAGE if form == "html" else None)
    _write(_rendered(found, form), file, to_stdout=not as_json)
    if as_json:
        print_json(_facts(found, file))
    elif file:
        print(file)
    if problem:  # the page shows the problem too, but a script must see it in the exit code
        raise problem


def write_page(root: Path, source: str, key: Path, *, plain_http: bool) -> Path:
    """Write build/report.html of a checkout, as a night does at its end.

    Raises:
        StackcheckError: The history or what is published cannot be read. In the second case the page is
            written, and says so.
    """
    offered, problem = _offered(source, root, key, plain_http=plain_http)
    found = _gathered(opened_history(None, root), offered, root, options.since(SINCE, "--since"))
    _write(_rendered(found, "html"), root / PAGE, to_stdout=False)
    if problem:
        raise problem
    return root / PAGE


def _gathered(
    history: History,
    offered: Offered,
    root: Path,
    since: dt.datetime,
    *,
    asked: StandingMachine | None = None,
    faults: Path | None = None,
    refresh_s: int | None = None,
    others: Path | None = None,
) -> Content:
    from stackcheck.report import content
    from stackcheck.report import others as contributed

    found = content.gather(
        history,
        offered,
        root=root,
        now=dt.datetime.now(dt.UTC),
        since=since,
        here=None if asked else _here(),
        asked=asked,
        campaign=_campaign(faults, root),
        nightly=_nightly(root),
        refresh_s=refresh_s,
        report=Progress(),
    )
    return dataclasses.replace(found, others=contributed.load_others(others, root)) if others else found


def opened_history(folder: Path | None, root: Path) -> History:
    """The history in a folder, or else the checkout's own, which may be shared.

    Raises:
        ConfigurationError: The folder has no history.
    """
    from stackcheck.history.history import History, open_history

    if folder is None:
        return open_history(root)
    if not (folder / "index.sqlite").is_file():
        raise ConfigurationError(
            "there is no history in the folder",
            where=str(folder),
            got="no index.sqlite",
            expected="a folder with records/ and index.sqlite, such as build/history",
            next_step="leave --history out; or copy the records there and rebuild: stackcheck history",
        )
    return History(str(folder / "records"), f"sqlite:///{folder / 'index.sqlite'}")


def _offered(
    source: str | None, root: Path, key: str | Path | None, *, plain_http: bool
) -> tuple[Offered, StackcheckError | None]:
    """What is published; if that cannot be read, the report says why, and so does the exit code."""
    from stackcheck.certificate import key_sources
    from stackcheck.report.content import Offered
    from stackcheck.report.published import is_there, published

    target = opt.target_of(root, source)
    if not is_there(target):
        return Offered(target=target), None
    try:
        public_key, now = key_sources.public(key), dt.datetime.now(dt.UTC)
        return Offered(
            target=target, images=published(target, public_key, now, MAX_AGE, plain_http=plain_http)
        ), None
    except StackcheckError as error:
        return Offered(target=target, problem=f"{error.what} ({error.where or target})"), error


def _machine(named: str) -> StandingMachine:

    model, _, driver = named.partition("/")
    return StandingMachine(device_model=model, driver=driver)


def _here() -> StandingMachine | None:
    """This host, if it has devices of one model."""
    try:
        host = vendors.host()
    except ConfigurationError:  # GPUs of two vendors: the newest run decides what is shown first
        return None
    models = {device.model for device in host.devices}
    return StandingMachine(device_model=models.pop(), driver=host.driver or "") if len(models) == 1 else None


def _campaign(path: Path | None, root: Path) -> Campaign | None:

    default = root / "build" / "faults.json"
    if path is None and not default.is_file():
        return None
    return verb_files.load_campaign(path or default)


def _nightly(root: Path) -> NightlyFile | None:

    path = root / "build" / "nightly" / "night.json"
    return verb_files.load_night(path) if path.is_file() else None


def _rendered(found: Content, form: Format) -> bytes:
    from stackcheck.report import markdown, page, prometheus

    if form == "html":
        return page.render(found)
    return (markdown.render(found) if form == "markdown" else prometheus.render(found)).encode()


def _write(text: bytes, file: Path | None, *, to_stdout: bool) -> None:

    if file is not None:
        write_atomically(file, (text,))
    elif to_stdout:
        sys.stdout.write(text.decode())


def _facts(found: Content, file: Path | None) -> dict[str, object]:
    return {
        "file": str(file) if file else None,
        "target": found.offered.target,
        "problem": found.offered.problem,
        "runs": len(found.runs),
        "simulated": found.simulated,
        "night": {"missing": found.night.missing, **found.night.counts},
        "not_read": list(found.problems),
        "warnings": list(found.warnings),
        "cells": [
            {
                "stack": cell.stack,
                "device_model": cell.machine.device_model,
                "driver": cell.machine.driver or None,
                "state": cell.state,
                "simulated": cell.simulated,
            }
            for cell in found.cells
        ],
    }
