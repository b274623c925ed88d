"""Where each stack stands: a failure after the certificate hides it, silence is never success."""

import dataclasses

import pytest

from report_content import DAY, HOUR, MACHINE, NOW, STACK, certified, image, run
from stackcheck.report import night, standing
from stackcheck.report.standing import StandingMachine, State


def state(runs: list, images: list) -> State:
    (cell,) = standing.cells(sorted(runs, key=lambda item: item.started), images, NOW)
    return cell.state


def test_a_valid_certificate_is_certified_with_or_without_a_run_in_the_history() -> None:
    assert state([], [image(certified())]) == "certified"
    assert state([run(3 * HOUR)], [image(certified())]) == "certified"


def test_a_failure_after_the_certificate_was_signed_hides_it() -> None:
    assert state([run(HOUR, status="FAILED")], [image(certified(2 * HOUR))]) == "failed"


def test_a_failure_before_the_certificate_does_not() -> None:
    assert state([run(3 * HOUR, status="FAILED")], [image(certified(2 * HOUR))]) == "certified"


def test_an_unfit_machine_says_nothing_about_the_certificate() -> None:
    assert state([run(HOUR, status="UNFIT")], [image(certified(2 * HOUR))]) == "certified"
    assert state([run(HOUR, status="UNFIT")], []) == "unfit"


def test_an_old_certificate_is_expired() -> None:
    assert state([run()], [image(certified(31 * DAY), standing="expired")]) == "expired"


def test_a_revoked_image_is_revoked() -> None:
    revoked = image(certified(), standing="revoked", reason="NaN")
    assert state([run()], [revoked]) == "revoked"
    assert state([run(image="sha256:another")], [revoked]) == "revoked"
    assert state([run()], [dataclasses.replace(revoked, current=False)]) == "revoked"
    assert not standing.offers([revoked], MACHINE)[0].valid(NOW)


def test_a_driver_on_which_a_certified_stack_fails_is_not_to_be_rolled_out() -> None:
    cells = standing.cells([run(driver="31.40.1", status="FAILED")], [image(certified())], NOW)
    (warning,) = standing.warnings(cells)
    assert "Do not roll out driver 31.40.1" in warning
    assert STACK in warning


def test_a_stack_that_is_certified_nowhere_warns_of_no_driver() -> None:
    assert standing.warnings(standing.cells([run(status="FAILED")], [], NOW)) == ()


def test_a_simulated_failure_says_so_in_the_warning() -> None:
    failed = run(driver="31.40.1", status="FAILED", simulated=True)
    (warning,) = standing.warnings(standing.cells([failed], [image(certified())], NOW))
    assert "(simulated)" in warning


@pytest.mark.parametrize(("driver", "words"), [("", "CPU, no driver"), ("1.2", "CPU, driver 1.2")])
def test_a_machine_reads_as_people_say_it(driver: str, words: str) -> None:
    assert StandingMachine(device_model="CPU", driver=driver).words() == words


def test_a_night_without_a_run_is_missing_and_shows_the_newest_one() -> None:
    found = night.last_night([run(50 * HOUR, status="FAILED"), run(49 * HOUR)], NOW)
    assert found.missing
    assert len(found.runs) == 2
    assert found.newest == NOW - 49 * HOUR


def test_an_empty_history_is_missing_too() -> None:
    assert night.last_night([], NOW).missing


def test_a_failure_says_for_how_many_runs_nothing_passed_there() -> None:
    runs = [run(age * DAY + HOUR, status="FAILED") for age in (3, 2, 1, 0)]
    (trouble,) = night.last_night([run(5 * DAY), *runs], NOW).troubles
    assert trouble.nights == 4
    assert trouble.since == runs[0].started


def test_a_failure_after_a_pass_is_new() -> None:
    (trouble,) = night.last_night([run(DAY + HOUR), run(HOUR, status="FAILED")], NOW).troubles
    assert (trouble.since, trouble.first) == (None, False)


def test_a_failure_of_a_stack_that_never_ran_there_is_the_first_run() -> None:
    runs = [run(2 * DAY, stack="another"), run(DAY + HOUR, driver="1.0"), run(HOUR, status="FAILED")]
    (trouble,) = night.last_night(runs, NOW).troubles
    assert (trouble.since, trouble.first) == (None, True)


def test_several_failures_of_a_night_on_one_machine_are_told_once() -> None:
    runs = [run(age * HOUR, status="FAILED", node=node) for age, node in ((3, "a"), (2, "b"), (1, "a"))]
    (trouble,) = night.last_night(runs, NOW).troubles
    assert trouble.run.started == NOW - HOUR
    assert (trouble.others, trouble.nodes) == (2, 2)


def test_failed_runs_come_before_unfit_ones() -> None:
    runs = [run(3 * HOUR, status="UNFIT", stack="a"), run(2 * HOUR, status="FAILED", stack="b")]
    assert [item.run.status for item in night.last_night(runs, NOW).troubles] == ["FAILED", "UNFIT"]
