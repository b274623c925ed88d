"""The collector is off while many documents are read, and as before afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from stackcheck.files.many_documents import without_collector


@pytest.fixture(autouse=True)
def _same_collector_afterwards() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def read_nothing() -> None:
    assert not gc.isenabled()
    raise KeyError


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_before_also_after_an_error(*, enabled: bool) -> None:
    if not enabled:
        gc.disable()
    with pytest.raises(KeyError), without_collector():
        read_nothing()
    assert gc.isenabled() == enabled


def test_only_documents_that_are_kept_are_left_out_of_later_collections() -> None:
    gc.unfreeze()
    with without_collector():
        pass
    assert gc.get_freeze_count() == 0
    with without_collector(kept=True):
        pass
    assert gc.get_freeze_count() > 0
