"""What a run must show to pass. In: an image, this host, a tier. Out: `Requirements`, for the verdict.

Nothing of it comes from the image: the list of checks, the rows of devices.json and the policy are read from
the checkout, the devices from this host.
"""

import datetime as dt
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stackcheck import vendors
from stackcheck.matrix.known_issues import KnownIssue
from stackcheck.matrix.matrix import TestTarget
from stackcheck.matrix.stack import Stack
from stackcheck.policy import Advisory, Tier, Waiver
from stackcheck.suite import expected, skips
from stackcheck.suite.results import ReportedHost
from stackcheck.suite.subject import Subject
from stackcheck.vendors import Host, Vendor
from stackcheck.vendors.seen import Seen


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """What a run must show.

    Attributes:
        machines: The machines that the stack names; a run on any other is UNFIT. None: any with a
            complete set of bounds.
        seen: What this host itself saw of its devices after the run; None: the run was on another host.
        same_thresholds: Whether the run used this checkout's thresholds, so that the bounds that it reports
            must be these. False only for the file of an old run, which certifies nothing.
        carried: Ids of `checks` that another certificate vouches for, so that the run may leave them out.
        known_issues: The reported faults of the versions in the image; one that says `refuse` fails the run.
    """

    checks: tuple[str, ...]  # the ids that the result must hold, exactly
    image_config_digest: str  # the config digest of the image that is to be certified
    machines: Sequence[TestTarget] | None = None
    vendor: Vendor | None = None  # the vendor whose checks run; None: any
    devices: tuple[str, ...] | None = None  # the ids of this host's devices; None: not compared
    facts: skips.Facts = field(default_factory=lambda: skips.Facts(rows=()))  # what confirms a skip
    seen: Seen | None = None
    advisory: tuple[Advisory, ...] = ()  # checks that do not decide
    same_thresholds: bool = True
    made_up: bool = False  # whether a made-up result may pass: only in this project's tests
    waivers: tuple[Waiver, ...] = ()  # the waivers that hold today
    carried: frozenset[str] = frozenset()
    expired: tuple[Waiver, ...] = ()  # the waivers of this stack whose date has passed
    known_issues: tuple[KnownIssue, ...] = ()


def of(subject: Subject, host: Host, tier: Tier, root: Path) -> Requirements:
    """The requirements of a run of `tier` on this host."""
    stack, today = subject.stack, dt.datetime.now(dt.UTC).date()
    count = max(1, len(host.devices))
    return Requirements(
        checks=expected.check_ids(root, vendor=subject.vendor, tier=tier, count=count),
        image_config_digest=subject.image.config_digest,
        machines=subject.machines,
        vendor=subject.vendor,
        devices=tuple(device.id for device in host.devices),
        facts=facts_of(host, stack),
        advisory=subject.policy.advisory,
        waivers=subject.policy.waivers_for(subject.name, today),
        expired=subject.policy.expired_for(subject.name, today),
        known_issues=stack.known_issues if stack else (),
    )


def facts_of(host: Host | ReportedHost, stack: Stack | None, runtime: str | None = None) -> skips.Facts:
    """What confirms a skip on this host.

    Args:
        host: The machine.
        stack: The stack under test; its ROCm or CUDA release is that of its management library.
        runtime: That release where there is no stack, as the run's result says.
    """
    table = {str(row["model"]): row for row in vendors.device_table()}
    rows = [table[device.model] for device in host.devices if device.model in table]
    return skips.Facts(
        rows=rows,
        packages=skips.declared(stack) if stack else None,
        archs=stack.archs if stack else (),
        unreadable=readings(
            vendors.unreadable_table(),
            rows,
            driver=host.driver,
            runtime=stack.runtime_version if stack else runtime,
        ),
    )


NUMBERS = re.compile(r"\d+(?:\.\d+)*")


def readings(
    table: Sequence[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    *,
    driver: str | None,
    runtime: str | None,
) -> dict[str, str]:
    """Reading -> the source that says that this machine cannot tell it.

    Args:
        table: The list `unreadable` of devices.json.
        rows: The rows of this host's devices; an entry has to hold for all of them.
        driver: The host's driver.
        runtime: The ROCm or CUDA release of the image, which is that of its management library.
    """
    return {
        entry["reading"]: entry["source"]
        for entry in table
        if rows
        and all(_is_of(entry, row) for row in rows)
        and _is_below(driver, entry.get("driver_below"))
        and _is_below(runtime, entry.get("runtime_below"))
    }


def _is_of(entry: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    return entry["vendor"] == row["vendor"] and row["arch"] in entry.get("archs", (row["arch"],))


def _is_below(version: str | None, limit: str | None) -> bool:
    """Whether a version is lower than a limit; a driver of the kernel's own tree has no number."""
    if limit is None:
        return True
    if version is None or not NUMBERS.match(version) or "." not in version:
        return False
    return _numbers(version) < _numbers(limit)


def _numbers(version: str) -> tuple[int, ...]:
    found = NUMBERS.match(version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
