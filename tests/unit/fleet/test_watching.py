"""A watch outlives an API server that is away for a while, and tells the error of one that stays away."""

import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from stackcheck.errors import EngineError
from stackcheck.fleet import watching
from stackcheck.fleet.watching import Watched

AWAY = EngineError("kubectl failed", got="connection refused")


def page(*names: str, version: str = "7") -> str:
    items = [{"metadata": {"name": name, "resourceVersion": version}} for name in names]
    return json.dumps({"metadata": {"resourceVersion": version}, "items": items})


def watched(*answers: Any, command: tuple[str, ...] = ("false",)) -> Watched:
    """What asks a server with these answers, the last one for ever; `command` answers each watch."""
    answer = itertools.chain(answers, itertools.repeat(answers[-1]))

    def ask(_url: str) -> str:
        found = next(answer)
        if isinstance(found, Exception):
            raise found
        return str(found)

    return Watched(path="/api/v1/pods", query="", ask=ask, command=command)


def names(one: Watched) -> list[str]:
    return [item["metadata"]["name"] for item in one.items()]


def wait(until: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not until():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.01)


def refused(one: Watched) -> bool:
    try:
        one.items()
    except EngineError:
        return True
    return False


@pytest.fixture(autouse=True)
def _hurry(monkeypatch) -> None:
    monkeypatch.setattr(watching, "PAUSE_S", 0.01)
    monkeypatch.setattr(watching, "LONGEST_PAUSE_S", 0.02)


BROKEN = ("{", "[]", "null", '{"items": []}', '{"metadata": {}, "items": [{}]}')


@pytest.mark.parametrize("bad", [AWAY, OSError("no such program"), *BROKEN], ids=str)
@pytest.mark.parametrize("times", [1, watching.LISTS - 1])
def test_lists_that_fail_for_a_while_end_no_run(bad, times):
    one = watched(page("a"), *([bad] * times), page("a", "b"))
    one.start()
    wait(lambda: names(one) == ["a", "b"])  # `items` raises, if a failure ended it
    one.close()


@pytest.mark.parametrize("bad", [AWAY, OSError("no such program"), *BROKEN], ids=str)
def test_a_server_that_stays_away_is_an_error_at_the_end(bad):
    one = watched(page("a"), bad)
    one.start()
    wait(lambda: refused(one))
    with pytest.raises(EngineError, match="connection refused" if bad is AWAY else "after 6 attempts"):
        one.items()


@pytest.mark.parametrize("line", ["{", "[]", "7", '{"type": "ADDED"}', '{"type": "ERROR", "object": {}}'])
def test_a_broken_line_of_a_watch_leads_to_a_new_list(line):
    one = watched(page("a"), page("b"), command=("sh", "-c", f"echo '{line}'"))
    one.start()
    wait(lambda: names(one) == ["b"])
    one.close()


def test_who_closes_a_watch_waits_for_no_pause(monkeypatch):
    monkeypatch.setattr(watching, "PAUSE_S", 60.0)
    one = watched(page("a"), AWAY)
    one.start()
    begun = time.monotonic()
    one.close()
    assert time.monotonic() - begun < 1
