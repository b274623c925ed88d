"""Where the outcome of a night goes. In: a finished `Plan`.
Out: night.json, junit.xml and summary.md under `build/nightly/`, and the summary of the GitHub job, if this
is one.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from stackcheck.files.atomic import file_error, write_atomically
from stackcheck.nightly import summary

if TYPE_CHECKING:
    from stackcheck.nightly.state import Plan

GITHUB_SUMMARY = "GITHUB_STEP_SUMMARY"  # GitHub Actions names the file of a step's summary by it
NIGHT = "night.json"
JUNIT = "junit.xml"
SUMMARY = "summary.md"


def deliver(plan: Plan, folder: Path) -> None:
    """Write the outcome of a night to every place where somebody looks for it.

    Raises:
        FileError: A file cannot be written; the night itself is not lost, and the next call delivers it.
    """
    write_atomically(folder / NIGHT, (json.dumps(summary.as_json(plan), indent=2).encode(),))
    write_atomically(folder / JUNIT, (summary.junit(plan),))
    write_atomically(folder / SUMMARY, (summary.markdown(plan).encode(),))
    named = os.environ.get(GITHUB_SUMMARY)
    if named:
        _append(Path(named), summary.markdown(plan))


def _append(path: Path, text: str) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise file_error(error, path) from error
