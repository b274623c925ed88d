"""Judge an existing result file. In: a result.json, this checkout, maybe a stack. Out: a `Judgement`.

The run may be of another host, or of pytest alone. So thresholds, policy, list of checks and devices.json of
this checkout decide, and what nothing here can confirm is named as not compared.
"""

import dataclasses
import datetime as dt
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from stackcheck.errors import ConfigurationError
from stackcheck.matrix import matrix
from stackcheck.matrix.stack import Stack
from stackcheck.policy import Policy, is_enough
from stackcheck.suite import bounds, expected, inputs, results
from stackcheck.suite.judged import judge
from stackcheck.suite.requirements import Requirements, facts_of
from stackcheck.suite.results import RunResult
from stackcheck.suite.subject import find_image
from stackcheck.suite.verdict import Verdict

NO_IMAGE = "no image"  # how a verdict calls the image of a run by pytest alone


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judgement:
    """The verdict on a result file."""

    result: RunResult
    verdict: Verdict  # PASSED, FAILED or UNFIT, with reasons
    certifies: bool  # whether a run of this tier can certify; if not, its state is `tested`
    not_compared: tuple[str, ...]  # what nothing in this checkout could confirm, in words


def judge_file(path: Path, root: Path, stack: Stack | None, *, made_up: bool = False) -> Judgement:
    """The verdict of this checkout on a result file; the stack's waivers, machines and declaration apply.

    No verb lets a made-up result pass.

    Raises:
        ConfigurationError: The file is not the result of a run, or not of this stack; or the checkout has no
            list of checks for its number of devices, or no row for their model.
    """
    result = _read(path)
    _require_stack(result, stack, path)
    policy = matrix.load_matrix(root / "matrix.yaml").policy
    now = _inputs_of(root)
    same = result.inputs.thresholds == now["thresholds"]
    needed = _requirements(result, root, stack, policy)
    needed = dataclasses.replace(needed, same_thresholds=same, made_up=made_up)
    found = judge(result, needed, root)
    return Judgement(
        result=result,
        verdict=found,
        certifies=is_enough(result.tier, policy.certifies[result.host.vendor]),
        not_compared=tuple(_not_compared(result, root, stack, now)),
    )


def _read(path: Path) -> RunResult:
    try:
        return results.load_result(path)
    except results.ResultError as error:  # here a file that the user named, not a run that failed
        next_step = "name the result.json of a run: build/STACK/run/result.json"
        raise error.but(ConfigurationError, next_step=next_step) from error


def _require_stack(result: RunResult, stack: Stack | None, path: Path) -> None:
    if stack and result.stack_id not in {None, stack.id}:
        raise ConfigurationError(
            "the result belongs to another stack",
            where=str(path),
            got=result.stack_id,
            expected=stack.id,
            next_step=f"stackcheck judge {path} --stack {result.stack_id}",
        )


def _requirements(result: RunResult, root: Path, stack: Stack | None, policy: Policy) -> Requirements:
    vendor, today = result.host.vendor, dt.datetime.now(dt.UTC).date()
    count = max(1, len(result.host.devices))
    return Requirements(
        checks=expected.check_ids(root, vendor=vendor, tier=result.tier, count=count),
        image_config_digest=_image(result, root, stack),
        machines=stack.tested_on if stack else None,
        vendor=stack.vendor if stack else None,
        facts=facts_of(result.host, stack, bounds.told_runtime(result)),
        advisory=policy.advisory,
        waivers=policy.waivers_for(stack.id, today) if stack else (),
        expired=policy.expired_for(stack.id, today) if stack else (),
    )


def _image(result: RunResult, root: Path, stack: Stack | None) -> str:
    """The image that the run has to be about: the stack's if it was built here, else the result's own."""
    if result.image is None:
        return NO_IMAGE
    return _built_here(root, stack) or result.image.config_digest


def _built_here(root: Path, stack: Stack | None) -> str | None:
    """The config digest of a stack's image; None if it was not built in this checkout."""
    built = stack and (root / "build" / stack.id / "image.json").exists()
    return find_image(stack.id, root).config_digest if stack and built else None


def _inputs_of(root: Path) -> Mapping[str, str | None]:
    """The digests of what a run in this checkout would use."""
    with tempfile.TemporaryDirectory(prefix="stackcheck-judge-") as folder:
        return inputs.freeze(root, Path(folder) / "suite").model_dump()


def _not_compared(
    result: RunResult, root: Path, stack: Stack | None, now: Mapping[str, str | None]
) -> Iterator[str]:
    if result.image is None:
        yield "the image: pytest ran without one, so nothing can be certified"
    elif stack is None:
        yield f"the image: the result names {result.image.reference}, and no stack is named here"
    elif not _built_here(root, stack):
        yield f"the image: {result.image.reference} was not built in this checkout"
    yield "the devices: the result names them, this host did not read them"
    if stack is None:
        name = f": --stack {result.stack_id}" if result.stack_id else "; name its stack with --stack"
        yield f"waivers, tested_on and what the stack declares{name}"
    reported = result.inputs.model_dump()
    for name in ("suites", "trainers", "thresholds"):
        if reported[name] != now[name]:
            yield f"the {name}: the run used others than this checkout has ({json.dumps(reported[name])})"
