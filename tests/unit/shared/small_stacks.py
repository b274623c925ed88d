"""Stacks of a few megabytes for a real engine: a base that is a shell of this host, and folders for them."""

import contextlib
import dataclasses
import json
import os
import shutil
import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from shell_image import linked
from small_recipe import render_from
from stackcheck.engine import buildx
from stackcheck.engine.client import Engine
from stackcheck.files.digest import sha256_of
from stackcheck.imaging import bootstrap, build
from stackcheck.matrix import resolve

ROOT = Path(__file__).resolve().parents[3]
ASSETS = ROOT / "tests" / "integration" / "assets"


def silent(_line: str) -> None:
    pass


@contextlib.contextmanager
def built_images(
    engine: Engine, form: str, names: Iterable[str], context: Path, **arguments: str
) -> Iterator[Callable[[str], str]]:
    """Build the named targets of a Dockerfile at once; what makes the reference of each, by `form`."""
    targets = {
        name: {"context": str(context), "target": name, "args": arguments, "tags": [form.format(name)]}
        for name in names
    }
    buildx.bake({"target": targets}, list(targets), report=silent)
    yield form.format
    for name in targets:
        engine.remove(form.format(name))


PROGRAMS = ["bash", "cat", "cp", "date", "df", "grep", "id", "ls", "rm", "sleep", "tail", "touch", "true"]


def archive_shell(folder: Path, stack: resolve.Stack) -> Path:
    """Make the stack's base in a folder of bases: a few megabytes with a shell of this host."""
    found = {path for name in PROGRAMS if (path := shutil.which(name))}
    found |= {library for program in found for library in linked(program)}
    assert stack.base.suite
    tar = folder / f"{bootstrap.key(stack.base.suite, stack.base.packages)}.tar"
    with tarfile.open(tar, "w") as archived:
        for directory in ("etc", "tmp", "proc", "sys", "dev"):
            header = tarfile.TarInfo(directory)
            header.type, header.mode = tarfile.DIRTYPE, 0o1777 if directory == "tmp" else 0o755
            archived.addfile(header)
        for path in sorted(found):
            header = archived.gettarinfo(os.path.realpath(path), arcname=path.removeprefix("/"))
            header.mtime = 0
            with Path(path).open("rb") as file:
                archived.addfile(header, file)
        for name in ("bash", "sh", "true"):
            header = tarfile.TarInfo(f"bin/{name}")
            real = shutil.which("bash" if name == "sh" else name) or ""
            header.type, header.linkname = tarfile.SYMTYPE, real
            if real != f"/bin/{name}":
                archived.addfile(header)
    tar.with_suffix(".json").write_text(json.dumps({"digest": "sha256:" + sha256_of(tar), "packages": {}}))
    return folder


def make_checkout(folder: Path, bases: Path) -> Path:
    """A checkout for small stacks, with a folder of bases."""
    (folder / "build").mkdir()
    (folder / "build" / "bases").symlink_to(bases)
    return folder


def small_stack(checkout: Path, dockerfile: str, cpu_stack: resolve.Stack, lock: str = "") -> resolve.Stack:
    stack = dataclasses.replace(cpu_stack, id=f"small-{checkout.name}".lower()[:60].strip("_-"))
    folder = render_from((ASSETS / f"{dockerfile}.Dockerfile").read_text(), stack, checkout)
    (folder / "requirements.lock").write_text(lock)
    return stack


def build_one(stack: resolve.Stack, engine: Engine, checkout: Path, **chosen: Any) -> build.Image:
    options = build.Options(**chosen)
    (image,) = build.build((stack,), engine, root=checkout, report=silent, options=options)
    return image
