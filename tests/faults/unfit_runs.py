"""What the host says of invalid checks. In: a result.json. Out: whether their readings show it."""

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import planting
from stackcheck.suite import machine


def assert_unfit(result: Mapping[str, Any], *, unfit: bool = True) -> None:
    """Each invalid check is UNFIT by its own telemetry, or else counts as failed."""
    invalid = [check for check in result["checks"] if check["outcome"] == "invalid"]
    assert invalid
    for check in invalid:
        problem = machine.problem(_check(check), _rows(result))
        assert (problem is None) == unfit, (problem, check["reason"], check["evidence"])


def _check(written: Mapping[str, Any]) -> Any:
    """The parts of a check that decide; pydantic, which reads the file on the host, is not in an image."""
    found = tuple(SimpleNamespace(**one) for one in written["machine"])
    return SimpleNamespace(machine=found, evidence=SimpleNamespace(**written["evidence"]))


def _rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    table = json.loads((planting.TESTS / "acceptance" / "devices.json").read_text(encoding="utf-8"))
    rows = {row["model"]: row for row in table["devices"]}
    return [rows[device["model"]] for device in result["host"]["devices"] if device["model"] in rows]
