"""The verdict of this checkout on a run of a fabricated host. In: a run. Out: a `Verdict`.

What no device answered is made up (`made_up.py`), so a verdict rests on what the host's own readings show.
"""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import made_up
from stackcheck.matrix import matrix, resolve
from stackcheck.matrix.stack import Stack
from stackcheck.policy import is_advisory
from stackcheck.suite import bounds, judgement
from stackcheck.suite.verdict import Verdict

# How the check that names a fault ends -> what becomes of the run; of a skip the caller knows.
STATUS = {"passed": "PASSED", "failed": "FAILED", "invalid": "UNFIT"}
# The suites of this checkout are copied to be hashed: half a second, and the same for every run.
INPUTS_ONCE = functools.cache(judgement._inputs_of)


@functools.cache
def _answer(root: Path, question: str, ask: Callable[..., str] = bounds.ask_suites) -> str:
    return ask(root, json.loads(question))


def asked_once(root: Path, question: Mapping[str, Any]) -> str:
    """The suites' answer to a question about bounds, which takes a new Python."""
    return _answer(root, json.dumps(question, sort_keys=True))


def judged(result: Mapping[str, Any], folder: Path, selector: str | None = None) -> Verdict:
    """The verdict on the run, completed as on healthy devices; with a stack also by its declaration."""
    path, checks = folder / "whole.json", result["checks"]
    run = {**result, "checks": list(checks.values()) if isinstance(checks, Mapping) else checks}
    path.write_text(json.dumps(made_up.whole(run)), encoding="utf-8")
    arch = next((device["arch"] for device in result["host"]["devices"]), "")
    chosen = stack(selector, arch) if selector else None
    with (
        mock.patch.object(judgement, "_inputs_of", INPUTS_ONCE),
        mock.patch.object(bounds, "ask_suites", asked_once),
    ):
        return judgement.judge_file(path, made_up.ROOT, chosen, made_up=True).verdict


@functools.cache
def stack(selector: str, arch: str) -> Stack:
    """The first stack that a pattern selects, and that holds code for an architecture; any for none."""
    found = resolve.load_stacks(made_up.ROOT, (selector,))
    return next(one for one in found if arch in one.archs or not arch)


def status(check: str, outcome: str) -> str:
    """What becomes of a run in which this check ends so, and all others pass.

    An advisory check never fails a run; that the machine is unfit counts, whichever check found it.
    """
    advisory = matrix.load_matrix(made_up.ROOT / "matrix.yaml").policy.advisory
    return "PASSED" if outcome == "failed" and is_advisory(check, advisory) else STATUS[outcome]


def others(found: Verdict, check: str, *also: str) -> list[str]:
    """The reasons that are not about a check, and have none of the words that are expected besides."""
    return [
        reason
        for reason in found.reasons
        if not reason.startswith(check) and not any(words in reason for words in also)
    ]
