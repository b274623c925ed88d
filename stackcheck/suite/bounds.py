"""Bounds, looked up again in this host's checkout. In: a result. Out: the bound of each gated metric.

The image under test wrote the result, so the bounds in it are compared with these and never trusted. Which
bound applies to which metric is known to tests/acceptance/harness alone; stackcheck never imports the suites,
so it runs that module as a program.
"""

import functools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from stackcheck.errors import ConfigurationError
from stackcheck.files.border import Open
from stackcheck.suite.results import RunResult

Ask = Callable[[Path, Mapping[str, Any]], str]

TIMEOUT_S = 60
# -P and no PYTHONPATH: a module of the current folder is not the suites', and their path may have a colon.
PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from harness import bounds; bounds.main()"
# What a bound rests on, from the strongest to the weakest.
BoundClass = Literal["measured", "published", "derived"]
CLASSES: tuple[BoundClass, ...] = ("measured", "published", "derived")
DRIVER = "driver_listed"  # the metric of the check that compares driver and runtime
Key = tuple[str, int]  # check id, index of the metric in it


class Bound(Open):
    """One committed bound, and where it comes from: `class` in the file is `kind` here, because of Python."""

    model_config = ConfigDict(extra="ignore", frozen=True, validate_by_name=True, validate_by_alias=True)
    bound: FiniteFloat
    direction: Literal["min", "max"]
    unit: str
    kind: BoundClass = Field(alias="class")

    def accepts(self, value: float) -> bool:
        """Whether a value satisfies the bound; NaN never does."""
        return value >= self.bound if self.direction == "min" else value <= self.bound


class DriverSupport(BaseModel):
    """What the documents say about this driver and runtime: listed, unlisted or refused, in words."""

    state: Literal["listed", "unlisted", "refused"]
    says: str


class _BoundsAnswer(Open):
    driver: DriverSupport | None = None
    reached: tuple[bool, ...]
    bounds: tuple[Bound | None, ...]
    ceilings: tuple[FiniteFloat | None, ...] = ()
    defaults: tuple[str, ...] = ()
    missing: tuple[str, ...]
    unmeasured: tuple[str, ...]
    limits_are_guessed: bool = False


@dataclass(frozen=True)
class Bounds:
    """The bounds of a run.

    Attributes:
        of: Gated metric -> its bound; None if the checkout has none. Metrics that no bound judges are absent.
        defaults: Why the backend that attention took by default is not the one of this device and torch.
        missing: Figures that such a run judges on this model and count, and that have no bound here.
        unmeasured: Committed bounds of this device model and count that the run did not measure.
        driver: What this checkout's drivers.json says about the host's driver; None if the run did not tell
            the runtime, as on a CPU.
        ceilings: Metric with a bound -> what the hardware cannot exceed, by devices.json, where that says it.
        limits_are_guessed: Whether the limits of time on this vendor are a multiple of another vendor's.
    """

    of: Mapping[Key, Bound | None] = field(default_factory=dict)
    defaults: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unmeasured: tuple[str, ...] = ()
    driver: DriverSupport | None = None
    ceilings: Mapping[Key, float] = field(default_factory=dict)
    limits_are_guessed: bool = False

    def classes(self) -> dict[str, int]:
        """How many of the bounds are measured, published or derived."""
        counts = Counter(bound.kind for bound in self.of.values() if bound)
        return {name: counts[name] for name in CLASSES if counts[name]}


NOTHING_GATED = Bounds()


def look_up(result: RunResult, root: Path, ask: Ask | None = None) -> Bounds:
    """The bounds of every metric of a run, from the thresholds of the checkout `root`.

    A run on a processor gates nothing: it proves the flow and the numerics. `ask` replaces `ask_suites`, for
    a caller that judges many runs and caches the answers.

    Raises:
        ConfigurationError: The checkout has no suites, or devices.json does not know the device model.
    """
    models = {device.model for device in result.host.devices}
    keys = [(check.id, index) for check in result.checks for index in range(len(check.metrics))]
    if result.host.vendor == "cpu" or len(models) != 1:
        return NOTHING_GATED
    metrics = [metric for check in result.checks for metric in check.metrics]
    figures = [{"metric": metric.name, "conditions": metric.conditions} for metric in metrics]
    host = result.host
    asked = {
        "model": models.pop(),
        "entries": [],
        "figures": figures,
        "devices": len(host.devices),
        "nvls": host.nvls,
        "tier": result.tier,
        "skipped": [check.id for check in result.checks if check.outcome == "skipped"],
        "torch": result.software.get("torch"),
        "driver": _driver(result),
    }
    answer = _read((ask or ask_suites)(root, asked))
    found = zip(keys, answer.reached, answer.bounds, strict=True)
    of = {key: bound for key, reached, bound in found if reached}
    limits = dict(zip(keys, answer.ceilings, strict=False))  # an older checkout says none
    return Bounds(
        of=of,
        ceilings={key: limit for key, limit in limits.items() if limit is not None and of.get(key)},
        defaults=answer.defaults,
        missing=answer.missing,
        unmeasured=answer.unmeasured,
        driver=answer.driver,
        limits_are_guessed=answer.limits_are_guessed,
    )


@functools.lru_cache(maxsize=64)
def _read(answer: str) -> _BoundsAnswer:
    """Equal machines of a fleet get equal answers."""
    return _BoundsAnswer.model_validate_json(answer)


def missing(root: Path, model: str, devices: int, tier: str) -> tuple[str, ...]:
    """The figures without a bound that a run of a tier judges on a number of devices of a model.

    Raises:
        ConfigurationError: The checkout has no suites, or devices.json does not know the device model.
    """
    asked = {"model": model, "entries": [], "figures": [], "devices": devices, "nvls": None, "tier": tier}
    return _BoundsAnswer.model_validate_json(ask_suites(root, asked)).missing


def _driver(result: RunResult) -> dict[str, Any]:
    """The host's own driver, and the runtime that torch in the image was built with."""
    shown = _shown(result)
    return {
        "vendor": result.host.vendor,
        "driver": result.host.driver,
        **{name: shown.get(name) for name in ("runtime", "serves")},
    }


def told_runtime(result: RunResult) -> str | None:
    """The ROCm or CUDA release that torch was built with, as the run's result says."""
    told = _shown(result).get("runtime")
    return told if isinstance(told, str) else None


def _shown(result: RunResult) -> Mapping[str, Any]:
    told = (metric.conditions for check in result.checks for metric in check.metrics if metric.name == DRIVER)
    return next(told, {})


def ask_suites(root: Path, question: Mapping[str, Any]) -> str:
    """The answer of the suites' program `harness.bounds`, as JSON.

    Raises:
        ConfigurationError: The checkout has no suites, or they do not know the device model.
    """
    suites = root / "tests" / "acceptance"
    ended = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, str(suites)],
        input=json.dumps(question),
        env={**os.environ, "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        errors="replace",
        timeout=TIMEOUT_S,
        check=False,
    )
    if ended.returncode:
        raise ConfigurationError(
            "cannot look up the thresholds",
            where=str(suites),
            got=(ended.stderr.strip().splitlines() or ["no output"])[-1],
            next_step="run stackcheck in its checkout, or name it with --root",
        )
    return ended.stdout
