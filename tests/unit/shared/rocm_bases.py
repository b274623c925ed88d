"""Bases and builders of ROCm stacks in a registry: Debian's files under the names of Ubuntu's and AMD's.

In: stacks, a registry. Out: images by the stacks' names, below `hub/`.
"""

import functools
import gzip
import io
import tarfile
import uuid
from collections.abc import Sequence
from pathlib import Path

from rocm_archives import SUITES
from small_images import linux, put_image, quiet, tar_of
from stackcheck.imaging import bootstrap
from stackcheck.matrix import resolve
from stackcheck.matrix.stack import Stack
from stackcheck.oci.documents import sha256
from stackcheck.oci.stores import open_store

ROOT = Path(__file__).resolve().parents[3]
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar+gzip"
LEFT_OUT = (
    "usr/bin/python3",
    "usr/lib/python3",
    "usr/share/python-wheels/",
    "usr/share/perl/",
    *(f"usr/lib/x86_64-linux-gnu/{name}" for name in ("gconv/", "libperl", "perl/")),
)


def push_bases(stacks: Sequence[Stack], registry: str, *, layer: bytes | None = None) -> None:
    """Each base and builder in the registry: Debian's files, or `layer`, under the names of the stacks'."""
    if layer is None:
        (cpu,) = resolve.load_stacks(ROOT, ("cpu-*",))
        assert cpu.base.suite
        made = bootstrap.bootstrap(cpu.base.suite, cpu.base.packages, ROOT / "build" / "bases", report=quiet)
        layer = gzip.compress(_without_python_and_perl(made.path), compresslevel=1, mtime=0)
    # The engine's cache knows a step by its base, not by what apt found: with a base of this run no step of
    # an earlier mirror is taken.
    run = uuid.uuid4().hex
    for system in sorted({stack.os for stack in stacks}):
        number = system.removeprefix("ubuntu")
        release = f"BUILD_ID={run}\nID=ubuntu\nVERSION_ID={number}\nVERSION_CODENAME={SUITES[system]}\n"
        over = gzip.compress(tar_of("usr/lib/os-release", release.encode()), mtime=0)
        of_system = [stack for stack in stacks if stack.os == system]
        names = {one.reference or "" for stack in of_system for one in (stack.base, stack.builder) if one}
        for name in sorted(names):
            short = name if "/" in name else f"library/{name}"
            _push(f"{registry}/hub/{short}", [layer, over])


def _without_python_and_perl(base: Path) -> bytes:
    """A tar without half of its bytes: each of ten images would pack them anew.

    The stacks' interpreters come from the stand-in archive, and dpkg needs perl-base alone.
    """
    kept = io.BytesIO()
    with tarfile.open(base) as whole, tarfile.open(fileobj=kept, mode="w", format=whole.format) as tar:
        for member in whole:
            if not member.name.removeprefix("./").startswith(LEFT_OUT):
                tar.addfile(member, whole.extractfile(member) if member.isreg() else None)
    return kept.getvalue()


def _push(name: str, layers: Sequence[bytes]) -> None:
    target, _, tag = name.rpartition(":")
    config = linux(len(layers), Env=["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"])
    diff_ids = [_diff_id(layer) for layer in layers]
    put_image(open_store(target), config, layers, diff_ids=diff_ids, layer_type=LAYER_TYPE, tag=tag)


@functools.cache
def _diff_id(layer: bytes) -> str:
    """The digest of a layer as a tar; every name has the same large one."""
    return sha256(gzip.decompress(layer))
