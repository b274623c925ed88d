"""A throttled device is unfit from 1 % of the time on, without a clock, from any growth on."""

from typing import Any

from hypothesis import assume, example, given
from hypothesis import strategies as st

from harness import evidence
from vendors import UNFIT_SHARE, Absence, amd_device, amd_library

counts = st.integers(0, 1 << 40)
COUNTERS = tuple(amd_device.UNFIT_ACCUMULATORS)


def metrics(begin: int, ticks: int, grown: dict[str, int]) -> dict[str, int]:
    """A table of gpu_metrics: each counter at `begin` and its growth."""
    zero = dict.fromkeys((*amd_device.UNFIT_ACCUMULATORS, *amd_device.NORMAL_ACCUMULATORS), begin)
    return {**zero, **{name: begin + more for name, more in grown.items()}, amd_device.TICKS: begin + ticks}


def state(counter: int, ticks: int | Absence) -> dict[str, Any]:
    """The evidence beside a check, of one counter."""
    clock = str(ticks) if isinstance(ticks, Absence) else ticks
    return {
        "throttle_reading": "accumulators",
        "uncorrectable": 0,
        "unfit": [],
        "accumulators": {"HBM temperature": counter},
        "throttle_ticks": clock,
    }


@given(
    begin=counts, ticks=st.integers(1, 1 << 30), grown=st.integers(0, 1 << 30), name=st.sampled_from(COUNTERS)
)
@example(begin=0xFFFF, ticks=1, grown=1, name=COUNTERS[0])
@example(begin=0, ticks=1, grown=0xFFFF, name=COUNTERS[0])
@example(begin=0, ticks=0xFFFF, grown=0xFFFF, name=COUNTERS[0])
def test_the_vendors_reading_and_the_evidence_of_a_check_agree(begin, ticks, grown, name):
    assume(not {begin, begin + ticks, begin + grown} & set(amd_library.COUNTER_ONES))  # these are no counts
    expected = grown > 0 and grown >= UNFIT_SHARE * ticks
    read = amd_device.throttle("", metrics(begin, ticks, {name: grown}), metrics(begin, 0, {}))
    assert read.unfit == ((amd_device.UNFIT_ACCUMULATORS[name],) if expected else ())
    found = evidence.newly_unfit({"0": state(begin, begin)}, {"0": state(begin + grown, begin + ticks)})
    assert [one.kind for one in found] == ["throttled"] * expected


@given(begin=counts, grown=st.integers(1, 1 << 30), back=st.integers(0, 1 << 30))
def test_without_time_between_two_readings_any_growth_is_unfit(begin, grown, back):
    """The clock stands still, runs backwards (the firmware was loaded anew), or is not readable."""
    for early, late in (
        (begin, begin),
        (begin + back, begin),
        (Absence.NOT_AVAILABLE, Absence.NOT_AVAILABLE),
    ):
        found = evidence.newly_unfit({"0": state(begin, early)}, {"0": state(begin + grown, late)})
        assert [one.kind for one in found] == ["throttled"]


@given(begin=counts, ticks=counts, grown=st.integers(0, 1 << 30))
def test_the_power_cap_alone_is_normal(begin, ticks, grown):
    (name,) = amd_device.NORMAL_ACCUMULATORS
    assert amd_device.throttle("", metrics(begin, ticks, {name: grown}), metrics(begin, 0, {})).unfit == ()
