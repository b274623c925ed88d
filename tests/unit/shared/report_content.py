"""Runs, points and whole reports, made in memory. In: what differs. Out: `Run`, `Point`, `Content`."""

import dataclasses
import datetime as dt
import hashlib
import math
from collections.abc import Sequence
from typing import Any

from stackcheck.history.runs import Point, Run
from stackcheck.report import content, details, night, published, speed, standing

NOW = dt.datetime(2026, 3, 4, 5, 6, 7, tzinfo=dt.UTC)
DAY = dt.timedelta(days=1)
HOUR = dt.timedelta(hours=1)
STACK = "rocm7.2.1-torch2.14.1-py3.12-ubuntu24.04"
MODEL, DRIVER = "MI300X", "30.30.3"
MACHINE = standing.StandingMachine(device_model=MODEL, driver=DRIVER)
# A name that would be markup, a script or the end of one, if anything forgot to escape it.
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u2028"
GEMM = "test_kernel_speed.py::test_gemm_speed[bf16]"


def digest(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def run(age: dt.timedelta = HOUR, **changes: Any) -> Run:
    """A run that started so long before `NOW`."""
    started = NOW - age
    fields: dict[str, Any] = {
        "run_id": hashlib.sha256(f"{age}{sorted(changes.items())}".encode()).hexdigest()[:32],
        "started": started,
        "finished": started + dt.timedelta(minutes=4),
        "tier": "standard",
        "stack": STACK,
        "image": digest("image"),
        "vendor": "amd",
        "device_model": MODEL,
        "device_count": 8,
        "driver": DRIVER,
        "kernel": "6.8",
        "node": "node0",
        "status": "PASSED",
        "reasons": (),
        "failed": (),
        "waived": (),
        "simulated": False,
    }
    fields |= changes
    return Run(**{"record": digest(fields["run_id"]), **fields})


def point(of: Run, value: float, name: str = "gemm_tflops", **changes: Any) -> tuple[Run, Point]:
    fields: dict[str, Any] = {
        "record": of.record,
        "check": GEMM,
        "name": name,
        "unit": "TFLOP/s",
        "value": value,
        "repeats": (value,),
        "direction": "min",
        "bound": 600.0,
        "ceiling": 1307.0,
    }
    return of, Point(**(fields | changes))


def certified(age: dt.timedelta = 2 * HOUR, **changes: Any) -> published.CertifiedFor:
    fields: dict[str, Any] = {
        "device_model": MODEL,
        "device_count": 8,
        "driver": DRIVER,
        "tier": "standard",
        "verified": NOW - age,
        "expires": NOW - age + 30 * DAY,
        "run_id": "run",
    }
    return published.CertifiedFor(**(fields | changes))


def image(*machines: published.CertifiedFor, **changes: Any) -> published.PublishedImage:
    fields: dict[str, Any] = {
        "digest": digest("image"),
        "reference": f"oci:dist:{STACK}",
        "current": True,
        "stack": STACK,
        "standing": "certified",
        "machines": machines,
    }
    return published.PublishedImage(**(fields | changes))


def whole(
    runs: Sequence[Run] = (),
    images: Sequence[published.PublishedImage] = (),
    points: Sequence[tuple[Run, Point]] = (),
    **changes: Any,
) -> content.Content:
    """The content of a report, as `content.gather` makes it."""
    ordered = tuple(sorted(runs, key=lambda item: item.started))
    cells = standing.cells(ordered, images, NOW)
    machines = standing.machines(ordered, images)
    made = content.Content(
        made=NOW,
        here=machines[0] if machines else None,
        machines=machines,
        offered=content.Offered(target="oci:dist", images=tuple(images)),
        runs=ordered,
        cells=cells,
        warnings=standing.warnings(cells),
        night=night.last_night(ordered, NOW),
        groups=speed.groups(points),
        details={},
        band=None,
        campaign=None,
        nightly=None,
        below=(),
        problems=(),
    )
    return dataclasses.replace(made, **changes)


def failed_detail(check: str, reason: str) -> content.Detail:
    failure = details.ShownFailure(check=check, outcome="failed", proves="It is right.", reason=(reason,))
    return content.Detail(failures=(failure,), readings=(), curves=(), losses=())


def many(count: int) -> content.Content:
    """A report of so many runs: ten stacks on five machines, twenty figures in each run."""
    runs, points = [], []
    for number in range(count):
        age = dt.timedelta(minutes=12 * (count - number))
        made = run(
            age,
            stack=f"rocm7.{number % 10}.0-torch2.13.0-py3.12-ubuntu24.04",
            driver=f"30.{number // 10 % 5}.0",
            node=f"node{number % 40}",
            status="FAILED" if number % 97 == 0 else "PASSED",
            reasons=("failed: test_kernels.py::test_gemm",) if number % 97 == 0 else (),
            run_id=f"{number:032x}",
        )
        runs.append(made)
        for figure in range(20):
            value = 640 + figure + 4 * math.sin(number / 50 + figure)
            points.append(point(made, value, f"gemm_tflops[m={figure}]"))
    images = [
        image(certified(driver=f"30.{driver}.0"), stack=f"rocm7.{stack}.0-torch2.13.0-py3.12-ubuntu24.04")
        for stack in range(10)
        for driver in range(3)
    ]
    return whole(runs, images, points)
