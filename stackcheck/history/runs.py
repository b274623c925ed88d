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
        stack: The stack id; for an image from elsewhere the name under which it was tested, in old records
            its digest; `no image` for pytest alone.
    """

    record: str  # `sha256:…` of the record file
    run_id: str
    started: dt.datetime  # when it started (UTC)
    finished: dt.datetime  # when it ended (UTC); a run that never ended is kept with the time when it started
    tier: Tier  # how thorough the suites were
    stack: str
    image: str | None  # the image's manifest digest, else its config digest; None for pytest alone
    vendor: Vendor
    device_model: str  # the device model; several are joined by ` + `
    device_count: int  # how many devices the host had
    driver: str | None
    kernel: str | None
    node: str  # anonymous id of the machine: a hash of its devices' ids
    status: Status
    reasons: tuple[str, ...]  # why it is not PASSED
    failed: tuple[str, ...]  # ids of the checks that failed or ended with an error
    waived: tuple[str, ...]  # ids of the checks that a waiver accepts
    simulated: bool  # whether no host ran it: a demonstration made it


@dataclass(frozen=True)
class Point:
    """One metric of one check of one run.

    Attributes:
        name: The metric's name. Where a check reports a name several times, the conditions that tell them
            apart follow: `gemm_tflops[m=8192 n=28672]`.
        direction: `min` if more is better, `max` if less is; None if no bound judges it.
        chips: Which of the machine's devices measured it: `0`, or `0,3`; None for all of them.
    """

    record: str
    check: str
    name: str
    unit: str
    value: float  # the number that the bound judges
    repeats: tuple[float, ...]  # the repeats that it comes from; empty if there was one measurement
    direction: Literal["min", "max"] | None
    bound: float | None
    ceiling: float | None  # what the device could reach at most
    chips: str | None = None


@dataclass(frozen=True, kw_only=True)
class Query:
    """Which runs or points; None means any.

    In text fields `*` stands for any text and `?` for one character; upper and lower case are equal.

    Attributes:
        check: Pattern on a check's id. For runs: those in which it failed, was invalid or was waived.
    """

    stack: str | None = None  # pattern on `Run.stack`
    device_model: str | None = None  # pattern on `Run.device_model`
    driver: str | None = None  # pattern on `Run.driver`
    check: str | None = None
    metric: str | None = None  # pattern on `Point.name`. For runs: those that measured it
    status: str | None = None  # pattern on `Run.status`
    node: str | None = None  # pattern on `Run.node`
    since: dt.datetime | None = None  # runs that started at this time or later
    until: dt.datetime | None = None
    limit: int | None = None  # the largest number of runs or points
    newest_first: bool = True  # the order, by start; the oldest come first otherwise
