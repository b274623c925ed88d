"""The libraries' own tests. In: torch's and torchao's wheels, `--own-tests`. Out: what fails twice.

No certificate rests on them: what fails for its authors too is listed with its reason
(workloads/own_tests_known.json).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from harness import skips, unloaded
from harness.asked import of_image
from harness.calls import OnDevice, RecordMetric
from harness.check import Check
from harness.overdue import OverdueError
from workloads import own_tests

RANKS = {"cpu": 2}  # `ranks` is every device of this run
TIMEOUT_S = own_tests.WHOLE_S + own_tests.REPEAT_S + 2 * own_tests.TEST_S


@pytest.mark.tier("soak")
def test_own_tests_of_collectives(
    ranks: int, on_device: OnDevice, check: Check, record_metric: RecordMetric, pytestconfig: pytest.Config
) -> None:
    """torch's own tests of collectives and DDP pass: Join, hooks, buffers, SyncBatchNorm, no_sync."""
    if ranks < own_tests.LEAST_RANKS:
        skips.without_devices(own_tests.LEAST_RANKS, ranks)
    skips.if_lacking(on_device(own_tests.lacking))
    seed = pytestconfig.getoption("case_seed")
    report = on_device(own_tests.distributed, seed=seed, ranks=ranks, timeout_s=TIMEOUT_S)
    _require([report], check, record_metric)


@pytest.mark.tier("soak")
@pytest.mark.gpus(1)
@pytest.mark.parametrize("subject", ["torchao", "given"])
def test_own_tests(
    subject: str,
    on_device: OnDevice,
    check: Check,
    record_metric: RecordMetric,
    pytestconfig: pytest.Config,
) -> None:
    """The own tests of a package pass: those in its wheel, or those in an unpacked source distribution."""
    folder = pytestconfig.getoption("own_tests")
    if subject == "given" and folder is None:
        skips.without_package("own tests", "--own-tests names no folder of unpacked source distributions")
    if subject == "torchao" and not of_image(unloaded.is_installed, module="torchao"):
        skips.without_package("torchao", "the package torchao is not part of this stack")
    skips.if_lacking(on_device(own_tests.lacking))
    asked: dict[str, Any] = {"seed": pytestconfig.getoption("case_seed"), "timeout_s": TIMEOUT_S}
    if subject == "torchao":
        reports = [on_device(own_tests.torchao, **asked)]
    else:
        where = str(folder.resolve())
        given = on_device(own_tests.names_given, folder=where)
        assert "refused" not in given, given["refused"]
        reports = [on_device(own_tests.given, folder=where, name=name, **asked) for name in given["names"]]
    _require(reports, check, record_metric)


def _require(reports: Sequence[Mapping[str, Any]], check: Check, record_metric: RecordMetric) -> None:
    """Keep what became of the tests; fail with those that failed twice, and where too few passed."""
    check.more_evidence["own tests"], problems = reports, []
    for report in reports:
        subject, failed = report["subject"], report["failed"]
        counts = {what: sum(report[what].values()) for what in ("skipped", "left")}
        counts |= {what: len(report[what]) for what in ("failed", "once", "known", "known_no_longer")}
        for what, count in {"passed": report["passed"], **counts}.items():
            record_metric(f"own_tests_{what}", count, unit="tests", conditions={"subject": subject})
        if failed:
            problems += [f"{len(failed)} tests of {subject} failed twice", *failed]
        elif report["passed"] < (least := own_tests.LEAST.get(subject, 1)):
            problems.append(f"only {report['passed']} tests of {subject} passed, at least {least} must")
            problems += [f"left: {report['left']}", report["output"]]
    if problems and all(report["hung"] == len(report["failed"]) > 0 for report in reports):
        raise OverdueError("\n".join(problems))
    if problems:  # raised, not asserted: pytest would show the reports once more
        raise AssertionError("\n".join(problems))
