"""What a build gets of this site: mirrors of bases, indexes and archives, and the host's apt sources.

In: a plan, a stage, the mirrors. Out: parts of a bake target. Nothing of it is in an image: bases are taken
by digest from wherever they are, an address is an argument of a stage that is not shipped, or a secret.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from stackcheck.imaging.wheels import host_settings
from stackcheck.recipe import rocm

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stackcheck.imaging.plans import BuildPlan
    from stackcheck.imaging.stages import Stage
    from stackcheck.matrix.stack import Stack
    from stackcheck.mirrors import Mirrors

# Each has the public address as its default, as recipe/render wrote it.
_ADDRESS = re.compile(r"ARG (ROCM_ARCHIVE|TORCH_INDEX)=(\S+)")


def images(plan: BuildPlan, mirrors: Mirrors) -> Mapping[str, str]:
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


def arguments(stage: Stage, mirrors: Mirrors) -> Mapping[str, str]:
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
    """AMD's archive and its key, for a base that installs ROCm's packages.

    Raises:
        ConfigurationError: The key is not on this host.
    """
    source = rocm.source(stack, mirrors)
    line = f"deb [arch=amd64 signed-by={rocm.KEY}] {source.uris[0]} {source.suites[0]} main\n"
    return {"rocm_sources": line.encode(), "rocm_key": Path(str(source.signed_by)).read_bytes()}
