"""Stacks -> images: a bake definition, one OCI layout a stack, and `image.json` that says what it is.

In: resolved stacks with their rendered files, an engine. Out: `build/<stack-id>/oci` with exactly one
manifest, the same image in the engine, and an `Image`. An image whose inputs did not change
is kept.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stackcheck import archive, bootstrap, wheelhouse, wheels
from stackcheck.buildplan import COMPRESSION, Plan, digest_of, make_plan
from stackcheck.errors import BuildError
from stackcheck.image import Image, describe, load_image, save_image, size_report
from stackcheck.lockfile import exclusive

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stackcheck.engine import Engine
    from stackcheck.predicates import Provenance
    from stackcheck.stack import Stack

__all__ = ["Image", "adopt", "build", "exclusive", "load_image", "provenance"]

PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


def build(
    stacks: Sequence[Stack],
    engine: Engine,
    *,
    root: Path,
    report: Callable[[str], None],
    wheel_folders: Sequence[Path] = (),
    no_cache: bool = False,
) -> tuple[Image, ...]:
    """Make the images of stacks, or keep those whose inputs did not change.

    Args:
        stacks: In this order they come back.
        engine: Builds, and then holds, the images.
        root: The checkout.
        report: Gets a line a step.
        wheel_folders: Folders of wheels to look in first, for machines without an index.
        no_cache: Build every step again, as a proof that the same comes out.

    Raises:
        BuildError: A stack cannot be built here, a step failed, or an image is over its size budget.
    """
    plans = [make_plan(stack, engine, root, report) for stack in stacks]
    for plan in plans:
        plan.folder.mkdir(parents=True, exist_ok=True)
    kept = {p.stack.id: image for p in plans if not no_cache and (image := _kept(p, engine, report))}
    missing = [plan for plan in plans if plan.stack.id not in kept]
    made = _bake(missing, engine, report, wheel_folders, no_cache=no_cache) if missing else {}
    return tuple((kept | made)[stack.id] for stack in stacks)


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
    plans: Sequence[Plan],
    engine: Engine,
    report: Callable[[str], None],
    wheel_folders: Sequence[Path],
    *,
    no_cache: bool,
) -> dict[str, Image]:
    settings = wheels.host_settings(wheel_folders)
    if not engine.containerd_store:
        report("the engine has the classic image store: layers and manifest come from `docker save`")
    with tempfile.TemporaryDirectory(prefix="stackcheck-secrets-") as scratch:
        targets = {
            plan.target: _target(plan, engine, settings, Path(scratch) / plan.target) | {"no-cache": no_cache}
            for plan in plans
        }
        definition = {"group": {"default": {"targets": list(targets)}}, "target": targets}
        log = plans[0].folder / "build.log"
        label = plans[0].stack.id if len(plans) == 1 else f"{len(plans)} stacks"
        done = engine.bake(definition, list(targets), report=lambda line: report(f"{label}: {line}"), log=log)
    report(f"{label}: {done.steps} steps, {done.cached} of them reused, {done.seconds:.1f} s")
    return {plan.stack.id: _finish(plan, engine, report, done.seconds) for plan in plans}


def _target(plan: Plan, engine: Engine, settings: wheels.HostSettings, secrets: Path) -> dict[str, Any]:
    """One target of the bake definition, with its context, wheels and secrets on disk."""
    context = _context(plan)
    lock = context / "requirements.lock"
    house = plan.folder / "wheelhouse"
    found = wheelhouse.gather(lock.read_text(encoding="utf-8") if lock.exists() else "", settings, house)
    texts = {
        "pip_conf": settings.pip_conf(wheelhouse=bool(found)).encode(),
        "ca": settings.ca.read_bytes() if settings.ca else b"",
        "apt_sources": wheels.apt_sources(plan.stack.os).encode(),
    }
    secrets.mkdir(mode=0o700, parents=True)
    for name, text in texts.items():
        (secrets / name).write_bytes(text)
    arguments = {name: os.environ[name] for name in PROXIES if name in os.environ}
    return {
        "context": str(context),
        "contexts": {"wheelhouse": str(house)},
        "args": {"SOURCE_DATE_EPOCH": str(bootstrap.SOURCE_DATE_EPOCH), **arguments},
        # An empty certificate file would hide the base's own.
        "secret": [f"id={name},src={secrets / name}" for name, text in texts.items() if text],
        "output": [_output(plan, engine)],
    }


def _output(plan: Plan, engine: Engine) -> str:
    if not engine.containerd_store:
        return f"type=docker,name={_temporary_name(plan)}"
    unfinished = plan.folder / "oci.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    return f"type=oci,dest={unfinished},tar=false,rewrite-timestamp=true,{COMPRESSION}"


def _temporary_name(plan: Plan) -> str:
    return f"stackcheck/{plan.stack.id}:unfinished"


def _context(plan: Plan) -> Path:
    """The folder that the builder sees: the stack's committed files and the base."""
    context = plan.folder / "context"
    shutil.rmtree(context, ignore_errors=True)
    context.mkdir(parents=True)
    for path in sorted(plan.source.iterdir()):
        if path.is_file() and path.name != "rootfs.tar":
            shutil.copy(path, context / path.name)
    if plan.rootfs:
        os.link(plan.rootfs.path, context / "rootfs.tar")
    return context


def _finish(plan: Plan, engine: Engine, report: Callable[[str], None], seconds: float) -> Image:
    """Put the finished layout in its place, load it, and write down what it is."""
    start = time.monotonic()
    layout = plan.folder / "oci"
    if engine.containerd_store:
        unfinished = plan.folder / "oci.unfinished"
        archive.keep_only(unfinished, archive.manifest_digest(unfinished))
        archive.replace(unfinished, layout)
    else:
        engine.save(_temporary_name(plan), layout)
        engine.remove(_temporary_name(plan))
    config = archive.read_json(layout, archive.manifest_digest(layout))["config"]["digest"]
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
    _check_size(image, plan.stack.size_budget_bytes)
    save_image(image, plan.folder / "image.json")
    report(f"{plan.stack.id}: {image.size_bytes / 1e9:.2f} GB in {len(image.layers)} layers")
    return image


def _check_size(image: Image, budget_bytes: int) -> None:
    if image.size_bytes > budget_bytes:
        raise BuildError(
            "an image is over its size budget",
            where=image.stack_id,
            got=f"{image.size_bytes / 1e9:.2f} GB unpacked:\n    " + "\n    ".join(size_report(image)),
            expected=f"at most {budget_bytes / 1e9:.2f} GB (size_budget_gb in matrix.yaml)",
            next_step="make the largest layer smaller, or raise the budget",
        )
