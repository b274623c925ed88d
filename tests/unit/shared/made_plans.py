"""Plans of nights as they end, made without a night."""

import datetime as dt
from typing import Any

from stackcheck.nightly.fingerprint import Fingerprint
from stackcheck.nightly.state import Ended, Item, NotRun, Plan

NOW = dt.datetime(2026, 11, 22, 2, tzinfo=dt.UTC)
HOST = Fingerprint(
    vendor="amd",
    devices=(),
    driver="6.16.6",
    srcversion="B",
    kernel="6.8",
    partition=None,
    nvls="unavailable",
)
GEMM = "test_kernels.py::test_gemm[bf16|8192]"
WARNED = Ended(
    action="warn",
    because="it failed twice with driver 6.14.5 -> 6.16.6",
    failed=(GEMM,),
    rollout=("driver 6.14.5 -> 6.16.6",),
    exit_code=6,
)
RENEWED = Ended(action="renew", because="this configuration passed again")
UNFIT = Ended(action="nothing", because="the machine is unfit", exit_code=9)
BROKEN = Ended(action="error", because="the engine stopped answering", exit_code=4)
SKIP = NotRun(tag="other", why="certified for H200 x8, not for this host")
FRESH = NotRun(tag="fresh", why="not due", for_here=True)


def plan(*ends: Ended | None, **changes: Any) -> Plan:
    items = tuple(
        Item(tag=f"stack-{index}", reference=f"oci:dist@{index}", reasons=("forced",), ended=end)
        for index, end in enumerate(ends)
    )
    fields: dict[str, Any] = {
        "night": "0123456789ab",
        "started": NOW,
        "target": "oci:dist",
        "node": "abc",
        "fingerprint": HOST,
        "items": items,
    }
    return Plan(**(fields | changes))
