"""A run of the suites without an engine: a test makes the controller's result, and keeps the RunSpec."""

import datetime as dt
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import result_files
from fake_files import HasFiles
from small_subjects import subject_of
from stackcheck.engine.client import RunSpec
from stackcheck.suite import run as suite

ROOT = Path(__file__).resolve().parents[3]


class FakeEngine(HasFiles):
    """Stands in for container and controller: writes what `answer` makes of run.json."""

    def __init__(self, answer: Callable[[dict[str, Any]], str | None], code: int | None = None) -> None:
        self._answer, self._code = answer, code
        self.specs: list[RunSpec] = []
        self.env: dict[str, str] = {}

    def inspect(self, _reference: str) -> Any:
        return SimpleNamespace(env=self.env)

    def run(self, spec: RunSpec) -> int:
        self.specs.append(spec)
        judge: Any = spec.beside
        told = json.loads(judge.run_file.read_text(encoding="utf-8"))
        text = self._answer(told)
        if text is not None:
            (judge.folder / "result.json").write_text(text, encoding="utf-8")
        assert spec.on_line is not None
        spec.on_line("last words")
        judge.code = result_files.exit_code(text) if self._code is None else self._code
        return 137  # the end of the controller ends the container


def healthy(told: dict[str, Any]) -> str:
    return json.dumps(of_run(told))


def of_run(told: dict[str, Any], **changes: Any) -> dict[str, Any]:
    same = result_files.told_again(told)
    now = dt.datetime.now(dt.UTC).isoformat()
    document = result_files.result(result_files.check("test_a.py::test_a"), **same, started=now, finished=now)
    return document | changes


def make_plan(out: Path, **changes: Any) -> suite.RunPlan:
    subject = subject_of("some:tag", out, vendor=changes.pop("vendor", "cpu"))
    return suite.plan(subject, **({"tier": "smoke", "root": ROOT, "out": out} | changes))


def run(
    plan: suite.RunPlan, out: Path, answer: Callable[[dict[str, Any]], str | None] = healthy
) -> FakeEngine:
    engine = FakeEngine(answer)
    suite.run(plan, engine, out=out, report=lambda _line: None)  # type: ignore[arg-type]
    return engine
