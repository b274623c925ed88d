"""The stack: one resolved cell of the matrix, the noun that the rest of the tool works on.

In: nothing; resolve.py makes stacks. Out: frozen dataclasses, and what follows from a stack alone. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from stackcheck.matrix.known_issues import KnownIssue
    from stackcheck.matrix.matrix import Runtime, TestTarget
    from stackcheck.vendors import Vendor

STACK_LABEL = "stackcheck.stack"  # the image label that names the stack
TORCH_INDEX = "https://download.pytorch.org/whl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Package:
    """A package and its exact version."""

    name: str
    version: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replacement:
    """A package that torch pins, at another version that the matrix chose."""

    name: str
    version: str
    instead_of: str  # the version that torch pins

    @property
    def pin(self) -> str:
        """The requirement for pip."""
        return f"{self.name}=={self.version}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlashAttention:
    """FlashAttention's version, and where it comes from.

    Attributes:
        form: `wheel`: an official wheel of a release fits; `source`: it is compiled; `index`: a wheel of the
            package index, installed with the image's other Python packages (FlashAttention 4).
    """

    version: str
    form: Literal["wheel", "source", "index"]
    backend: Literal["ck", "triton"] | None  # ROCm's kernels: `ck` or `triton`; None on CUDA
    sha256: str | None  # of the source archive; None while the stack is unlocked

    @property
    def package(self) -> str:
        """The package's name in the index: version 4 and later is a separate package."""
        return flash_attention_package(self.version)


def flash_attention_package(version: str) -> str:
    """The name of FlashAttention's package: versions 2 and 4 are two packages."""
    return "flash-attn-4" if int(version.split(".", maxsplit=1)[0]) >= 4 else "flash-attn"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Base:
    """What an image, or a stage that compiles, starts from.

    Attributes:
        kind: `registry`: an image by digest; `bootstrap`: a root file system made from distribution packages;
            `host`: one that was cut from the packages of a host.
    """

    kind: Literal["registry", "bootstrap", "host"]
    reference: str | None = None  # the image's name and tag, where there is one
    digest: str | None = None  # `sha256:…`; None while it is not known here
    suite: str | None = None  # the distribution's release, for a bootstrap or a cut
    packages: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stack:
    """One resolved cell of the matrix: everything that decides an image and its proof.

    Attributes:
        builder: The image in which parts are compiled; None if nothing is compiled, or if the compiler comes
            from Python packages.
        tested_on: The machines that certify it; None: any with a complete set of bounds. Empty: none.
        matrix_digest: `sha256:…` of the matrix.yaml that the stack was resolved from; None for a matrix that
            was not read from a file.
        values: The combination that it was resolved from, axis -> value, without architecture and driver.
        wheels_from: Where the locked wheels come from, if that is no index: one sentence for people.
    """

    id: str
    vendor: Vendor
    runtime: Runtime
    runtime_version: str | None
    torch: str | None
    python: str
    os: str
    wheels: str  # where torch comes from: `upstream`, `amd` or `index`; `none` without torch
    archs: tuple[str, ...]
    triton: Package | None
    collective: Package | None
    flash_attn: FlashAttention | None
    base: Base
    builder: Base | None
    layout: str | None  # how ROCm installs: `classic` up to 7.2, `amdrocm` after it (rule R11)
    cxx11abi: str | None
    requirements: tuple[str, ...]  # direct pip requirements, each at one version
    env: Mapping[str, str]
    tested_on: tuple[TestTarget, ...] | None
    size_budget_bytes: int
    experimental: bool
    missing: tuple[str, ...]  # what the lock lacks, one reason each; empty when the stack is locked
    extensions: tuple[Package, ...] = ()  # what is compiled beside FlashAttention, each in a stage of its own
    replacements: tuple[Replacement, ...] = ()  # what the matrix chose instead of torch's own pins
    matrix_digest: str | None = None
    known_issues: tuple[KnownIssue, ...] = ()  # reported faults of its versions on its architectures
    wheels_from: str | None = None
    values: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    @property
    def wheel_tag(self) -> str | None:
        """The folder of PyTorch's own index that holds this stack's torch: `cpu`, `cu128`, `rocm7.2`."""
        _, _, local = self.requirements[0].partition("+")
        return local if local and self.wheels == "upstream" else None

    @property
    def frozen(self) -> tuple[str, ...]:
        """What no later `pip install` may replace: torch, Triton, and NCCL if it is a package of its own."""
        pins = [pin for pin in self.requirements if pin.startswith(("torch==", "triton=="))]
        if self.triton and not any(pin.startswith("triton==") for pin in pins):
            pins.append(f"{self.triton.name}=={self.triton.version}")
        if self.collective and self.collective.name == "nccl" and self.runtime_version:
            pins.append(f"{nccl_package(self.runtime_version)}=={self.collective.version}")
        return tuple(pins)


def nccl_package(cuda: str) -> str:
    """The package that NCCL comes in, for a CUDA version."""
    return f"nvidia-nccl-cu{cuda.split('.', maxsplit=1)[0]}"
