"""A document that cannot be read is not called damaged."""

from pathlib import Path

import pytest

from stackcheck.errors import ConfigurationError
from stackcheck.files.border import Closed, load_json


class Small(Closed):
    number: int


@pytest.mark.parametrize(
    "text", ["", "{", '{"number": "x"}', '{"number": 1, "number": 1}', '{"number": NaN}']
)
def test_another_document_is_refused_with_its_path(text: str, tmp_path: Path) -> None:
    path = tmp_path / "small.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match="it is damaged") as refused:
        load_json(Small, path, "it is damaged", next_step="make it again")
    assert (refused.value.where, refused.value.next_step) == (str(path), "make it again")


def test_what_cannot_be_read_is_an_error_of_the_disk(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError):
        load_json(Small, tmp_path / "absent.json", "it is damaged")
    with pytest.raises(IsADirectoryError):
        load_json(Small, tmp_path, "it is damaged")
