"""matrix.yaml -> Matrix: the hand-written list of stacks, read strictly.

In: the file. Out: a `Matrix` of frozen models. expand.py expands its axes. Every value is held to
a narrow pattern, because many of them end up in a Dockerfile.
"""

import functools
import hashlib
import json
from collections.abc import (
    Iterator,
    Mapping,  # pydantic reads annotations at run time
)
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from stackcheck import vendors
from stackcheck.files import yamlfile
from stackcheck.files.border import Closed
from stackcheck.matrix.stack import flash_attention_package
from stackcheck.policy import Policy
from stackcheck.vendors import Vendor

Runtime = Literal["rocm", "cuda", "cpu"]
Wheels = Literal["upstream", "amd", "index"]

# Rust's regex: `$` is the very end, so that no newline can follow a value into a Dockerfile.
Version = Annotated[
    str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]+){0,4}((a|b|rc|\.post)[0-9]+)?$", max_length=40)
]
Token = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$", max_length=80)]
Reference = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._/-]*:[A-Za-z0-9._-]+$", max_length=200)
]
# As `docker pull` takes it. A tag that moves is wanted: what it names tonight is validated tonight.
ForeignReference = Annotated[
    str,
    StringConstraints(
        pattern=r"^[a-z0-9][a-z0-9._-]*(:[0-9]{1,5})?(/[a-z0-9][a-z0-9._-]*)+(:[A-Za-z0-9_][A-Za-z0-9._-]*)?"
        r"(@sha256:[0-9a-f]{64})?$",
        max_length=300,
    ),
]
Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
PublishTarget = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$", max_length=200)]
# The tool sets these itself, and the checks of an image rely on them: the matrix cannot change them.
RESERVED = frozenset(
    {"PATH", "PIP_CONSTRAINT", "UV_CONSTRAINT", "PYTORCH_VERSION", "FLASH_ATTENTION_TRITON_AMD_ENABLE"}
)
# These change how the suites themselves run: PYTHONOPTIMIZE takes their asserts away, PYTEST_ADDOPTS checks.
# A run removes them from an image (suite/steering.py), as it does with those that hide devices.
RESERVED_PREFIXES = ("PYTHON", "PYTEST", "LD_", "STACKCHECK")


def _not_reserved(name: str) -> str:
    if name in RESERVED or name.startswith(RESERVED_PREFIXES) or vendors.hides_devices(name):
        raise PydanticCustomError("reserved", "{name} is set by the tool itself", {"name": name})
    return name


Variable = Annotated[
    str, StringConstraints(pattern=r"^[A-Z][A-Z0-9_]*$", max_length=80), AfterValidator(_not_reserved)
]
Text = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._:;,/=+ -]*$", max_length=200)]
Check = Annotated[str, StringConstraints(pattern=r"^test_[a-z_0-9]+\.py::test_[a-z_0-9*]+$", max_length=120)]


def _as_list(value: object) -> object:
    """An axis with one value may be written without brackets."""
    return [value] if isinstance(value, str) else value


_T = TypeVar("_T")
Axis = Annotated[tuple[_T, ...], BeforeValidator(_as_list), Field(min_length=1, max_length=1000)]


class TestTarget(Closed):
    """A machine on which an image of a stack must be tested: the test matrix, apart from the build matrix."""

    __test__ = False  # else pytest collects this class, because its name begins with Test

    device: Token
    count: int = Field(ge=1, le=1024)
    driver: Version | None = None


Packages = Annotated[Mapping[Token, Version], Field(max_length=300)]
Environment = Annotated[Mapping[Variable, Text], Field(max_length=100)]
Architectures = Annotated[tuple[Token, ...], BeforeValidator(_as_list), Field(min_length=1, max_length=50)]
Targets = Annotated[tuple[TestTarget, ...], Field(max_length=50)]
SystemPackages = Annotated[tuple[Token, ...], Field(max_length=200)]


class StackSettings(Closed):
    """What a block may set and an override may change: all but the axes."""

    archs: Architectures | None = None
    builder: Reference | None = None
    flash_attn_backend: Literal["ck", "triton"] | None = None
    system_packages: SystemPackages = ()
    wheel_tag: Token | None = None
    packages: Packages | None = None
    extensions: Mapping[Literal["transformer-engine-torch"], Version] | None = None
    env: Environment | None = None
    tested_on: Targets | None = None
    size_budget_gb: float | None = Field(default=None, gt=0, le=1000)
    experimental: bool | None = None


