"""Keep the runs of the flow, and results of other machines. In: judged runs; result files. Out: records."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from stackcheck.errors import StackcheckError
from stackcheck.files.border import first_problem
from stackcheck.files.regular import read_regular
from stackcheck.history.runs import HistoryError
from stackcheck.matrix import resolve
from stackcheck.matrix.stack import Stack
from stackcheck.oci.documents import sha256
from stackcheck.suite import results
from stackcheck.suite.judged import JudgedRun
from stackcheck.suite.judgement import judge_file
from stackcheck.suite.results import RunResult
from stackcheck.suite.verdict import Status

if TYPE_CHECKING:
    from stackcheck.history.history import History

Fate = Literal["kept", "there already", "no result", "refused"]
VERDICT_LIMIT_BYTES = 8 * 2**20


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What became of one file.

    Attributes:
        fate: Kept; there already, with the same verdict; no result (another JSON file of a folder); refused.
        judged: Who gave it: `here`, or `its own` for the verdict.json beside the result.
    """

    file: Path
    fate: Fate
    record: str | None = None  # the record's digest, if there is one
    status: Status | None = None
    judged: Literal["here", "its own"] | None = None
    error: StackcheckError | None = None


def keep(root: Path, judged: JudgedRun) -> str:
    """Keep a judged run in the history of a checkout, and return its record's digest."""
    from stackcheck.history.history import open_history  # a verb without a new run needs no database

    body = results.read_result_file(judged.folder / "run" / "result.json")
    return open_history(root).append(
        body,
        judged.verdict.as_json(),
        judged.plan.host.as_json(),
        source="this host",
        judged=dt.datetime.now(dt.UTC),
    )


def import_files(
    paths: Iterable[Path], history: History, root: Path, *, own_verdicts: bool
) -> Iterator[Imported]:
    """Keep results of other machines; a damaged one is refused, and the next ones are still kept.

    Args:
        paths: Result files, and folders that hold some at any depth.
        history: Where to keep them.
        root: The checkout that judges them.
        own_verdicts: Take the verdict.json beside a result, or beside its folder `run/`, where there is one.
    """
    stacks = {stack.id: stack for stack in resolve.usable(root)}
    for path, named in _files(paths):
        try:
            body = results.read_result_file(path)
            if not named and not _looks_like_a_result(body):
                yield Imported(file=path, fate="no result")
                continue
            yield _imported(path, body, history, root, stacks, own_verdicts=own_verdicts)
        except StackcheckError as error:
            yield Imported(file=path, fate="refused", error=error)


def _files(paths: Iterable[Path]) -> Iterator[tuple[Path, bool]]:
    """Each file, and whether its name says that it is a result."""
    for path in paths:
        if path.is_dir():
            yield from ((each, each.name == "result.json") for each in sorted(path.rglob("*.json")))
        else:
            yield path, True


def _looks_like_a_result(body: bytes) -> bool:
    """Whether a JSON file of a folder claims to be a result; one that is cut off may have been one."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return True
    return isinstance(document, dict) and {"run_id", "checks"} <= set(document)


def _imported(
    path: Path, body: bytes, history: History, root: Path, stacks: Mapping[str, Stack], *, own_verdicts: bool
) -> Imported:
    result = results.parse(body, where=str(path))
    verdict = _own_verdict(path, result) if own_verdicts else None
    judged: Literal["here", "its own"] = "its own" if verdict else "here"
    if verdict is None:
        stack = stacks.get(result.stack_id or "")
        verdict = judge_file(path, root, stack).verdict.as_json()
    _require_one_result(history, result, body, path)
    known = history.of_result(sha256(body))
    record = history.append(body, verdict, None, source=f"import of {path.name}, judged {judged}")
    fate: Fate = "there already" if known and known.record == record else "kept"
    return Imported(file=path, fate=fate, record=record, status=verdict["status"], judged=judged)


def _require_one_result(history: History, result: RunResult, body: bytes, path: Path) -> None:
    """Two different results with one run id: somebody edited one of them."""
    known = [run for run in history.find(result.run_id) if run.run_id == result.run_id]
    same = history.of_result(sha256(body))
    if known and same is None:
        raise HistoryError(
            "the history has another result of this run",
            where=str(path),
            got=sha256(body),
            expected=f"the result in {known[0].record}",
            next_step="find out which of the two is the file that the suites wrote",
        )


def _own_verdict(path: Path, result: RunResult) -> dict[str, Any] | None:
    """The verdict.json that came with a result; `None` if that file does not exist.

    Raises:
        HistoryError: It is damaged, or about another result.
    """
    folders = (path.parent, path.parent.parent) if path.parent.name == "run" else (path.parent,)
    file = next((folder / "verdict.json" for folder in folders if (folder / "verdict.json").exists()), None)
    if file is None:
        return None
    try:
        verdict = json.loads(read_regular(file, VERDICT_LIMIT_BYTES))
        problem = _contradiction(verdict, result)
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = first_problem(error)
    if problem:
        raise HistoryError(
            "the verdict beside the result is not about it",
            where=str(file),
            got=problem,
            expected="the verdict.json that stackcheck wrote for this result",
            next_step=f"leave --own-verdicts out, or judge it: stackcheck judge {path}",
        )
    kept: dict[str, Any] = verdict
    return kept


def _contradiction(verdict: Mapping[str, Any], result: RunResult) -> str | None:
    """What shows that a verdict is about another result; None if nothing does."""
    groups = {"passed": {"passed"}, "failed": {"failed", "error"}, "skipped": {"skipped"}}
    for name, outcomes in groups.items():
        actual = {check.id for check in result.checks if check.outcome in outcomes}
        if set(verdict[name]) != actual:
            return f"{name}: {len(verdict[name])} checks, in the result {len(actual)}"
    if verdict["status"] not in get_args(Status) or (
        result.state != "finished" and verdict["status"] == "PASSED"
    ):
        return f"{verdict['status']} for a run that is {result.state}"
    texts = (*verdict["reasons"], *verdict["warned"])
    return None if all(isinstance(text, str) for text in texts) else "a reason that is no text"
