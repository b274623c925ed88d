"""The stages of the templates, built by `docker buildx` alone, for a stack that has an extension.

In: the stack `cpu`, turned into one that has an extension, and locked and rendered as any stack is. Out: the
files of one stage, or of a proof that runs in what the final stage holds.
"""

import dataclasses
import os
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from stackcheck.engine import buildx, host_setup
from stackcheck.files import requirements
from stackcheck.imaging import bootstrap
from stackcheck.imaging.wheels import host_settings, wheelhouse
from stackcheck.matrix import resolve
from stackcheck.matrix.stack import Package, Stack
from stackcheck.recipe import lock, render
from stackcheck.recipe.upstream import Upstream

ROOT = Path(__file__).resolve().parents[3]
IMAGES = ROOT / "images"
CPU = resolve.load_stacks(ROOT, ("cpu-*",))[0]


def silent(_line: str) -> None:
    pass


def with_extension(**changes: object) -> Stack:
    """The stack `cpu` with the fewest packages, and one extension."""
    return dataclasses.replace(
        CPU,
        runtime="rocm",
        vendor="amd",
        runtime_version="7.14.1",
        layout="amdrocm",
        archs=("gfx942",),
        triton=Package(name="triton", version="3.7.1"),
        requirements=("torch==2.13.0+cpu", "numpy==2.4.6", "triton==3.7.1"),
        missing=(),
        **changes,
    )


def prepare(stack: Stack, folder: Path, upstream: Upstream | None = None) -> Path:
    """Lock and render a stack as `stackcheck lock` and `render` do; its folder, with the base in it."""
    context = folder / stack.id
    context.mkdir()
    done = lock.lock(stack, folder, upstream)
    assert done.missing == ()
    for name, text in render.render(stack, IMAGES).items():
        (context / name).write_text(text)
    assert stack.base.suite
    bases = ROOT / "build" / "bases"
    made = bootstrap.bootstrap(stack.base.suite, stack.base.packages, bases, report=silent)
    os.link(made.path, context / "rootfs.tar")
    return context


def build(
    context: Path,
    target: str,
    out: Path,
    proof: str = "",
    *,
    extra: Path | None = None,
    contexts: Mapping[str, Path] = MappingProxyType({}),
    again: Sequence[str] = (),
) -> Path:
    """Build a target of a folder's Dockerfile, with `proof` after it; the target's files.

    Args:
        extra: A wheel or archive that lies in the wheelhouse too.
        contexts: More named contexts.
        again: Stages that are built again although they are cached.
    """
    host_setup.ensure_engine(silent)
    scratch = context.parent
    settings = host_settings.host_settings()
    wanted = [
        found
        for path in sorted(context.glob("*.lock"))
        for found in requirements.read_packages(path.read_text())
    ]
    named = wheelhouse.look(wanted, settings, {}).lay_out(scratch / "wheels")
    if extra:
        shutil.copy(extra, scratch / "wheels")
    (scratch / "pip.conf").write_text(settings.pip_conf(wheelhouse=bool(named)))
    (scratch / "sources").write_text(host_settings.apt_sources(CPU.os))
    secrets = {"pip_conf": scratch / "pip.conf", "apt_sources": scratch / "sources"}
    secrets |= {"ca": settings.ca} if settings.ca else {}
    with (context / "Dockerfile").open("a") as file:
        file.write(proof)
    named_contexts = {"wheelhouse": scratch / "wheels", **contexts}
    definition = {
        "context": str(context),
        "target": target,
        "args": {"SOURCE_DATE_EPOCH": str(bootstrap.SOURCE_DATE_EPOCH)},
        "contexts": {name: str(path) for name, path in named_contexts.items()},
        "secret": [f"id={name},src={path}" for name, path in secrets.items()],
        "no-cache-filter": list(again),
        "output": [f"type=local,dest={out}"],
    }
    buildx.bake({"target": {"proof": definition}}, ["proof"], report=silent)
    return out


def offer(folder: Path, name: str, needs: str, version: str = "9.9", tag: str = "py3-none-any") -> Path:
    """A wheel that holds nothing but its metadata."""
    info = f"{name.replace('-', '_')}-{version.partition('+')[0]}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version.partition('+')[0]}\n"
    metadata += f"Requires-Dist: {needs}\n" if needs else ""
    path = folder / f"{name.replace('-', '_')}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        archive.writestr(f"{info}/RECORD", f"{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return path
