"""Stacks -> images: a bake definition, one OCI layout a stack, and `image.json` that says what it is.

In: resolved stacks with their rendered files, an engine. Out: `build/<stack-id>/oci` with exactly one
manifest, the same image in the engine, and an `Image`. An image whose inputs did not change
is kept.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from stackcheck import archive, bakefile, buildreport, buildx, wheels, wheelsupply
from stackcheck.buildplan import Plan, digest_of, make_plan
from stackcheck.errors import BuildError
from stackcheck.image import Image, StageUse, describe, load_image, save_image, size_report
from stackcheck.lockfile import exclusive
from stackcheck.wheelcache import WheelCache

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from stackcheck.engine import Engine
    from stackcheck.predicates import Provenance
    from stackcheck.stack import Stack

__all__ = ["Image", "Options", "adopt", "build", "exclusive", "load_image", "provenance"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What a user can choose of a build.

    Attributes:
        wheelhouse: The only folder that wheels come from; no index is asked. None: as the host's pip is set.
        wheel_cache: A folder that keeps what was downloaded or built, by hash; None for none.
        platform: `linux/amd64` or `linux/arm64`; None for this host's own.
        no_cache: Build every step again, as a proof that the same comes out.
    """

    wheelhouse: Path | None = None
    wheel_cache: Path | None = None
    platform: str | None = None
    no_cache: bool = False


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

    Args:
        stacks: In this order they come back.
        engine: Builds, and then holds, the images.
        root: The checkout.
        report: Gets a line a step, and at the end what was built, reused and saved.
        options: What the user chose.

    Raises:
        BuildError: A stack cannot be built here, a step failed, or an image is over its size budget.
        ConfigurationError: There is no such wheelhouse.
    """
    if options.wheelhouse:
        wheels.only(options.wheelhouse)  # before an image is kept: what is named wrongly is never passed over
    plans = [
        make_plan(stack, engine.description, root, report, platform=options.platform) for stack in stacks
    ]
    for plan in plans:
        plan.folder.mkdir(parents=True, exist_ok=True)
    kept = {p.stack.id: image for p in plans if not options.no_cache and (image := _kept(p, engine, report))}
    missing = [plan for plan in plans if plan.stack.id not in kept]
    made = _bake(missing, engine, report, options) if missing else {}
    images = tuple((kept | made)[stack.id] for stack in stacks)
    report(buildreport.line(images))
    return images


def adopt(reference: str, engine: Engine, *, folder: Path, report: Callable[[str], None]) -> Image:
    """Any image as a subject of tests: fetched when the engine lacks it, and written as a layout."""
    start = time.monotonic()
    if not engine.has(reference):
        report(f"{reference}: pulling")
        engine.pull(reference)
    report(f"{reference}: writing its layout")
    engine.save(reference, folder / "oci")
    fixed = engine.inspect(reference).id  # a tag may move between the test and the verdict
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
    return image


def provenance(stack: Stack, image: Image, *, root: Path) -> Provenance:
    """How an image came to be: the cell that was asked for, and the digest of each thing that went in."""
    from stackcheck.predicates import Provenance

    matrix = root / "matrix.yaml"
    dependencies = dict(image.inputs)
    if matrix.exists():
        dependencies["file:matrix.yaml"] = digest_of(matrix.read_bytes())
    finished = dt.datetime.fromisoformat(image.built) if image.built else None
    return Provenance(
        parameters={"stack": stack.id, "torch": stack.torch, "python": stack.python, "os": stack.os},
        dependencies=dependencies,
        started=finished - dt.timedelta(seconds=image.seconds) if finished else None,
        finished=finished,
    )


def _kept(plan: Plan, engine: Engine, report: Callable[[str], None]) -> Image | None:
    """The earlier image, when nothing that decides it changed and it is still there."""
    path = plan.folder / "image.json"
    if not path.exists():
        return None
    image = load_image(path)
    if image.key != plan.key or not archive.blob(image.layout, image.manifest_digest).exists():
        return None
    if not engine.has(image.reference):
        report(f"{plan.stack.id}: loading the layout again, as the engine lost the image")
        engine.load(image.layout, image.reference)
    report(f"{plan.stack.id}: not built again: same Dockerfile, lock, base and engine")
    return dataclasses.replace(image, reused=True)


def _bake(
    plans: Sequence[Plan], engine: Engine, report: Callable[[str], None], options: Options
) -> dict[str, Image]:
    cache = WheelCache(options.wheel_cache) if options.wheel_cache else None
    supply = wheelsupply.prepare(plans, wheelhouse_only=options.wheelhouse, cache=cache, report=report)
    _check_platforms(plans)
    if not engine.containerd_store:
        report("the engine has the classic image store: layers and manifest come from `docker save`")
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
    used = buildreport.uses(plans, bake, done.stages)
    return {plan.stack.id: _finish(plan, engine, report, done.seconds, used[plan.stack.id]) for plan in plans}


def _check_platforms(plans: Sequence[Plan]) -> None:
    """Say before the first step that this builder cannot run a platform's programs."""
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
    plan: Plan,
    engine: Engine,
    report: Callable[[str], None],
    seconds: float,
    stages: tuple[StageUse, ...],
) -> Image:
    """Put the finished layout in its place, load it, and write down what it is."""
    start = time.monotonic()
    layout = plan.folder / "oci"
    if engine.containerd_store:
        unfinished = plan.folder / "oci.unfinished"
        archive.keep_only(unfinished, archive.manifest_digest(unfinished))
        archive.annotate(unfinished)
        archive.replace(unfinished, layout)
    else:
        engine.save(bakefile.temporary_name(plan), layout)
        engine.remove(bakefile.temporary_name(plan))
        archive.annotate(layout)
    config = archive.read_json(layout, archive.manifest_digest(layout))["config"]["digest"]
    _check_architecture(plan, archive.read_json(layout, config))
    reference = f"stackcheck/{plan.stack.id}:{config.removeprefix('sha256:')[:12]}"
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
    others = buildreport.recorded(plan.folder.parent, plan.folder)
    shared = buildreport.shared_bytes(image, others)
    image = dataclasses.replace(image, engine=plan.engine, stages=stages, shared_bytes=shared)
    _check_size(image, plan.stack.size_budget_bytes)
    save_image(image, plan.folder / "image.json")
    report(f"{plan.stack.id}: {image.size_bytes / 1e9:.2f} GB in {len(image.layers)} layers")
    return image


def _check_architecture(plan: Plan, config: Mapping[str, object]) -> None:
    """A base image of one architecture is taken for any platform without a word."""
    if config.get("architecture", "") != plan.platform.partition("/")[2]:
        raise BuildError(
            "an image is of another platform than was asked for",
            where=plan.stack.id,
            got=f"{config.get('os')}/{config.get('architecture')}",
            expected=plan.platform,
            next_step="take a base image that is published for this platform",
        )


def _check_size(image: Image, budget_bytes: int) -> None:
    if image.size_bytes > budget_bytes:
        raise BuildError(
            "an image is over its size budget",
            where=image.stack_id,
            got=f"{image.size_bytes / 1e9:.2f} GB unpacked:\n    "
            + "\n    ".join(size_report(image, budget_bytes)),
            expected=f"at most {budget_bytes / 1e9:.2f} GB (size_budget_gb in matrix.yaml)",
            next_step="make the largest layer smaller, or raise the budget",
        )
