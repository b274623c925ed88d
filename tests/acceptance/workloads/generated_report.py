"""What a family of drawn cases says in the end. In: its report. Out: metrics, an error for what is wrong."""

from collections.abc import Mapping
from typing import Any

from workloads import generated_attention, generated_inside, generated_left, margins

# Cases of which less is judged, by what their words say.
LESS = {
    "forward_only": generated_attention.FORWARD,
    "passed_over": generated_attention.PASSED,
    "doubted": generated_inside.DOUBTED,
    "known": generated_inside.KNOWN,
}
MOST_DOUBTED = 0.1  # of the judged cases


def require(report: Mapping[str, Any], record_metric: margins.Record, least: float) -> None:
    """Keep seed, number of cases and the worst margin; fail with each case that failed.

    A grammar whose cases are mostly refused proves nothing, so the share that was judged has a bound.
    """
    record_metric("generated_seed", report["seed"], unit="seed")
    record_metric("generated_drawn", report["drawn"], unit="cases")
    for key in LESS.keys() & report.keys():
        record_metric(f"generated_{key}", report[key], unit="cases")
    left = report["left"]
    for what, reason, count in ((what, *each) for what, counts in left.items() for each in counts.items()):
        record_metric("generated_left", count, unit="counts", conditions={"of": what, "reason": reason})
    margins.record(record_metric, report["worst"], report["judged"])
    if report["failed"]:  # raised, not asserted: pytest does not rewrite asserts here, and -O removes them
        raise AssertionError(
            "\n".join([f"{len(report['failed'])} of {report['judged']} failed", *report["failed"]])
        )
    if report["drawn"] < report["least"]:
        raise AssertionError(f"only {report['drawn']} of at least {report['least']} cases were drawn")
    if report.get("doubted", 0) > MOST_DOUBTED * report["judged"]:
        raise AssertionError(
            f"{report['doubted']} of {report['judged']} have a doubt, at most {MOST_DOUBTED:.0%} may"
        )
    if not report["drawn"] or report["judged"] < least * report["drawn"]:
        raise AssertionError(
            f"only {report['judged']} of {report['drawn']} could be judged, at least {least:.0%} must be"
        )
    if wrong := generated_left.wrong(left, report.get("asked", report["drawn"]), report["judged"]):
        raise AssertionError("\n".join(wrong))
