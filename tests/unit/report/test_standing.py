"""Where each stack stands, with its figures against their bounds and last month: silence is never success."""

import dataclasses
import json
from pathlib import Path

import pytest

import result_files
from report_content import DAY, HOUR, MACHINE, NOW, STACK, certified, image, point, run
from stackcheck.errors import ConfigurationError
from stackcheck.report import details, night, speed, standing
from stackcheck.report.blocks import rounded, text_of
from stackcheck.report.standing import StandingMachine
from stackcheck.suite import results

REVOKED = image(certified(), standing="revoked", reason="NaN")


@pytest.mark.parametrize(
    ("runs", "images", "expected"),
    [
        ([], [image(certified())], "certified"),
        ([run(3 * HOUR)], [image(certified())], "certified"),
        ([run(HOUR, status="FAILED")], [image(certified(2 * HOUR))], "failed"),  # after it was signed
        ([run(3 * HOUR, status="FAILED")], [image(certified(2 * HOUR))], "certified"),  # before
        ([run(HOUR, status="UNFIT")], [image(certified(2 * HOUR))], "certified"),
        ([run(HOUR, status="UNFIT")], [], "unfit"),
        ([run()], [image(certified(31 * DAY), standing="expired")], "expired"),
        ([run()], [REVOKED], "revoked"),
        ([run(image="sha256:another")], [REVOKED], "revoked"),
        ([run()], [dataclasses.replace(REVOKED, current=False)], "revoked"),
    ],
)
def test_a_stack_stands_as_its_certificate_and_its_later_runs_say(runs, images, expected):
    (cell,) = standing.cells(runs, images, NOW)
    assert cell.state == expected


def test_a_revoked_image_is_valid_nowhere():
    assert not standing.offers([REVOKED], MACHINE)[0].valid(NOW)


def test_a_driver_on_which_a_certified_stack_fails_is_not_to_be_rolled_out():
    cells = standing.cells([run(driver="31.40.1", status="FAILED")], [image(certified())], NOW)
    (warning,) = standing.warnings(cells)
    assert "Do not roll out driver 31.40.1" in warning
    assert STACK in warning


def test_a_stack_that_is_certified_nowhere_warns_of_no_driver():
    assert standing.warnings(standing.cells([run(status="FAILED")], [], NOW)) == ()


def test_a_simulated_failure_says_so_in_the_warning():
    failed = run(driver="31.40.1", status="FAILED", simulated=True)
    (warning,) = standing.warnings(standing.cells([failed], [image(certified())], NOW))
    assert "(simulated)" in warning


@pytest.mark.parametrize(("driver", "words"), [("", "CPU, no driver"), ("1.2", "CPU, driver 1.2")])
def test_a_machine_reads_as_people_say_it(driver, words):
    assert StandingMachine(device_model="CPU", driver=driver).words() == words


def test_a_night_without_a_run_is_missing_and_shows_the_newest_one():
    found = night.last_night([run(50 * HOUR, status="FAILED"), run(49 * HOUR)], NOW)
    assert found.missing
    assert len(found.runs) == 2
    assert found.newest == NOW - 49 * HOUR


def test_an_empty_history_is_missing_too():
    assert night.last_night([], NOW).missing


def test_a_failure_says_for_how_many_runs_nothing_passed_there():
    runs = [run(age * DAY + HOUR, status="FAILED") for age in (3, 2, 1, 0)]
    (trouble,) = night.last_night([run(5 * DAY), *runs], NOW).troubles
    assert trouble.nights == 4
    assert trouble.since == runs[0].started


def test_a_failure_after_a_pass_is_new():
    (trouble,) = night.last_night([run(DAY + HOUR), run(HOUR, status="FAILED")], NOW).troubles
    assert (trouble.since, trouble.first) == (None, False)


def test_a_failure_of_a_stack_that_never_ran_there_is_the_first_run():
    runs = [run(2 * DAY, stack="another"), run(DAY + HOUR, driver="1.0"), run(HOUR, status="FAILED")]
    (trouble,) = night.last_night(runs, NOW).troubles
    assert (trouble.since, trouble.first) == (None, True)


def test_several_failures_of_a_night_on_one_machine_are_told_once():
    runs = [run(age * HOUR, status="FAILED", node=node) for age, node in ((3, "a"), (2, "b"), (1, "a"))]
    (trouble,) = night.last_night(runs, NOW).troubles
    assert trouble.run.started == NOW - HOUR
    assert (trouble.others, trouble.nodes) == (2, 2)


def test_failed_runs_come_before_unfit_ones():
    runs = [run(3 * HOUR, status="UNFIT", stack="a"), run(2 * HOUR, status="FAILED", stack="b")]
    assert [item.run.status for item in night.last_night(runs, NOW).troubles] == ["FAILED", "UNFIT"]


ROOT = Path(__file__).resolve().parents[3]


