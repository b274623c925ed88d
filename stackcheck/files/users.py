"""Who this user is, and where this user's own files are. In: the environment. Out: a name, a folder."""

import os
import pwd
from pathlib import Path

from stackcheck.errors import FileError

# The XDG base directory specification: a variable, and the folder below the home without it.
USUAL = {
    "XDG_CACHE_HOME": ".cache",
    "XDG_CONFIG_HOME": ".config",
    "XDG_DATA_HOME": ".local/share",
    "XDG_STATE_HOME": ".local/state",
}


def folder(variable: str) -> Path:
    """The folder for one kind of this user's files; as the specification has it, a relative one is ignored.

    Raises:
        FileError: The user has no home.
    """
    named = Path(os.environ.get(variable, ""))
    return named if named.is_absolute() else home() / USUAL[variable]


def home() -> Path:
    """The home that the environment names, else the one of the user's account.

    Raises:
        FileError: Nobody named one, as in a container that was started with a number.
    """
    named = os.environ.get("HOME", "")
    if not named:
        try:
            named = pwd.getpwuid(os.geteuid()).pw_dir
        except KeyError:
            named = ""
    if not Path(named).is_absolute():
        raise FileError(
            "this user has no home folder",
            where=f"user {name()}",
            got=named or "no HOME, and no account",
            expected="an absolute path",
            next_step="name a folder that you can write to: export HOME=FOLDER",
        )
    return Path(named)


def name() -> str:
    """This user's name, or its number where no file knows it, as in a container that was started with one."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
