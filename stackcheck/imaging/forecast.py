"""What a build would do: for `--dry-run`.

In: stacks and the options of a build. Out: a `Forecast` for each stack, with its stages, their keys and where
each would come from. Nothing is made or downloaded, and the engine is not asked.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from stackcheck.errors import StackcheckError
from stackcheck.imaging import build, plans
from stackcheck.imaging.build import Options
from stackcheck.imaging.image import load_image
from stackcheck.imaging.plans import BuildPlan
from stackcheck.imaging.wheels import host_settings, wheel_supply
from stackcheck.imaging.wheels.wheel_cache import WheelCache
from stackcheck.matrix.stack import Stack
from stackcheck.oci.image_layout import ImageLayout

State = Literal["keep", "build", "refuse"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageForecast:
    """One stage: its key, None where the base is not made yet, and where it would come from."""

    name: str
    key: str | None
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
    """One stack."""

    stack_id: str
    state: State
    reason: str  # why it would be kept or refused, in one sentence
    stages: tuple[StageForecast, ...] = ()
    error: StackcheckError | None = None  # the error that a build would end with


def forecast(stacks: Sequence[Stack], root: Path, options: Options) -> Iterator[Forecast]:
    """What a build would do with each stack.

    Raises:
        ConfigurationError: The wheelhouse does not exist.
    """
    if options.wheelhouse:
        host_settings.only(options.wheelhouse)
    here = build.recorded(root / "build", root)
    built = {use.key: image.stack_id or "" for image in here for use in image.stages}
    first: dict[str, str] = {}
    for stack in stacks:
        try:
            yield _one(stack, root, options, built, first)
        except StackcheckError as error:
            yield Forecast(stack_id=stack.id, state="refuse", reason=error.what, error=error)


def _one(
    stack: Stack, root: Path, options: Options, built: Mapping[str, str], first: dict[str, str]
) -> Forecast:
    plan = plans.make_plan(stack, "", root, platform=options.platform, mirrors=options.mirrors)
    path = plan.folder / "image.json"
    image = load_image(path) if path.exists() else None
    if image:  # assume the recorded engine: a dry run does not ask it
        plan = plans.make_plan(stack, image.engine, root, platform=options.platform, mirrors=options.mirrors)
    if not plan.key:
        return Forecast(
            stack_id=stack.id, state="build", reason="its base is not made yet, so no key is known"
        )
    whole = image and ImageLayout(image.layout).blob_path(image.manifest_digest).exists()
    if image and whole and image.key == plan.key and not options.no_cache:
        return Forecast(
            stack_id=stack.id,
            state="keep",
            reason=f"nothing changed, as long as the engine is {image.engine}",
        )
    if options.wheelhouse:
        wheel_supply.check_folder(plan, options.wheelhouse)
    stages = tuple(_stages(plan, options, built, first))
    return Forecast(stack_id=stack.id, state="build", reason="", stages=stages)


def _stages(
    plan: BuildPlan, options: Options, built: Mapping[str, str], first: dict[str, str]
) -> Iterator[StageForecast]:
    cache = WheelCache(options.wheel_cache) if options.wheel_cache else None
    for stage in plan.stages:
        if stage.key in first:
            source = f"shared with {first[stage.key]}"
        elif options.no_cache:
            source = "built"
        elif cache and stage.hands_over and cache.has(stage.key):
            source = "handed over by the wheel cache"
        elif stage.key in built:
            source = f"reused as in {built[stage.key]}, if the engine still has it"
        else:
            source = "built"
        first.setdefault(stage.key, plan.stack.id)
        yield StageForecast(name=stage.name, key=stage.key, source=source)
