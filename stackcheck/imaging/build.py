"""Stacks -> images: one bake definition, one OCI layout for each stack, and `image.json`, which describes it.

In: resolved stacks with their generated files, an engine. Out: `build/<stack-id>/oci` with exactly one
manifest, the same image in the engine, and an `Image` that names which stages ran and what sharing saved. An
image whose inputs did not change is kept.
"""

import collections
import dataclasses
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from stackcheck.engine import buildx
from stackcheck.engine.client import Engine
from stackcheck.errors import BuildError, EngineError
from stackcheck.imaging import bakefile
from stackcheck.imaging.bakefile import Bake
from stackcheck.imaging.image import How, Image, StageUse, describe, load_image, save_image, size_report
from stackcheck.imaging.plans import BuildPlan, make_plan
from stackcheck.imaging.wheels import host_settings, wheel_supply
from stackcheck.imaging.wheels.wheel_cache import WheelCache
from stackcheck.matrix.stack import Stack
from stackcheck.mirrors import NO_MIRRORS, Mirrors
from stackcheck.oci.image_layout import ImageLayout
from stackcheck.oci.tags import local_name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What a user can choose about a build.

    Attributes:
        wheelhouse: The only folder that wheels come from; no index is asked. None: wheels come from where the
            host's pip is configured to look.
        wheel_cache: A folder that keeps downloaded and built wheels, by hash; None to keep nothing.
    """

    wheelhouse: Path | None = None
    wheel_cache: Path | None = None
    platform: str | None = None  # `linux/amd64` or `linux/arm64`; None for this host's own
    no_cache: bool = False  # build every step again, to show that the result is the same
    mirrors: Mirrors = NO_MIRRORS  # what this site has in place of public hosts


DEFAULTS = Options()


def build(
    stacks: Sequence[Stack],
    engine: Engine,
    *,
    root: Path,
    report: Callable[[str], None],
    options: Options = DEFAULTS,
) -> tuple[Image, ...]:
    """Make the images of stacks, or keep those whose inputs did not change.

    Raises:
        BuildError: A stack cannot be built here, a step failed, or an image is over its size budget.
    """
    if options.wheelhouse:
        # First: a wrong folder is refused even if no image has to be built.
        host_settings.only(options.wheelhouse)
    plans = [
        make_plan(stack, engine.description, root, report, platform=options.platform, mirrors=options.mirrors)
        for stack in stacks
    ]
    for plan in plans:
        plan.folder.mkdir(parents=True, exist_ok=True)
    kept = {p.stack.id: image for p in plans if not options.no_cache and (image := _kept(p, engine, report))}
    missing = [plan for plan in plans if plan.stack.id not in kept]
    made = _bake(missing, engine, report, options) if missing else {}
    images = tuple((kept | made)[stack.id] for stack in stacks)
    report(summary(images))
    return images


def adopt(reference: str, engine: Engine, *, folder: Path, report: Callable[[str], None]) -> Image:
    """Make any image ready for tests: pull it if the engine does not have it, and write it as a layout.

    A tag may move at any moment: what it names is read once, and all that follows is by that id.

    Raises:
        EngineError: No registry has it, or the engine saved an image of another id.
    """
    start = time.monotonic()
    fixed = bring(reference, engine, report)
    report(f"{reference}: writing its layout")
    engine.save(fixed, folder / "oci")
    image = describe(
        folder / "oci",
        sizes=engine.step_sizes(fixed),
        stack_id=None,
        reference=fixed,
        seconds=time.monotonic() - start,
        key="",
        inputs={},
    )
    save_image(image, folder / "image.json")
    report(f"{reference}: it is {image.manifest_digest}; what follows is about this digest, not the tag")
    return image


def bring(reference: str, engine: Engine, report: Callable[[str], None]) -> str:
    """Pull an image if the engine does not have it.

    Returns:
        The engine's id of the image.

    Raises:
        EngineError: No registry has it, or it is for a different processor than the engine's.
    """
    if not engine.has(reference):
        report(f"{reference}: pulling")
        engine.pull(reference)
    found, of_host = engine.inspect(reference), engine.architecture
    if found.architecture != of_host:
        raise EngineError(
            "the image is for a different processor",
            where=reference,
            got=found.architecture or "an image that does not say for which",
            expected=of_host,
            next_step=f"docker pull --platform linux/{of_host} {reference}, or use a host with its processor",
        )
    return found.id


def _kept(plan: BuildPlan, engine: Engine, report: Callable[[str], None]) -> Image | None:
    """The earlier image, if it still exists and nothing that decides it has changed."""
    path = plan.folder / "image.json"
    if not path.exists():
        return None
    image = load_image(path)
    if image.key != plan.key or not ImageLayout(image.layout).blob_path(image.manifest_digest).exists():
        return None
    if not engine.has(image.reference):
        report(f"{plan.stack.id}: loading the layout again: the engine no longer has the image")
        engine.load(image.layout, image.reference)
    report(f"{plan.stack.id}: not built again: same Dockerfile, lock, base and engine")
    return dataclasses.replace(image, reused=True)


def _bake(
    plans: Sequence[BuildPlan], engine: Engine, report: Callable[[str], None], options: Options
) -> dict[str, Image]:
    cache = WheelCache(options.wheel_cache) if options.wheel_cache else None
    supply = wheel_supply.prepare(
        plans, wheelhouse_only=options.wheelhouse, cache=cache, report=report, mirrors=options.mirrors
    )
    _check_platforms(plans)
    if not engine.containerd_store:
        report("the engine has the classic image store: layers and manifest come from `docker save`")
    if not engine.repeats_builds:
        report(
            f"{engine.description} keeps the time of the build in layers: the digest is another in each build"
        )
    with tempfile.TemporaryDirectory(prefix="stackcheck-secrets-") as scratch:
        bake = bakefile.make(
            plans, supply, Path(scratch), classic=not engine.containerd_store, no_cache=options.no_cache
        )
        log = plans[0].folder / "build.log"
        label = plans[0].stack.id if len(plans) == 1 else f"{len(plans)} stacks"
        done = engine.bake(
            bake.definition, bake.targets, report=lambda line: report(f"{label}: {line}"), log=log
        )
        for key, output in bake.handed_over.items():
            if cache:
                cache.keep(key, output)
    report(f"{label}: {done.steps} steps, {done.cached} of them reused, {done.seconds:.1f} s")
    used = uses(plans, bake, done.stages)
    return {plan.stack.id: _finish(plan, engine, report, done.seconds, used[plan.stack.id]) for plan in plans}


def _check_platforms(plans: Sequence[BuildPlan]) -> None:
    """Refuse before the first step if this builder cannot run a platform's programs."""
    wanted = {plan.platform for plan in plans if plan.foreign}
    if not wanted:
        return
    known = buildx.platforms()
    for platform in sorted(wanted - set(known)):
        raise BuildError(
            "the builder cannot run this platform's programs",
            got=platform,
            expected=f"one of {', '.join(known)}",
            next_step=f"docker run --privileged --rm tonistiigi/binfmt --install {platform.split('/')[1]}, "
            f"or build on a machine of {platform}",
        )


