"""An answer of a container whose end a busy engine dropped is asked for again, wherever it was cut."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stackcheck.engine.container import RunSpec
from stackcheck.errors import ChecksFailedError
from stackcheck.suite import answers, needed, sbom
from unit.suite.test_sbom import FOUND, INVENTORY, RECORDS, ReaderEngine

SUBJECT: Any = SimpleNamespace(name="x", image=SimpleNamespace(reference="x"))


class CuttingEngine(ReaderEngine):
    """Gives only the first bytes of what a container wrote, as often as there is a number, then all."""

    def __init__(self, lines: list[str], cuts: list[int], code: int = 0) -> None:
        super().__init__(lines, code)
        self.whole, self.cuts = "\n".join(lines), cuts

    def run(self, spec: RunSpec) -> int:
        text = self.whole[: self.cuts[len(self.specs)]] if len(self.specs) < len(self.cuts) else self.whole
        self.lines = text.splitlines()
        return super().run(spec)


LENGTH = len("\n".join(INVENTORY))


@given(st.lists(st.integers(0, LENGTH - 1), max_size=answers.TRIES - 1))
def test_a_list_of_packages_is_whole_wherever_it_was_cut(cuts):
    engine: Any = CuttingEngine(INVENTORY, cuts)
    assert sbom.list_packages("x", FOUND, engine) == RECORDS
    assert len(engine.specs) == len(cuts) + 1


@given(st.lists(st.integers(0, 1), max_size=answers.TRIES - 1))
def test_whether_packages_are_found_is_asked_until_it_is_answered(cuts):
    engine: Any = CuttingEngine(["[]"], cuts)
    needed._require_found(FOUND, SUBJECT, engine)
    assert len(engine.specs) == len(cuts) + 1


@pytest.mark.parametrize(("cuts", "code", "asked"), [([0] * 9, 0, answers.TRIES), ([], 126, 1)])
def test_a_python_that_does_not_answer_is_refused(cuts, code, asked):
    engine: Any = CuttingEngine(["[]"], cuts, code)
    with pytest.raises(ChecksFailedError, match="cannot be started"):
        needed._require_found(FOUND, SUBJECT, engine)
    assert len(engine.specs) == asked
