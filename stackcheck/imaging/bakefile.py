"""The definition that `docker buildx bake` takes: one target for each distinct stage and each image.

In: plans of images, where wheels come from. Out: a `Bake`, with each target's context, folder of wheels and
secrets on disk. A stage refers to the stages it needs by `target:` contexts, so that the builder sees one
graph for all images: with names alone each image has its own context, and the builder finds equal stages only
after it has hashed the files that they copy.
"""

import dataclasses
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stackcheck.imaging import bootstrap, plans, stages
from stackcheck.imaging.plans import BuildPlan
from stackcheck.imaging.stages import GIVEN, Stage
from stackcheck.imaging.wheels import host_settings
from stackcheck.imaging.wheels.wheel_supply import Supply
from stackcheck.matrix.stack import Stack
from stackcheck.mirrors import Mirrors
from stackcheck.recipe import rocm

PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bake:
    """What to build.

    Attributes:
        owners: Stage key -> the plan whose Dockerfile it is built from; stages of the definition only.
    """

    definition: Mapping[str, Any]  # the bake definition, as JSON takes it
    owners: Mapping[str, BuildPlan]
    plans: Mapping[str, BuildPlan]  # target -> the same plan
    handed_over: Mapping[str, Path]  # stage key -> the folder that a stage's files are written to

    @property
    def targets(self) -> tuple[str, ...]:
        """Every target: one that is only another's context would be stored as an image of its own."""
        return tuple(self.definition["target"])


def stage_target(stage: Stage) -> str:
    """The name of a stage's target."""
    return f"stage-{re.sub(r'[^A-Za-z0-9_-]', '-', stage.name)}-{stage.key[:16]}"


def make(plans: Sequence[BuildPlan], supply: Supply, scratch: Path, *, classic: bool, no_cache: bool) -> Bake:
    """Lay out everything that a build of these plans reads.

    Secrets go to `scratch`, which the caller removes after the build. `classic` is the engine's image store.
    """
    owners: dict[str, BuildPlan] = {}
    made_by: dict[str, BuildPlan] = {}
    taken: dict[str, Path] = {}
    handed_over: dict[str, Path] = {}
    targets: dict[str, Any] = {}
    for plan in plans:
        context = _context(plan, closed=supply.closed)
        for stage in _order(plan, {} if no_cache else supply.handed_over(plan.stages), taken):
            if stage.key in owners:
                continue
            owners[stage.key] = plan
            if stage is plan.stages[-1]:
                name, output = plan.target, _image_output(plan, classic=classic)
            elif stage.hands_over and supply.cache:
                handed_over[stage.key] = scratch / "handed-over" / stage.key
                name, output = stage_target(stage), f"type=local,dest={handed_over[stage.key]}"
            else:
                name, output = stage_target(stage), "type=cacheonly"
            target = _target(plan, stage, context, supply, secrets=scratch / name, taken=taken)
            common = {"target": stage.name, "output": [output], "no-cache": no_cache}
            targets[name] = target | common
            made_by[name] = plan
    group = {"default": {"targets": list(targets)}}
    return Bake(
        definition={"group": group, "target": targets}, owners=owners, plans=made_by, handed_over=handed_over
    )


def _order(plan: BuildPlan, known: Mapping[str, Path], taken: dict[str, Path]) -> tuple[Stage, ...]:
    """The stages to build: the last one, and what it needs that no cache hands over."""
    by_name = {stage.name: stage for stage in plan.stages}
    wanted: dict[str, Stage] = {}

    def want(stage: Stage) -> None:
        if stage.key in known:
            taken[stage.key] = known[stage.key]
            return
        for need in stage.needs:
            if need != GIVEN:
                want(by_name[need])
        wanted[stage.name] = stage

    want(plan.stages[-1])
    return tuple(wanted.values())


