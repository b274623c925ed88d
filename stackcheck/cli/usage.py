"""What is wrong with the words of a command line. In: Typer's exceptions. Out: errors with a next step."""

import re
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec

from typer.exceptions import TyperException

from stackcheck.errors import ConfigurationError, StackcheckError, did_you_mean

OF_RUN = 125
# Typer's sentence about a path that a verb would read.
_ABSENT = re.compile(r"^Invalid value for '(.+)': \S+ '(.+)' does not exist")
# The extras of pyproject.toml: the verbs that need one, and the modules of its libraries.
EXTRAS: dict[str, tuple[set[str], set[str]]] = {
    "fleet": (
        {"compare", "fleet", "history", "report", "status"},
        {"fsspec", "jinja2", "sqlalchemy", "zstandard"},
    ),
    "registry": (
        {"base", "bisect", "build", "certify", "gate", "images", "lock", "mirror", "nightly", "outdated"}
        | {"prove", "publish", "render", "test", "wheelhouse"},
        {"cyclonedx", "exceptiongroup", "packageurl", "pytest", "pytest_timeout", "uv", "xdist"},
    ),
}


def asks_for_json(words: Sequence[str]) -> bool:
    """Whether --json is among the words that are for stackcheck: what follows `--` is another program's."""
    own = words[: words.index("--")] if "--" in words else words
    return "--json" in own


def exit_code(error: StackcheckError, words: Sequence[str]) -> int:
    """The code of an error; of `run` always 125, as docker has it: no program's code is taken for it."""
    return OF_RUN if words[:1] == ["run"] else error.exit_code


def no_such_verb(word: str, verbs: Iterable[str]) -> ConfigurationError:
    """The error of a wrong verb, with those that look like it."""
    return ConfigurationError(
        "no such command",
        got=word[:80],
        expected=did_you_mean(word, verbs) or "a command of stackcheck",
        next_step="stackcheck --help",
    )


def require_extra(verb: str) -> None:
    """Refuse a verb whose extra is not installed, before it begins what it could not end.

    Raises:
        ConfigurationError: A library is missing.
    """
    for extra, (verbs, libraries) in EXTRAS.items():
        missing = sorted(name for name in libraries if verb in verbs and find_spec(name) is None)
        if missing:
            raise _without(extra, ", ".join(missing))


def missing_library(error: ModuleNotFoundError) -> ConfigurationError | None:
    """The error of a library of an extra that only some uses of a verb need; None: a defect of stackcheck."""
    module = (error.name or "").partition(".")[0]
    return next((_without(extra, module) for extra, (_, names) in EXTRAS.items() if module in names), None)


def _without(extra: str, missing: str) -> ConfigurationError:
    return ConfigurationError(
        f"this command needs the extra `{extra}`",
        where=sys.prefix,
        got=f"not installed: {missing}",
        next_step=f"{sys.executable} -m pip install 'stackcheck[{extra}]'",
    )


def is_help(error: TyperException) -> bool:
    """Whether a command without its arguments asks for its help."""
    return type(error).__name__ == "NoArgsIsHelpError"


def as_error(error: TyperException) -> ConfigurationError:
    """A usage error of Typer's with the command that explains it, and the names that were likely meant."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "stackcheck"
    if absent := _ABSENT.search(error.format_message()):
        option, path = absent.groups()
        return ConfigurationError(
            f"{option} names a path that does not exist",
            where=command,
            got=path,
            expected="a path that exists",
            next_step=f"correct the path, or see {command} --help",
        )
    near = getattr(error, "possibilities", None)  # of a wrong option
    return ConfigurationError(
        (error.message if near else error.format_message()).rstrip("."),
        where=command,
        expected=f"did you mean {' or '.join(near)}?" if near else None,
        next_step=f"{command} --help",
    )
