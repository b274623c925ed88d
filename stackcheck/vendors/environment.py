"""Variables that a vendor's software reads: what an image sets, what a job chooses, their names elsewhere.

In: `<vendor>_environment.yaml`. Out: its variables and names, and which of them an image of some torch and
some architectures sets.
"""

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from stackcheck.files import yamlfile
from stackcheck.files.border import Closed
from stackcheck.vendors import Vendor


class Variable(Closed):
    """A variable that changes how fast a job is, as the vendor's containers set it.

    Attributes:
        where: `image`: it holds for every job, so the image sets it. `job`: the vendor's own recipes differ,
            so a job sets it, and results record it.
        archs: The architectures that it is for; empty for all. An image sets it if it is for all of its own.
    """

    name: str
    values: tuple[str, ...]  # what the vendor sets, the most common first
    where: Literal["image", "job"]
    because: str
    source: str
    archs: tuple[str, ...] = ()
    torch_below: str | None = None  # the first torch that no longer reads it

    def belongs_to(self, torch: str, archs: Sequence[str]) -> bool:
        """Whether an image of this torch for these architectures sets it."""
        read = self.torch_below is None or _numbers(torch) < _numbers(self.torch_below)
        return self.where == "image" and read and (not self.archs or {*archs} <= {*self.archs})


class Renamed(Closed):
    """What one vendor's tools call something, and the other's."""

    nvidia: str
    amd: str  # the name on ROCm; the same if AMD's software reads NVIDIA's
    note: str
    source: str


class _Tables(Closed):
    variables: tuple[Variable, ...] = ()
    names: tuple[Renamed, ...] = ()


def variables(vendor: Vendor) -> tuple[Variable, ...]:
    """What a vendor's containers set for speed; AMD's alone set any."""
    return _tables(vendor).variables


def names(vendor: Vendor) -> tuple[Renamed, ...]:
    """What the other vendor's variables are called on this one."""
    return _tables(vendor).names


def of_image(vendor: Vendor, torch: str, archs: Sequence[str]) -> dict[str, str]:
    """What an image of this torch for these architectures sets."""
    return {one.name: one.values[0] for one in variables(vendor) if one.belongs_to(torch, archs)}


@functools.cache
def _tables(vendor: Vendor) -> _Tables:
    path = Path(__file__).with_name(f"{vendor}_environment.yaml")
    return yamlfile.validated(_Tables, yamlfile.load_yaml(path), path.name) if path.exists() else _Tables()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))
