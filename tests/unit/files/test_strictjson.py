"""Only strict JSON passes, finite and no key twice; a document that cannot be read is not called damaged."""

import gc
import json
import math
from collections.abc import Iterator

import pytest

from stackcheck.errors import ConfigurationError
from stackcheck.files import strictjson
from stackcheck.files.border import Closed, load_json
from stackcheck.files.many_documents import without_collector

LARGE = (
    *("1e309", "-1e309", "1E+400", "1.5e0400", "9" * 400, f"{'9' * 199}e111", f"-{'9' * 330}.5"),
    f"{'9' * 230}e99",
)


@pytest.mark.parametrize("number", LARGE)
@pytest.mark.parametrize("around", ["{}", "[{}]", "[1,\n {}]", '{{"a" :\t{}}}', " {} "])
def test_a_number_that_no_float_holds_is_refused_wherever_it_stands(number, around):
    text = around.format(number)
    if "." not in number and "e" not in number.lower():
        strictjson.check(text.encode())  # a whole number of any length is one
        return
    assert math.isinf(float(number))
    with pytest.raises(ValueError, match="is not a finite number"):
        strictjson.check(text.encode())


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', "[NaN]", "[-Infinity]", "[1", '"\xff"'])
def test_ambiguous_or_broken_text_is_refused(text):
    with pytest.raises(ValueError, match=r"."):
        strictjson.check(text.encode("latin-1"))


def test_healthy_text_passes_also_with_words_that_look_like_large_numbers():
    words = {"got 1.798e+308, bound 1": "e123", "digest": "1e999" + "0" * 400, "n": [1.5e99, -2, 1e-400]}
    strictjson.check(json.dumps(words).encode())


# The collector is off while many documents are read, and as before afterwards.


@pytest.fixture(autouse=True)
def _same_collector_afterwards() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def read_nothing() -> None:
    assert not gc.isenabled()
    raise KeyError


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_before_also_after_an_error(*, enabled):
    if not enabled:
        gc.disable()
    with pytest.raises(KeyError), without_collector():
        read_nothing()
    assert gc.isenabled() == enabled


def test_only_documents_that_are_kept_are_left_out_of_later_collections():
    gc.unfreeze()
    with without_collector():
        pass
    assert gc.get_freeze_count() == 0
    with without_collector(kept=True):
        pass
    assert gc.get_freeze_count() > 0


class Small(Closed):
    number: int


@pytest.mark.parametrize(
    "text", ["", "{", '{"number": "x"}', '{"number": 1, "number": 1}', '{"number": NaN}']
)
def test_another_document_is_refused_with_its_path(text, tmp_path):
    path = tmp_path / "small.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match="it is damaged") as refused:
        load_json(Small, path, "it is damaged", next_step="make it again")
    assert (refused.value.where, refused.value.next_step) == (str(path), "make it again")


def test_what_cannot_be_read_is_an_error_of_the_disk(tmp_path):
    with pytest.raises(ConfigurationError):
        load_json(Small, tmp_path / "absent.json", "it is damaged")
    with pytest.raises(IsADirectoryError):
        load_json(Small, tmp_path, "it is damaged")