def _finish(
    plan: BuildPlan,
    engine: Engine,
    report: Callable[[str], None],
    seconds: float,
    stages: tuple[StageUse, ...],
) -> Image:
    """Move the finished layout into place, load it, and describe it in `image.json`."""
    start = time.monotonic()
    layout = plan.folder / "oci"
    if engine.containerd_store:
        unfinished = ImageLayout(plan.folder / "oci.unfinished")
        unfinished.keep_only(unfinished.image().digest)
        unfinished.annotate()
        unfinished.move_to(layout)
    else:
        engine.save(bakefile.temporary_name(plan), layout)
        engine.remove(bakefile.temporary_name(plan))
        ImageLayout(layout).annotate()
    built = ImageLayout(layout)
    _check_architecture(plan, built.config())
    reference = local_name(plan.stack.id, built.blobs()[1].digest)
    report(f"{plan.stack.id}: loading {reference}")
    engine.load(layout, reference)
    image = describe(
        layout,
        sizes=engine.step_sizes(reference),
        stack_id=plan.stack.id,
        reference=reference,
        seconds=seconds + time.monotonic() - start,
        key=plan.key,
        inputs=plan.inputs,
    )
    others = recorded(plan.folder.parent, plan.folder)
    shared = shared_bytes(image, others)
    image = dataclasses.replace(
        image,
        engine=plan.engine,
        stages=stages,
        shared_bytes=shared,
        base_from=plan.rootfs.way if plan.rootfs else "",
    )
    _check_size(image, plan.stack.size_budget_bytes)
    save_image(image, plan.folder / "image.json")
    report(f"{plan.stack.id}: {image.size_bytes / 1e9:.2f} GB in {len(image.layers)} layers")
    return image


