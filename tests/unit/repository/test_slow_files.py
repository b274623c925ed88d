"""`make test-slow` reads only the files that name the mark: it must be in the file whose tests it marks."""

from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]
MARK = "mark" + ".slow"  # in two parts, or this file would be one of them


@pytest.mark.parametrize("folder", ["integration", "unit"])
def test_no_helper_hands_the_mark_on(folder: str) -> None:
    naming = [path for path in (TESTS / folder).rglob("*.py") if MARK in path.read_text(encoding="utf-8")]
    assert naming
    assert [path for path in naming if not path.name.startswith("test_")] == []
    handed_on = [f"from {path.stem} import" for path in naming]
    sources = {path: path.read_text(encoding="utf-8") for path in (TESTS / folder).rglob("*.py")}
    assert [path for path, text in sources.items() if any(words in text for words in handed_on)] == []
