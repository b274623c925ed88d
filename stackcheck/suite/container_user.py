"""The user that suites run as. In: this host's accounts. Out: a user id without an account.

Uid 1000, which images use, is a person's account on many hosts: with it that person could write the result
and end the container. So root's runs take the first number that no account, group or range of subordinate ids
has. Another user cannot choose: the container runs as that user, who owns the result anyway.
"""

import functools
import grp
import os
import pwd
from pathlib import Path

from stackcheck.errors import ConfigurationError

# Unused in every scheme, and small enough for a daemon with a user namespace of 65536 ids:
# https://systemd.io/UIDS-GIDS/, https://www.debian.org/doc/debian-policy/ch-opersys.html#uid-and-gid-classes
UNUSED = range(60706, 61184)
SUBORDINATE = (Path("/etc/subuid"), Path("/etc/subgid"))


def uid() -> int:
    """The user and group id of the container."""
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
