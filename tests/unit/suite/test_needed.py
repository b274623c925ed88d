"""Whether an image's Python finds what the suites need, asked on an engine that may lose what it said."""

from types import SimpleNamespace
from typing import Any

import pytest

from stackcheck.errors import ChecksFailedError
from stackcheck.suite import needed


class Engine:
    """Says nothing, and ends with 0, as often as asked; then it answers."""

    def __init__(self, lost: int, code: int = 0) -> None:
        self.lost, self.code, self.asked = lost, code, 0

    def run(self, lines: list[str]) -> int:
        self.asked += 1
        if self.asked > self.lost and not self.code:
            lines.append("[]")
        return self.code


def ask(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needed, "_question", lambda _python, _image, _engine, lines: lines)
    subject: Any = SimpleNamespace(name="x", image=SimpleNamespace(reference="x"))
    python: Any = SimpleNamespace(path="/usr/bin/python3")
    asked: Any = engine
    needed._require_found(python, subject, asked)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_lost_answer_is_asked_for_again(lost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(engine := Engine(lost), monkeypatch)
    assert engine.asked == lost + 1


@pytest.mark.parametrize(("engine", "asked"), [(Engine(3), 3), (Engine(0, code=126), 1)])
def test_a_python_that_does_not_answer_is_refused(
    engine: Engine, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ChecksFailedError, match="cannot be started"):
        ask(engine, monkeypatch)
    assert engine.asked == asked
