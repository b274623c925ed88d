"""How checks of all devices use them, by the tier that runs."""

from types import SimpleNamespace
from typing import Any

import pytest

from harness import order
from harness.session import AcceptanceSession

ALWAYS = {"cpu": 2, "whole": True}
FROM_STANDARD = {"cpu": 2, "whole_from": "standard"}


def use_of(ranks: dict[str, Any], chosen: str, devices: int) -> str:
    """The use of a check that takes `ranks`, in a run of `chosen`."""
    made: list[Any] = []
    session = SimpleNamespace(vendor="nvidia", chosen=chosen, device_count=devices)
    module = SimpleNamespace(RANKS=ranks)
    keep = lambda _, values: made.extend(values)  # noqa: E731 - a stand-in for a method
    metafunc = SimpleNamespace(module=module, fixturenames=["ranks"], parametrize=keep)
    AcceptanceSession.pytest_generate_tests(session, metafunc)  # type: ignore[arg-type]
    (mark,) = made[0].marks
    item = SimpleNamespace(path="test_collectives.py", get_closest_marker=lambda _: mark)
    return order.wish(item).use  # type: ignore[arg-type]


@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("chosen", [order.GATE, *order.TIERS])
def test_what_needs_whole_devices_from_a_tier_on_shares_them_before_it(chosen, devices):
    shares = chosen in {order.GATE, "smoke"}
    assert use_of(FROM_STANDARD, chosen, devices) == ("shared" if shares else "whole")
    assert use_of(ALWAYS, chosen, devices) == "whole"
