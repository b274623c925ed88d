"""When checks waited and ran, and which of them limited a run."""

from typing import Any

import pytest

from harness import timeline

STARTED = "2026-01-01T00:00:{:02}.000+00:00"


def check(name: str, at: int, waited: float, seconds: float, *devices: str) -> dict[str, Any]:
    return {
        "id": f"test_a.py::{name}",
        "started": STARTED.format(at),
        "waited_s": waited,
        "seconds": seconds,
        "devices": list(devices),
    }


RESULT = {
    "started": STARTED.format(0),
    "checks": [
        check("speed", 5, 15.0, 20.0, "d"),
        check("first", 2, 0.0, 8.0, "d"),
        check("beside", 2, 0.0, 3.0, "d"),
        check("second", 3, 7.0, 10.0, "d"),
        check("text", 2, 0.0, 4.0),
        {"id": "test_a.py::never", "started": None, "waited_s": 0.0, "seconds": 0.0, "devices": []},
    ],
}


def test_the_chain_goes_back_from_the_last_check_through_those_it_waited_for() -> None:
    names = [span.name.rpartition("::")[2] for span in timeline.chain(timeline.spans(RESULT))]
    assert names == ["first", "second", "speed"]


def test_a_device_that_two_checks_share_is_held_once() -> None:
    assert timeline.held_s(timeline.spans(RESULT)) == pytest.approx(38.0)


def test_the_line_names_the_wall_time_and_what_limited_it() -> None:
    words = timeline.words(RESULT)
    assert words.startswith("time: 40 s, first check after 2 s, a check had a device for 95%")
    assert words.endswith("limited by speed 20 s, second 10 s, first 8 s")


def test_a_run_without_checks_has_no_chain() -> None:
    assert timeline.words({**RESULT, "checks": []}) == "time: no check ran"
