"""What of a stack is compiled, or fetched as a wheel that no index has: one stage and one lock each.

In: a stack. Out: its `Extension`s, and the requirements of the stage that compiles them. Pure: versions are
the matrix's, and how a package is built is a fact of that package (its setup.py names what it imports).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from stackcheck.stack import FlashAttention, Stack

FLASH_ATTN = "flash-attn"
# What setup.py and torch.utils.cpp_extension import; without build isolation nobody else brings it.
_TOOLS = ("ninja", "packaging", "psutil", "setuptools", "wheel")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extension:
    """A package that a stage of its own hands over as a wheel.

    Attributes:
        name: Its name in the index, in its stage's and in its lock's name.
        form: `source`: made of the source archive; `wheel`: fetched from the project's releases.
        wheel: The official wheel's file name, for `wheel`.
        needs: What it imports at run time, beyond torch: part of the image's own lock.
    """

    name: str
    version: str
    form: Literal["wheel", "source"]
    wheel: str | None = None
    needs: tuple[str, ...] = ()

    @property
    def pin(self) -> str:
        """What pip is asked for; an official wheel's version has a local part."""
        return f"{self.name}=={self.wheel.split('-')[1].lower() if self.wheel else self.version}"


def extensions(stack: Stack) -> tuple[Extension, ...]:
    """What the image carries that no index has as a wheel."""
    return (_flash_attn(stack, stack.flash_attn),) if stack.flash_attn else ()


def toolchain(stack: Stack) -> tuple[str, ...]:
    """What the stage that compiles asks for: torch, the tools, and a compiler where no image has one."""
    if all(extension.form == "wheel" for extension in extensions(stack)):
        return ()
    compiler: tuple[str, ...] = ()
    if stack.layout == "amdrocm":
        compiler = (f"rocm[devel]=={stack.runtime_version}",)
    return (stack.requirements[0], *_TOOLS, *compiler)


def _flash_attn(stack: Stack, flash: FlashAttention) -> Extension:
    return Extension(
        name=FLASH_ATTN,
        version=flash.version,
        form=flash.form,
        wheel=official_wheel(stack, flash) if flash.form == "wheel" else None,
        needs=("einops",),
    )


def official_wheel(stack: Stack, flash: FlashAttention) -> str:
    """The wheel's name among the project's releases, as `get_wheel_url` of its setup.py builds it."""
    assert stack.torch
    assert stack.runtime_version
    cuda = stack.runtime_version.split(".", maxsplit=1)[0]
    # The first releases say the minor of CUDA 12 too (`cu123`), up to 2.6.3.
    cuda = f"{cuda}3" if cuda == "12" and _before_2_7(flash.version) else cuda
    torch = ".".join(stack.torch.split(".")[:2])
    python = f"cp{stack.python.replace('.', '')}"
    abi = (stack.cxx11abi or "").upper()
    local = f"cu{cuda}torch{torch}cxx11abi{abi}"
    return f"flash_attn-{flash.version}+{local}-{python}-{python}-linux_x86_64.whl"


def _before_2_7(version: str) -> bool:
    from packaging.version import Version

    return Version(version) < Version("2.7")
