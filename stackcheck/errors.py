"""The errors that a user can meet. In: what failed. Out: an exception with a message and an exit code."""

import difflib
from collections.abc import Iterable
from typing import TypeVar

AnError = TypeVar("AnError", bound="StackcheckError")


class StackcheckError(Exception):
    """An error with what, where, got, expected and the next command to type."""

    exit_code = 1
    usual_step = "report it: the command line and this text"  # for an error that names no step of its own

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        got: str | None = None,
        expected: str | None = None,
        next_step: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.got = got
        self.expected = expected
        self.next_step = next_step

    def __str__(self) -> str:
        """The sentence, then one indented line for each known detail."""
        details = {"where": self.where, "got": self.got, "expected": self.expected, "next": self.next_step}
        return "\n".join([self.what, *(f"  {name}: {text}" for name, text in details.items() if text)])

    def but(self, kind: type[AnError], **changed: str | None) -> AnError:
        """The same as an error of a kind, with some of its details changed."""
        told = {"where": self.where, "got": self.got, "expected": self.expected, "next_step": self.next_step}
        return kind(self.what, **(told | changed))


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """The known names that a wrong one may stand for, as the `expected` of an error; None: none is near."""
    names = sorted(set(known))
    part = word.strip("*?")
    near = (
        difflib.get_close_matches(word, names, n=3) or [name for name in names if part and part in name][:3]
    )
    return f"did you mean {' or '.join(near)}?" if near else None


class ConfigurationError(StackcheckError):
    """A file or an argument is wrong."""

    exit_code = 2
    usual_step = "correct it, then run the command again"


class NothingSelectedError(StackcheckError):
    """No stack is selected: a selector matches none, or none runs on this host."""

    exit_code = 3
    usual_step = "stackcheck list"


class EngineError(StackcheckError):
    """The container engine is missing, too old, or does not answer."""

    exit_code = 4
    usual_step = "stackcheck doctor"


class BuildError(StackcheckError):
    """An image could not be built."""

    exit_code = 5
    usual_step = "correct it, then build again; finished steps are kept"


class ChecksFailedError(StackcheckError):
    """The suites ran, and the verdict is not PASSED."""

    exit_code = 6
    usual_step = "stackcheck report"


class CertificateError(StackcheckError):
    """A certificate is missing, forged, too old, revoked, or about another image or host."""

    exit_code = 7
    usual_step = "look for another image: stackcheck find"


class PublishError(StackcheckError):
    """Nothing was published: the image, its certificate or the target was refused."""

    exit_code = 8
    usual_step = "correct it, then run the command again: it publishes nothing twice"


class MachineUnfitError(StackcheckError):
    """The machine was throttled, shared or broken, so that the run says nothing about the image."""

    exit_code = 9
    usual_step = "stackcheck doctor"


class FileError(StackcheckError):
    """A file cannot be read or written: full or read-only disk, missing permission, or a file in the way."""

    exit_code = 10
    usual_step = "make the file usable, then run the command again"


class CombinationError(StackcheckError):
    """The rules refuse a combination, or no source knows it (`explain`)."""

    exit_code = 11
    usual_step = "stackcheck list"
