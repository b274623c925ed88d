"""Which other nodes saw the same image fail. In: an image of a night, a history. Out: node -> failed checks.

The history that nodes share (`history:` in matrix.yaml) is how they hear of each other. Nodes that share none
never agree, and then a person decides.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from typing import TYPE_CHECKING

from stackcheck.history.runs import Query

if TYPE_CHECKING:
    from stackcheck.history.history import History
    from stackcheck.history.runs import Run
    from stackcheck.nightly.fingerprint import Fingerprint
    from stackcheck.nightly.state import Item, Plan

SINCE = dt.timedelta(days=7)  # a certificate is renewed at least that often by default
TWICE = 2  # on another node too, one failure is no failure


def of(item: Item, plan: Plan, history: History) -> dict[str, frozenset[str]]:
    """The checks that failed twice on each other node of this device model and driver, in these days."""
    asked = Query(status="FAILED", since=plan.started - SINCE)
    counts: dict[str, Counter[str]] = {}
    for run in history.runs(asked):
        if run.node != plan.node and _is_about(run, item, plan.fingerprint):
            counts.setdefault(run.node, Counter()).update(run.failed)
    return {
        node: frozenset(name for name, count in failed.items() if count >= TWICE)
        for node, failed in counts.items()
    }


def _is_about(run: Run, item: Item, here: Fingerprint) -> bool:
    """Whether a real run was of this image on such a machine, and found no fault of its machine."""
    machine = (run.device_model, run.device_count, run.driver)
    alike = machine == (here.device_model, len(here.devices), here.driver)
    unfit = any(" invalid: " in reason for reason in run.reasons)
    return alike and run.image in {item.digest, item.config_digest} and not (unfit or run.simulated)
