"""What a build did, stage by stage, and what sharing saved.

In: the plans, what the builder said of each stage, the images of other stacks. Out: a `StageUse` for each
stage of an image, bytes that are stored once, and one line for all of it.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from stackcheck.image import StageUse, load_image

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from stackcheck.bakefile import Bake
    from stackcheck.buildplan import Plan
    from stackcheck.image import How, Image


def uses(
    plans: Sequence[Plan], bake: Bake, ran: Mapping[tuple[str, str], tuple[int, int]]
) -> dict[str, tuple[StageUse, ...]]:
    """Stack id -> where each stage of its image came from.

    Args:
        plans: The images of this build.
        bake: What was asked of the builder.
        ran: (Target, stage) -> steps that ran, steps that were there (`BakeResult.stages`).
    """
    worked = _worked(bake, ran)
    return {
        plan.stack.id: tuple(
            StageUse(name=stage.name, key=stage.key, how=_how(stage.key, plan, bake, worked))
            for stage in plan.stages
        )
        for plan in plans
    }


def _worked(bake: Bake, ran: Mapping[tuple[str, str], tuple[int, int]]) -> frozenset[str]:
    """The keys of the stages of which a step ran; the builder names each by any target that needs it."""
    keys = {(name, stage.name): stage.key for name, plan in bake.plans.items() for stage in plan.stages}
    keys |= {(name, ""): plan.stages[0].key for name, plan in bake.plans.items() if len(plan.stages) == 1}
    alone = bake.targets[0] if len(bake.targets) == 1 else ""
    return frozenset(
        keys[target or alone, stage]
        for (target, stage), (steps, _cached) in ran.items()
        if steps and (target or alone, stage) in keys
    )


def _how(key: str, plan: Plan, bake: Bake, worked: frozenset[str]) -> How:
    owner = bake.owners.get(key)
    if owner is None:
        return "handed over"
    if owner is not plan:
        return "shared"
    return "built" if key in worked else "cached"


def shared_bytes(image: Image, others: Sequence[Image]) -> int:
    """Unpacked bytes of an image's layers that other images have as well, and that are stored once."""
    known = {layer.digest for other in others for layer in other.layers}
    return sum(layer.size_bytes for layer in image.layers if layer.digest in known)


def stored_bytes(images: Sequence[Image]) -> int:
    """Unpacked bytes that a store needs for all of these images: equal layers are there once."""
    return sum({layer.digest: layer.size_bytes for image in images for layer in image.layers}.values())


def recorded(build_folder: Path, but: Path) -> tuple[Image, ...]:
    """The images of other folders than `but` that were built here and are still there."""
    paths = (path for path in sorted(build_folder.glob("*/image.json")) if path.parent != but)
    return tuple(load_image(path) for path in paths if (path.parent / "oci").is_dir())


def line(images: Sequence[Image]) -> str:
    """One line for a user: stages built, stages reused and why, bytes saved."""
    counted = collections.Counter(
        "kept" if image.reused else use.how for image in images for use in image.stages
    )
    reused = counted.total() - counted["built"]
    whys = {
        "kept": "in images that did not change",
        "cached": "in the engine's cache",
        "shared": "shared within this build",
        "handed over": "from the wheel cache",
    }
    parts = [f"{counted[how]} {why}" for how, why in whys.items() if counted[how]]
    detail = f" ({', '.join(parts)})" if parts else ""
    saved = sum(image.shared_bytes for image in images)
    return (
        f"stages: {counted['built']} built, {reused} reused{detail}; "
        f"{saved / 1e6:.1f} MB saved in layers that stacks share"
    )
