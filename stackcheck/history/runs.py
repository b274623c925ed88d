"""What a kept run is, and how runs are asked for. In: nothing. Out: `Run`, `Point`, `Query`."""

import datetime as dt
import re
from dataclasses import dataclass
from typing import Literal

from stackcheck.errors import StackcheckError
from stackcheck.policy import Tier
from stackcheck.suite.verdict import Status
from stackcheck.vendors import Vendor

_DIGEST = re.compile(r"(sha256:[0-9a-f]{12})[0-9a-f]{52}")


def named(stack: str) -> str:
    """What people read for `Run.stack`: old records have the digest alone of an image from elsewhere."""
    return _DIGEST.sub(r"\1… (no name was kept)", stack)


class HistoryError(StackcheckError):
    """A history cannot be read or written, or a record in it is damaged."""

    exit_code = 10


@dataclass(frozen=True, kw_only=True)
class Run:
    """One judged run of the suites.

    Attributes:
        record: `sha256:…` of the record file.
        started: When it started (UTC).
        finished: When it ended (UTC); a run that never ended is kept with the time when it started.
        tier: How thorough the suites were.
        stack: The stack id; for an image from elsewhere the name under which it was tested, in old records
            its digest; `no image` for pytest alone.
        image: The image's manifest digest, else its config digest; None for pytest alone.
        device_model: The device model; several are joined by ` + `.
        device_count: How many devices the host had.
        node: Anonymous id of the machine: a hash of its devices' ids.
        reasons: Why it is not PASSED.
        failed: Ids of the checks that failed or ended with an error.
        waived: Ids of the checks that a waiver accepts.
        simulated: Whether no host ran it: a demonstration made it.
    """

    record: str
    run_id: str
    started: dt.datetime
    finished: dt.datetime
    tier: Tier
    stack: str
    image: str | None
    vendor: Vendor
    device_model: str
    device_count: int
    driver: str | None
    kernel: str | None
    node: str
    status: Status
    reasons: tuple[str, ...]
    failed: tuple[str, ...]
    waived: tuple[str, ...]
    simulated: bool


@dataclass(frozen=True, kw_only=True)
class Point:
    """One metric of one check of one run.

    Attributes:
        name: The metric's name. Where a check reports a name several times, the conditions that tell them
            apart follow: `gemm_tflops[m=8192 n=28672]`.
        value: The number that the bound judges.
        repeats: The repeats that it comes from; empty if there was one measurement.
        direction: `min` if more is better, `max` if less is; None if no bound judges it.
        ceiling: What the device could reach at most.
        chips: Which of the machine's devices measured it: `0`, or `0,3`; None for all of them.
    """

    record: str
    check: str
    name: str
    unit: str
    value: float
    repeats: tuple[float, ...]
    direction: Literal["min", "max"] | None
    bound: float | None
    ceiling: float | None
    chips: str | None = None


@dataclass(frozen=True, kw_only=True)
class Query:
    """Which runs or points; None means any.

    In text fields `*` stands for any text and `?` for one character; upper and lower case are equal.

    Attributes:
        stack: Pattern on `Run.stack`.
        device_model: Pattern on `Run.device_model`.
        driver: Pattern on `Run.driver`.
        check: Pattern on a check's id. For runs: those in which it failed, was invalid or was waived.
        metric: Pattern on `Point.name`. For runs: those that measured it.
        status: Pattern on `Run.status`.
        node: Pattern on `Run.node`.
        since: Runs that started at this time or later.
        limit: The largest number of runs or points.
        newest_first: The order, by start; the oldest come first otherwise.
    """

    stack: str | None = None
    device_model: str | None = None
    driver: str | None = None
    check: str | None = None
    metric: str | None = None
    status: str | None = None
    node: str | None = None
    since: dt.datetime | None = None
    until: dt.datetime | None = None
    limit: int | None = None
    newest_first: bool = True