def _target(
    plan: BuildPlan, stage: Stage, context: Path, supply: Supply, *, secrets: Path, taken: Mapping[str, Path]
) -> dict[str, Any]:
    """One stage's target, with its wheels and secrets on disk."""
    by_name = {other.name: other for other in plan.stages}
    contexts = {}
    for need in stage.needs:
        if need != GIVEN:
            key = by_name[need].key
            contexts[need] = str(taken[key]) if key in taken else f"target:{stage_target(by_name[need])}"
    contexts |= base_images(plan, supply.upstream.mirrors)
    pip_conf = ""
    if stage.takes_wheels:
        wheels = plan.folder / "wheelhouse" / stage.name
        contexts[GIVEN] = str(wheels)
        pip_conf = supply.lay_out(plan, stage, wheels)
    elif _asks(stage, "pip_conf"):
        pip_conf = supply.pip_conf()
    texts = {
        stages.secret_name("pip_conf", stage.name): pip_conf.encode(),
        "ca": supply.settings.ca.read_bytes() if supply.settings.ca else b"",
        "apt_sources": apt_sources(plan.stack, supply.upstream.mirrors).encode(),
        **(rocm_secrets(plan.stack, supply.upstream.mirrors) if _asks(stage, "rocm_sources") else {}),
    }
    secrets.mkdir(mode=0o700, parents=True)
    for name, text in texts.items():
        (secrets / name).write_bytes(text)
    arguments = {name: os.environ[name] for name in PROXIES if name in os.environ}
    arguments |= mirror_arguments(stage, supply.upstream.mirrors)
    target: dict[str, Any] = {
        "context": str(context),
        "contexts": contexts,
        "args": {"SOURCE_DATE_EPOCH": str(bootstrap.SOURCE_DATE_EPOCH), **arguments},
        # An empty certificate file would hide the one of the base.
        "secret": [f"id={name},src={secrets / name}" for name, text in texts.items() if text],
    }
    if plan.foreign:
        target["platforms"] = [plan.platform]
    return target


def _asks(stage: Stage, secret: str) -> bool:
    return any(f"id={secret}" in line for line in stage.instructions)


def _image_output(plan: BuildPlan, *, classic: bool) -> str:
    if classic:
        return f"type=docker,name={temporary_name(plan)}"
    unfinished = plan.folder / "oci.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    return f"type=oci,dest={unfinished},tar=false,rewrite-timestamp=true,{plans.COMPRESSION}"


def temporary_name(plan: BuildPlan) -> str:
    """What the classic image store calls an image until its layout is written."""
    return f"stackcheck/{plan.stack.id}:unfinished"


def _context(plan: BuildPlan, *, closed: bool) -> Path:
    """The folder that the builder sees: the stack's committed files and the base.

    With a `closed` supply, steps that install wheels have no network. Modes are in layers too, so they are
    those of every host, whatever its umask is: 002 on Ubuntu for members, 077 where it is hardened.
    """
    context = plan.folder / "context"
    shutil.rmtree(context, ignore_errors=True)
    context.mkdir(parents=True)
    for name, data in plan.files.items():
        (context / name).write_bytes(data)
    text = stages.with_own_secret(plan.files["Dockerfile"].decode(), "pip_conf")
    (context / "Dockerfile").write_text(stages.without_network(text) if closed else text, encoding="utf-8")
    for path in (context, *context.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    if plan.rootfs:
        os.link(plan.rootfs.path, context / "rootfs.tar")
    return context


# Each has the public address as its default, as recipe/render wrote it.
_ADDRESS = re.compile(r"ARG (ROCM_ARCHIVE|TORCH_INDEX)=(\S+)")


def base_images(plan: BuildPlan, mirrors: Mirrors) -> Mapping[str, str]:
    """Base image as the Dockerfile names it -> where this site has it; the digest stays the same.

    For every stage: BuildKit also asks for the base of a stage that another one replaces.
    """
    bases = [
        base for base in (plan.stack.base, plan.stack.builder) if base and base.reference and base.digest
    ]
    return {
        f"{base.reference}@{base.digest}": f"docker-image://{own}@{base.digest}"
        for base in bases
        if (own := mirrors.image(str(base.reference))) != base.reference
    }


def mirror_arguments(stage: Stage, mirrors: Mirrors) -> Mapping[str, str]:
    """The addresses that a stage asks for by ARG, where this site has other ones."""
    asked = (_ADDRESS.match(line) for line in stage.instructions)
    public = {found[1]: found[2] for found in asked if found}
    return {name: mirrors.url(address) for name, address in public.items() if mirrors.url(address) != address}


def apt_sources(stack: Stack, mirrors: Mirrors) -> str:
    """Sources of the base's distribution: the mirrors', else the host's own if it has the same one."""
    if stack.os in mirrors.apt:
        return "".join(f"{line}\n" for line in mirrors.apt[stack.os])
    return host_settings.apt_sources(stack.os)


def rocm_secrets(stack: Stack, mirrors: Mirrors) -> Mapping[str, bytes]:
    """AMD's archive and its key, for a base that installs ROCm's packages."""
    source = rocm.source(stack, mirrors)
    line = f"deb [arch=amd64 signed-by={rocm.KEY}] {source.uris[0]} {source.suites[0]} main\n"
    return {"rocm_sources": line.encode(), "rocm_key": Path(str(source.signed_by)).read_bytes()}
