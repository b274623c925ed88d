"""Two runs side by side: what got worse comes first, with an interval, and what differs between them."""

import json
from typing import Any

import pytest

from kept_runs import GEMM, PASSED, body, gemm, result
from result_files import check, metric
from stackcheck.compare import two_runs
from stackcheck.compare.two_runs import Comparison
from stackcheck.errors import ConfigurationError, NothingSelectedError
from stackcheck.history.history import History


def compared(a: list[dict[str, Any]], b: list[dict[str, Any]], **changes: Any) -> Comparison:
    one = json.dumps(result(0, check(GEMM, metrics=a))).encode()
    other = json.dumps(
        result(3, check(GEMM, metrics=b), **changes)
    ).encode()  # day 3 has the machine of day 0
    return two_runs.compare(two_runs.of_result(one, "one"), two_runs.of_result(other, "other"))


def figure(name: str, value: float, **changes: Any) -> dict[str, Any]:
    return metric(name, value, repeats=[value, value * 1.001, value * 0.999], **changes)


def test_the_worst_comes_first_and_the_equal_last():
    a = [figure(name, 100.0) for name in ("same", "faster", "bad", "worst", "gone")]
    b = [
        figure("same", 100.1),
        figure("faster", 110.0),
        figure("bad", 96.0),
        figure("worst", 80.0),
        figure("new", 1.0),
    ]
    found = compared(a, b)
    assert [(each.name, each.verdict) for each in found.metrics] == [
        ("worst", "worse"),
        ("bad", "worse"),
        ("faster", "better"),
        ("gone", "only in A"),
        ("new", "only in B"),
        ("same", "equal"),
    ]
    assert found.metrics[0].ratio == pytest.approx(0.8)
    assert found.metrics[0].loss == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("direction", "unit", "verdict"),
    [
        ("min", "GB/s", "worse"),
        ("max", "GB/s", "better"),
        (None, "GB/s", "worse"),
        (None, "us", "better"),
        (None, "cases", "changed"),
    ],
)
def test_a_fall_means_what_the_bound_or_the_unit_says(direction, unit, verdict):
    facts = {"direction": direction, "unit": unit}
    found = compared([figure("x", 100.0, **facts)], [figure("x", 90.0, **facts)])
    assert found.metrics[0].verdict == verdict


def test_repeats_that_vary_widely_say_unclear():
    a = metric("x", 100.0, repeats=[80.0, 100.0, 120.0, 90.0, 110.0])
    b = metric("x", 95.0, repeats=[75.0, 95.0, 115.0, 85.0, 105.0])
    found = compared([a], [b]).metrics[0]
    assert found.verdict == "unclear"
    assert found.interval is not None
    assert found.interval[0] < 0.95 < found.interval[1]


def test_the_interval_is_the_same_each_time():
    a, b = [metric("x", 3.0, repeats=[1.0, 2.0, 5.0])], [metric("x", 3.0, repeats=[3.0, 4.0, 2.0])]
    assert compared(a, b) == compared(a, b)


def test_two_machines_have_to_differ_by_more():
    host = result(1)["host"]
    a, b = [figure("x", 100.0)], [figure("x", 96.0)]
    assert compared(a, b).metrics[0].verdict == "worse"
    assert compared(a, b, host=host).metrics[0].verdict == "equal"


def test_what_differs_is_listed_with_the_driver_first():
    host = result(0)["host"] | {"driver": "590.1", "kernel": "6.12"}
    software = result(0)["software"] | {"torch": "2.14.0"}
    found = compared([figure("x", 1.0)], [figure("x", 1.0)], host=host, software=software)
    assert [(each.group, each.name, each.b) for each in found.differences] == [
        ("driver", "driver", "590.1"),
        ("driver", "kernel", "6.12"),
        ("software", "torch", "2.14.0"),
    ]


def test_a_kernel_that_a_library_chose_is_listed():
    a = gemm(1.0) | {"conditions": {"choice": "RING/LL", "bytes": 1024}}
    b = gemm(1.0) | {"conditions": {"choice": "TREE/LL", "bytes": 1024}}
    (difference,) = compared([a], [b]).differences
    assert (difference.group, difference.a, difference.b) == ("choices", "RING/LL", "TREE/LL")


@pytest.fixture
def history(tmp_path) -> History:
    made = History(str(tmp_path / "records"), f"sqlite:///{tmp_path / 'index.sqlite'}")
    for number in range(3):
        made.append(body(number, run_id=f"{number + 10:x}" * 32), PASSED, None, source="test")
    return made


@pytest.mark.parametrize(
    ("name", "run_id"),
    [("aaaa", "a" * 32), ("b" * 32, "b" * 32), ("cuda13*", "c" * 32), ("driver=580*", "c" * 32)],
)
def test_a_side_is_named_by_digits_stack_or_driver(history, name, run_id):
    _, run = two_runs.find(name, history)
    assert run is not None
    assert run.run_id == run_id


def test_a_side_may_be_a_file(history, tmp_path):
    path = tmp_path / "result.json"
    path.write_bytes(body(7))
    side, run = two_runs.find(str(path), history)
    assert (side.label, run, len(side.points)) == (str(path), None, 2)


def test_a_name_of_nothing_and_of_several_runs_are_errors(history):
    with pytest.raises(NothingSelectedError, match="no such run"):
        two_runs.find("nothing", history)
    history.append(body(5, run_id="aaaa" + "1" * 28, image=None), PASSED, None, source="test")
    with pytest.raises(ConfigurationError, match="several runs"):
        two_runs.find("aaaa", history)