def _check_architecture(plan: BuildPlan, config: Mapping[str, object]) -> None:
    """BuildKit accepts a base image of one architecture for any platform, without a warning."""
    if config.get("architecture", "") != plan.platform.partition("/")[2]:
        raise BuildError(
            "the image is for the wrong platform",
            where=plan.stack.id,
            got=f"{config.get('os')}/{config.get('architecture')}",
            expected=plan.platform,
            next_step="name a base image in matrix.yaml that is published for this platform",
        )


def _check_size(image: Image, budget_bytes: int) -> None:
    if image.size_bytes > budget_bytes:
        raise BuildError(
            "the image is over its size budget",
            where=image.stack_id,
            got=f"{image.size_bytes / 1e9:.2f} GB unpacked:\n    "
            + "\n    ".join(size_report(image, budget_bytes)),
            expected=f"at most {budget_bytes / 1e9:.2f} GB (size_budget_gb in matrix.yaml)",
            next_step="make the largest layer smaller, or raise size_budget_gb in matrix.yaml",
        )


def recorded(build_folder: Path, but: Path) -> tuple[Image, ...]:
    """The images that were built here and still exist, except the one in the folder `but`."""
    paths = (path for path in sorted(build_folder.glob("*/image.json")) if path.parent != but)
    return tuple(load_image(path) for path in paths if (path.parent / "oci").is_dir())


def shared_bytes(image: Image, others: Sequence[Image]) -> int:
    """Unpacked bytes of the layers that other images also have: they are stored once."""
    known = {layer.digest for other in others for layer in other.layers}
    return sum(layer.size_bytes for layer in image.layers if layer.digest in known)


def uses(
    plans: Sequence[BuildPlan], bake: Bake, ran: Mapping[tuple[str, str], tuple[int, int]]
) -> dict[str, tuple[StageUse, ...]]:
    """Stack id -> where each stage of its image came from."""
    # The keys of the stages in which a step ran; the builder may name any target that needs the stage
    keys = {(name, stage.name): stage.key for name, plan in bake.plans.items() for stage in plan.stages}
    keys |= {(name, ""): plan.stages[0].key for name, plan in bake.plans.items() if len(plan.stages) == 1}
    alone = bake.targets[0] if len(bake.targets) == 1 else ""
    worked = frozenset(
        keys[target or alone, stage]
        for (target, stage), (steps, _cached) in ran.items()
        if steps and (target or alone, stage) in keys
    )
    return {
        plan.stack.id: tuple(
            StageUse(name=stage.name, key=stage.key, how=_how(stage.key, plan, bake, worked))
            for stage in plan.stages
        )
        for plan in plans
    }


def _how(key: str, plan: BuildPlan, bake: Bake, worked: frozenset[str]) -> How:
    owner = bake.owners.get(key)
    if owner is None:
        return "handed over"
    if owner is not plan:
        return "shared"
    return "built" if key in worked else "cached"


def summary(images: Sequence[Image]) -> str:
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
