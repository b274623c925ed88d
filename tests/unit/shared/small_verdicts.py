"""The verdict on a run that a test writes down as checks."""

import json
from typing import Any

from result_files import CONFIG_DIGEST, check, result
from stackcheck.matrix.matrix import TestTarget
from stackcheck.suite import results
from stackcheck.suite.bounds import Bounds
from stackcheck.suite.requirements import Requirements
from stackcheck.suite.verdict import Verdict, judge

CPU = TestTarget(device="CPU", count=1)
HEALTHY = (check("test_a.py::test_one[1]"), check("test_a.py::test_one[2]"), check("test_b.py::test_two"))
REQUIRED = tuple(str(item["id"]) for item in HEALTHY)


def judged(
    *checks: dict[str, Any],
    required: tuple[str, ...] | None = None,
    machines: tuple[TestTarget, ...] | None = (CPU,),
    bounds: Bounds | None = None,
    held_to: dict[str, Any] | None = None,
    **changes: Any,
) -> Verdict:
    """The verdict on a run; without `required`, the suites have the healthy checks and those given."""
    run = results.parse(json.dumps(result(*checks, **changes)).encode())
    ids = dict.fromkeys([*REQUIRED, *(str(item["id"]) for item in checks)])
    held = {"image_config_digest": CONFIG_DIGEST, "machines": machines} | (held_to or {})
    needed = Requirements(checks=tuple(ids) if required is None else required, **held)
    return judge(run, needed, bounds or Bounds())