# The RPATH of torch's ROCm wheels comes before LD_LIBRARY_PATH (pytorch/builder#1468). LD_PRELOAD mixes two
# LLVMs, so AMD's own tests write over the wheel's file (ROCm/rocm-systems#9449): not what the lock names.
NO_RCCL = (
    "RCCL cannot be chosen: torch's ROCm wheels contain it or pin its package, and load no other one"
    " (pytorch/builder#1468, ROCm/rocm-systems#9449). Choose the ROCm that has the RCCL that you want:"
    " `stackcheck explain rccl=2.30.4 vendor=amd` names the stacks with it"
)


class Block(StackSettings):
    """One entry of `stacks` or `include`: axes that expand as a product, and their settings."""

    runtime: Runtime
    version: Axis[Version] | None = None
    torch: Axis[Version] | None = None
    python: Axis[Version]
    os: Axis[Token]
    wheels: Axis[Wheels] | None = None
    flash_attn: Axis[Version] | None = None
    nccl: Axis[Version] | None = None
    triton: Axis[Version] | None = None
    rccl: Axis[Version] | None = None  # always refused, with the reason
    id: Token | None = None


class Override(Closed):
    """StackSettings for every stack whose id matches a pattern."""

    select: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._+*?-]+$", max_length=200)]
    set: StackSettings


class Exclude(Closed):
    """Combinations left out of the product by choice, with the reason."""

    when: Mapping[
        Literal["runtime", "version", "torch", "python", "os", "wheels", "flash_attn", "nccl", "triton"],
        Token,
    ]
    because: str = Field(min_length=1, max_length=500)


class System(Closed):
    """An operating system: bootstrapped from its distribution's packages, or a registry image by tag."""

    bootstrap: Token | None = None
    image: Reference | None = None
    packages: tuple[Token, ...] = ()


class RuntimeDefaults(Closed):
    """What all stacks of a runtime share; without `tested_on`, any machine with all its bounds certifies."""

    vendor: Vendor
    packages: Packages = Field(default_factory=dict)
    system_packages: SystemPackages = ()
    env: Environment = Field(default_factory=dict)
    tested_on: Targets | None = None


class HistoryUrls(Closed):
    """Where the history of runs is kept: a folder or fsspec URL, and a database URL without a password."""

    records: Annotated[str, StringConstraints(min_length=1, max_length=500)] | None = None
    index: Annotated[str, StringConstraints(min_length=1, max_length=500)] | None = None


class Foreign(Closed):
    """An image that was not built here, which `stackcheck nightly` validates and certifies like a stack's.

    Attributes:
        follow: Whether each image that the tag comes to name is validated, regardless of who pushed it.
        accept_python: Digests of the files that may be its Python although no package owns them.
    """

    reference: ForeignReference  # as `docker pull` takes it: rocm/pytorch@sha256:…, or a tag that is followed
    vendor: Vendor
    device: Token  # the device model on whose hosts it is validated
    accept_python: Annotated[tuple[Digest, ...], Field(max_length=10)] = ()
    follow: bool = False

    @model_validator(mode="after")
    def _named(self) -> Self:
        """Refuse a tag without `follow`, and a digest with it.
        All who may push can move a tag, so the matrix has to choose to follow it.
        """
        if ("@sha256:" in self.reference) == self.follow:
            kind = "moves" if self.follow else "tag"
            raise PydanticCustomError(
                f"reference_{kind}",
                "a digest, which nothing moves: leave out follow"
                if self.follow
                else "a tag, which can be moved: name IMAGE@sha256:DIGEST, or add follow: true",
            )
        return self


class Matrix(Closed):
    """The whole file."""

    schema_: Literal["1"] = Field(alias="schema")
    publish: PublishTarget
    history: HistoryUrls | None = None
    packages: Packages
    training_packages: Packages = Field(default_factory=dict)
    policy: Policy
    runtimes: Mapping[Runtime, RuntimeDefaults]
    systems: Mapping[Token, System]
    stacks: Annotated[tuple[Block, ...], Field(min_length=1, max_length=1000)]
    include: Annotated[tuple[Block, ...], Field(max_length=1000)] = ()
    exclude: Annotated[tuple[Exclude, ...], Field(max_length=200)] = ()
    overrides: Annotated[tuple[Override, ...], Field(max_length=200)] = ()
    foreign: Annotated[tuple[Foreign, ...], Field(max_length=100)] = ()

    _digest: str | None = PrivateAttr(default=None)

    @property
    def digest(self) -> str | None:
        """`sha256:…` of the file that was read; None for a matrix that comes from no file."""
        return self._digest


