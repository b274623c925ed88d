"""How checks of all devices use them, by their names."""

from types import SimpleNamespace
from typing import Any

import pytest

from harness import order
from harness.session import AcceptanceSession

ALWAYS = {"cpu": 2, "whole": True}
NAMED = {"cpu": 2, "whole": ("test_named", "test_other")}


def test_named() -> None:
    """Stands for a check that needs its devices whole."""


def test_shared() -> None:
    """Stands for a check of the same file that does not."""


def use_of(ranks: dict[str, Any], check: Any, devices: int) -> str:
    """The use of a check that takes `ranks`."""
    made: list[Any] = []
    session = SimpleNamespace(vendor="nvidia", device_count=devices)
    module = SimpleNamespace(RANKS=ranks)
    keep = lambda _, values: made.extend(values)  # noqa: E731 - a stand-in for a method
    metafunc = SimpleNamespace(module=module, function=check, fixturenames=["ranks"], parametrize=keep)
    AcceptanceSession.pytest_generate_tests(session, metafunc)  # type: ignore[arg-type]
    (mark,) = made[0].marks
    item = SimpleNamespace(path="test_collectives.py", get_closest_marker=lambda _: mark)
    return order.wish(item).use  # type: ignore[arg-type]


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_a_check_has_whole_devices_if_its_file_names_it(devices):
    assert use_of(NAMED, test_named, devices) == "whole"
    assert use_of(NAMED, test_shared, devices) == "shared"
    assert use_of(ALWAYS, test_shared, devices) == "whole"
