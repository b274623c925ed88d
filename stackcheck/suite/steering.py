"""Which variables and which user an acceptance run has. In: the image's ENV, this host's accounts. Out: both.

A variable that steers the interpreter, the loader or pytest could choose what runs instead of the checks, and
one that hides devices could make the test of one device count for eight. They are recognised by how their
names begin, so that unknown ones are removed too. Everything else stays: users of the image get it.

Uid 1000, which images use, is a person's account on many hosts: with it that person could write the result
and end the container. So root's runs take the first number that no account, group or range of subordinate ids
has. Another user cannot choose: the container runs as that user, who owns the result anyway.
"""

import functools
import grp
import os
import pwd
from collections.abc import Iterable, Mapping
from pathlib import Path

from stackcheck import vendors
from stackcheck.errors import ConfigurationError

# Python: https://docs.python.org/3/using/cmdline.html#environment-variables. pytest imports argcomplete for
# `_ARGCOMPLETE`. The loader and libc: ld.so(8). A shell that something starts reads BASH_ENV and ENV.
STEERING = (
    *("PYTHON", "PYTEST", "_PYTEST", "_ARGCOMPLETE", "ARGCOMPLETE", "COVERAGE_", "COV_CORE_", "STACKCHECK"),
    *("LD_", "GLIBC_TUNABLES", "GCONV_PATH", "LOCPATH", "BASH_ENV", "BASH_FUNC_"),
)
STEERING_NAMES = ("ENV",)
# CUDA's and ROCm's images need it to find their libraries; it is recorded in the result.
KEPT = ("LD_LIBRARY_PATH",)

# What the tool itself sets. Children of the suites inherit it.
OURS = {
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONNOUSERSITE": "1",
    # No plug-in of the image, and the two that the suites use, by the names of their modules. A variable and
    # not `-p`, so that the workers of pytest-xdist have them too.
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PYTEST_PLUGINS": "pytest_timeout,xdist.plugin",
}


def environment(
    image: Iterable[str], vendor: vendors.Vendor, *given: Mapping[str, str]
) -> dict[str, str | None]:
    """The variables of an acceptance run; None removes one of the image's."""
    removed: dict[str, str | None] = dict.fromkeys(name for name in image if is_neutralised(name))
    host = {name: value for part in given for name, value in part.items()}
    return {**removed, **host, **vendors.visibility(vendor), **OURS}


def is_neutralised(name: str) -> bool:
    """Whether a variable of an image can choose what runs, or hide devices."""
    steers = name not in KEPT and (name.startswith(STEERING) or name in STEERING_NAMES)
    return steers or vendors.hides_devices(name)


# Unused in every scheme, and small enough for a daemon with a user namespace of 65536 ids:
# https://systemd.io/UIDS-GIDS/, https://www.debian.org/doc/debian-policy/ch-opersys.html#uid-and-gid-classes
UNUSED = range(60706, 61184)
SUBORDINATE = (Path("/etc/subuid"), Path("/etc/subgid"))


def uid() -> int:
    """The user and group id of the container.

    Raises:
        ConfigurationError: The host uses every number of the range.
    """
    if os.geteuid() != 0:
        return os.geteuid()
    lent = [ids for path in SUBORDINATE for ids in _ranges(path)]
    for number in UNUSED:
        if not _has_account(number) and not any(number in ids for ids in lent):
            return number
    raise ConfigurationError(
        "no user id is free for the container",
        where="the password database, the group database, /etc/subuid and /etc/subgid",
        got=f"every id from {UNUSED.start} to {UNUSED.stop - 1} is taken",
        expected="one id without an account",
        next_step=f"free one of them: getent passwd {UNUSED.start}; grep . /etc/subuid /etc/subgid",
    )


@functools.cache
def _has_account(number: int) -> bool:
    for look_up in (pwd.getpwuid, grp.getgrgid):
        try:
            look_up(number)
        except KeyError:
            continue
        return True
    return False


def _ranges(path: Path) -> list[range]:
    """The ranges of a file such as /etc/subuid: `name:first:count` in each line."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    fields = [line.split(":") for line in lines if not line.startswith("#")]
    numbers = [row[1:] for row in fields if len(row) == 3 and all(part.strip().isdigit() for part in row[1:])]
    return [range(int(first), int(first) + int(count)) for first, count in numbers]
