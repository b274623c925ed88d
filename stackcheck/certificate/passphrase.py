"""The passphrase of an encrypted signing key, never an argument of a command.

In: the environment (`STACKCHECK_KEY_PASSPHRASE`, or `STACKCHECK_KEY_PASSPHRASE_FILE` with a path), or the
terminal. Out: the bytes, or an error that says how to give it.
"""

import functools
import getpass
import os
import stat
import sys
from pathlib import Path

from stackcheck.errors import ConfigurationError
from stackcheck.files.regular import read_regular

VALUE, FILE = "STACKCHECK_KEY_PASSPHRASE", "STACKCHECK_KEY_PASSPHRASE_FILE"
VARIABLES = (VALUE, FILE)
LIMIT_BYTES = 1024


def known(path: Path) -> bytes:
    """The passphrase of a key that exists.

    Raises:
        ConfigurationError: The environment has no passphrase, and no terminal can ask for it.
    """
    given = _from_environment()
    return given if given is not None else _typed(path)


def new(path: Path) -> bytes:
    """The passphrase for a new key; a person types it twice.

    Raises:
        ConfigurationError: No passphrase was given, it is empty, or the two differ.
    """
    given = _from_environment()
    chosen = given if given is not None else _typed(path)
    if given is None and getpass.getpass(f"The same passphrase for {path}: ").encode() != chosen:
        raise ConfigurationError("the two passphrases differ", where=str(path), next_step="type it again")
    if not chosen:
        raise ConfigurationError(
            "the passphrase is empty", where=str(path), expected="at least one character"
        )
    return chosen


def _from_environment() -> bytes | None:
    if VALUE in os.environ:
        return os.environ[VALUE].encode()
    if FILE not in os.environ:
        return None
    path = Path(os.environ[FILE])
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            raise ConfigurationError(
                "the file with the passphrase can be used by others",
                where=f"{FILE}={path}",
                got=f"mode {mode:04o}",
                expected="mode 0600 or 0400",
                next_step=f"chmod 600 {path}; and change the passphrase, if others may have read it",
            )
        return read_regular(path, LIMIT_BYTES).split(b"\n")[0].rstrip(b"\r")
    except OSError as error:
        raise ConfigurationError(
            "the file with the passphrase cannot be read",
            where=f"{FILE}={path}",
            got=error.strerror,
            expected="a file that you can read, with the passphrase in its first line",
        ) from error


@functools.cache
def _typed(path: Path) -> bytes:
    """Ask a person, once for each key and process."""
    if not sys.stdin.isatty():
        raise ConfigurationError(
            "the signing key is encrypted, and there is no terminal to ask for its passphrase",
            where=str(path),
            got=f"neither {VALUE} nor {FILE}",
            expected="one of these variables",
            next_step=f"{FILE}=FILE stackcheck …",
        )
    return getpass.getpass(f"Passphrase for {path}: ").encode()
