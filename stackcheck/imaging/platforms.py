"""The platforms that images are built for: their names, and the wheels that fit them.

In: `linux/amd64` or `linux/arm64`, an OS of the matrix, a Python version. Out: pip's options for that target
and the tags of wheels that install there.
"""

import dataclasses
import platform as host
from collections.abc import Iterable
from functools import lru_cache

from packaging import tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from stackcheck.errors import ConfigurationError
from stackcheck.matrix.stack import Stack

MACHINES = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}
# Minor version of each distribution's glibc (2.x); wheels name the oldest that they run with.
GLIBC = {"debian12": 36, "debian13": 41, "ubuntu22.04": 35, "ubuntu24.04": 39}
OLDEST_GLIBC = 28  # what torch's own wheels need; for any distribution that is not in the table
# glibc 2.5, the oldest that a wheel may name (PEP 600, PEP 513).
FIRST_GLIBC = 5
LEGACY = {"x86_64": ("manylinux2014", "manylinux2010", "manylinux1"), "aarch64": ("manylinux2014",)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class InstallTarget:
    """Where wheels are to be installed."""

    platform: str  # `linux/amd64` or `linux/arm64`
    python: str  # its minor version, "3.11"
    glibc: int  # minor version of the distribution's glibc

    @property
    def machine(self) -> str:
        """The machine, as in the names of wheels."""
        return MACHINES[self.platform]

    @property
    def names(self) -> tuple[str, ...]:
        """Platform tags, the newest glibc first, as pip ranks them."""
        versions = range(self.glibc, FIRST_GLIBC - 1, -1)
        numbered = tuple(f"manylinux_2_{minor}_{self.machine}" for minor in versions)
        legacy = tuple(f"{name}_{self.machine}" for name in LEGACY[self.machine])
        return (*numbered, *legacy, f"linux_{self.machine}")

    @property
    def pip_options(self) -> tuple[str, ...]:
        """What makes `pip download` choose as pip in the image would."""
        options = [f"--platform={name}" for name in self.names]
        return ("--only-binary=:all:", f"--python-version={self.python}", *options)

    @property
    def shell_options(self) -> str:
        """The same for a user to type; bash writes out the braces."""
        legacy = ",".join(name.removeprefix("manylinux") for name in LEGACY[self.machine])
        old = f"{{{legacy}}}" if "," in legacy else legacy
        return (
            f"--only-binary=:all: --python-version={self.python} "
            f"--platform=manylinux_2_{{{self.glibc}..{FIRST_GLIBC}}}_{self.machine} "
            f"--platform=manylinux{old}_{self.machine} --platform=linux_{self.machine}"
        )

    def takes(self, filename: str) -> bool:
        """Whether a file installs there: a wheel that fits, or any source archive."""
        if not filename.endswith(".whl"):
            return True
        try:
            return bool(parse_wheel_filename(filename)[3] & _tags(self))
        except InvalidWheelFilename:
            return False

    def best(self, filenames: Iterable[str]) -> str | None:
        """The file that pip would take: a wheel for the newest platform that fits, else a source archive."""
        fitting = [name for name in filenames if self.takes(name)]
        wheels = [name for name in fitting if name.endswith(".whl")]
        return max(wheels, key=self._rank, default=None) or next(iter(fitting), None)

    def _rank(self, filename: str) -> tuple[bool, int]:
        """An own interpreter's wheel before one for any; a newer glibc before an older one."""
        python, _, platform = filename.removesuffix(".whl").split("-")[-3:]
        order = {tag: -number for number, tag in enumerate(self.names)}
        return python.startswith("cp"), max(order.get(tag, -1000) for tag in platform.split("."))


def target(stack: Stack, platform: str) -> InstallTarget:
    """Where a stack's wheels are to be installed."""
    return InstallTarget(platform=platform, python=stack.python, glibc=GLIBC.get(stack.os, OLDEST_GLIBC))


def native() -> str:
    """This host's own platform.

    Raises:
        ConfigurationError: Images are not built for such a machine.
    """
    return checked(f"linux/{ {'x86_64': 'amd64', 'aarch64': 'arm64'}.get(host.machine(), host.machine()) }")


def checked(name: str) -> str:
    """A platform that images are built for.

    Raises:
        ConfigurationError: Images are not built for it.
    """
    if name not in MACHINES:
        raise ConfigurationError(
            "images are not built for this platform",
            got=name,
            expected=" or ".join(MACHINES),
            next_step="stackcheck build --platform …",
        )
    return name


@lru_cache(maxsize=16)
def _tags(wanted: InstallTarget) -> frozenset[tags.Tag]:
    major, minor = (int(part) for part in wanted.python.split("."))
    own = tags.cpython_tags((major, minor), platforms=wanted.names)
    general = tags.compatible_tags((major, minor), interpreter=f"cp{major}{minor}", platforms=wanted.names)
    return frozenset((*own, *general))