def test_the_margin_is_positive_inside_the_bound_in_both_directions():
    (group,) = speed.groups([point(run(), 660), point(run(), 90, "latency_us", direction="max", bound=100)])
    assert [round(series.margin or 0, 3) for series in group.series] == [0.1, 0.1]


def test_last_month_is_the_median_of_the_two_weeks_a_month_before():
    runs = [run(age * DAY + HOUR) for age in (60, 35, 30, 25, 0)]
    values = [1, 700, 710, 720, 639]
    (group,) = speed.groups([point(each, value) for each, value in zip(runs, values, strict=True)])
    assert group.series[0].month == 710
    assert group.series[0].change == pytest.approx(-0.1)


def test_without_runs_a_month_ago_there_is_no_change():
    (group,) = speed.groups([point(run(DAY), 650), point(run(HOUR), 640)])
    assert group.series[0].change is None


def test_a_processor_has_no_bounds_so_its_speeds_are_shown_without():
    plain = {"direction": None, "bound": None}
    found = speed.groups(
        [point(run(), 5, "copy", unit="GB/s", **plain), point(run(), 3, "cases", unit="", **plain)]
    )
    assert [series.name for series in found[0].series] == ["copy"]


def test_the_bandwidth_curve_has_the_sizes_in_order_with_their_bounds():
    metrics = [
        result_files.metric(
            "all_reduce_busbw", float(size), conditions={"bytes": size, "dtype": "bf16"}, bound=bound
        )
        for size, bound in ((1 << 24, 5.0), (1 << 16, None), (1 << 20, None))
    ]
    (curve,) = details.bandwidth(parsed(result_files.check("test_a.py::test_one", metrics=metrics)))
    assert curve.sizes == (1 << 16, 1 << 20, 1 << 24)
    assert curve.bounds == (None, None, 5.0)


def test_readings_of_a_wrong_type_are_left_out():
    during = {"clock_mhz_median": "fast", "power_w_max": True, "temperature_c_max": 61, "throttle": "hot"}
    check = result_files.check("test_a.py::test_one", evidence={"before": {}, "after": {"during": during}})
    (reading,) = details.readings(parsed(check))
    assert (reading.clock_mhz, reading.power_w, reading.temperature_c) == (None, None, 61.0)
    assert reading.throttle == ()


def test_a_long_reason_is_cut_and_says_so():
    check = result_files.check("test_a.py::test_one", "failed", reason="\n".join(["x" * 999] * 50))
    (failure,) = details.failures(parsed(check))
    assert failure.reason[-1] == "… 44 more lines"
    assert max(map(len, failure.reason)) <= details.REASON_LENGTH


def test_the_band_is_that_of_the_trainers():
    band = details.loss_band(ROOT)
    assert band is not None
    facts = json.loads((ROOT / details.REFERENCE).read_text())
    assert band.high[0] == pytest.approx(facts["losses"][0] * (1 + facts["band"]["first"]))
    assert band.low[-1] == pytest.approx(facts["losses"][-1] * (1 - facts["band"]["last"]))


def test_a_checkout_without_trainers_has_no_band_and_a_damaged_one_is_an_error(tmp_path):
    assert details.loss_band(tmp_path) is None
    path = tmp_path / details.REFERENCE
    path.parent.mkdir(parents=True)
    path.write_text('{"losses": [1]}')
    with pytest.raises(ConfigurationError) as error:
        details.loss_band(tmp_path)
    assert "git checkout" in str(error.value)


def parsed(*checks: dict) -> results.RunResult:
    return results.parse(json.dumps(result_files.result(*checks)).encode())


@pytest.mark.parametrize(
    ("value", "text"), [(123456.7, "123460"), (0.000123456, "0.00012346"), (float("nan"), "null"), (2.0, "2")]
)
def test_numbers_of_the_page_have_five_digits(value, text):
    assert text_of(rounded(value)) == text


def steady(count: int, node: str, last: float, offset: float = 0.0) -> list:
    """A figure over nights on one node, whose last ten nights have another level."""
    nights = [run((count - night) * DAY, node=node) for night in range(count)]
    wave = [offset + (night % 3) for night in range(count)]
    levels = [650.0 if night < count - 10 else last for night in range(count)]
    return [point(each, level + noise) for each, level, noise in zip(nights, levels, wave, strict=True)]


def test_a_step_is_shown_at_its_first_run_and_two_nodes_make_it_a_warning():
    (group,) = speed.groups(
        sorted([*steady(40, "a", 620), *steady(40, "b", 620, 5)], key=lambda one: one[0].started)
    )
    assert {shift.node for shift in group.series[0].shifts} == {"a", "b"}
    for shift in group.series[0].shifts:
        assert group.runs[shift.at].node == shift.node
        assert shift.loss == pytest.approx(0.046, abs=0.005)
    (warned,) = group.warned
    assert warned.nodes == ("a", "b")