def load_matrix(path: Path) -> Matrix:
    """Read matrix.yaml.

    Raises:
        ConfigurationError: One line a problem, each with its place.
    """
    found = _of_bytes(yamlfile.read_bytes(path), path.name)
    problems = [*found.policy.problems(listed)] if (listed := _listed_checks(path.parent)) else []
    if problems:
        raise yamlfile.refused(f"{path.name}: {problem}" for problem in problems)
    return found


def _listed_checks(root: Path) -> tuple[str, ...]:
    """The ids of all checks in the checkout; without a readable list none: a run that needs it refuses it."""
    try:
        listing = json.loads((root / "tests" / "acceptance" / "checks.json").read_bytes())
        return tuple(name for names in listing.values() for name in names)
    except (OSError, ValueError, AttributeError, TypeError):
        return ()


@functools.lru_cache(maxsize=8)
def _of_bytes(data: bytes, name: str) -> Matrix:
    """The matrix in a file; nobody changes it, so equal bytes are the same object."""
    matrix = parse(yamlfile.parse(data, name), name)
    # Of the bytes that were parsed: an edit a moment later must not change which matrix a certificate names.
    matrix._digest = "sha256:" + hashlib.sha256(data).hexdigest()  # noqa: SLF001
    return matrix


def parse(value: Mapping[str, Any], name: str = "matrix.yaml") -> Matrix:
    """The matrix in a mapping that was read from YAML."""
    matrix = yamlfile.validated(Matrix, value, name)
    lines = [*_broken_references(matrix)]
    if lines:
        raise yamlfile.refused(f"{name}: {line}" for line in lines)
    return matrix


def _broken_references(matrix: Matrix) -> Iterator[str]:
    """References to names that do not exist, and blocks without what their runtime needs."""
    for name, system in matrix.systems.items():
        if (system.bootstrap is None) == (system.image is None):
            yield f"systems.{name}: give exactly one of `bootstrap` and `image`"
    for section, blocks in (("stacks", matrix.stacks), ("include", matrix.include)):
        for index, block in enumerate(blocks):
            for field, problem in _block_problems(block, matrix):
                yield f"{section}[{index}].{field}: {problem}"


def _block_problems(block: Block, matrix: Matrix) -> Iterator[tuple[str, str]]:
    if block.runtime not in matrix.runtimes:
        yield "runtime", f"{block.runtime} is not under `runtimes`"
    if (block.runtime == "cpu") != (block.version is None):
        yield "version", "required for rocm and cuda, not allowed for cpu"
    if (block.torch is None) != (block.wheels is None):
        yield "wheels", "required with `torch`, not allowed without it"
    if block.flash_attn and not (block.torch and block.archs):
        yield "flash_attn", "it is compiled for a torch and for architectures: add `torch` and `archs`"
    if block.nccl and not (block.torch and block.runtime == "cuda"):
        yield (
            "nccl",
            "only a CUDA stack with torch has NCCL as a package of its own; RCCL is inside torch's wheel",
        )
    if block.rccl:
        yield "rccl", NO_RCCL
    if block.triton and not (block.torch and block.runtime != "cpu"):
        yield "triton", "only a GPU stack with torch has one to replace; for cpu, name it under `packages`"
    # From 13 on the package index has the compiler (extensions.py).
    old = any(int(version.split(".", maxsplit=1)[0]) < 13 for version in block.version or ())
    compiled = any(flash_attention_package(version) == "flash-attn" for version in block.flash_attn or ())
    if compiled and block.runtime == "cuda" and old and block.builder is None:
        yield (
            "builder",
            "required: FlashAttention 2 for CUDA 12 and older is compiled in an image that has nvcc",
        )
    for name in sorted({"flash-attn", "flash-attn-4"} & {*(block.packages or {})}):
        yield (
            "packages",
            f"{name} is chosen by `flash_attn`: 2 and 4 share a folder, so an image has one of them",
        )
    yield from (("os", f"{name} is not under `systems`") for name in block.os if name not in matrix.systems)
