"""Every failure a user can meet, each with its exit code; the command line turns them into messages."""

from __future__ import annotations


class StackcheckError(Exception):
    """A failure with what, where, got, expected and the next command to type.

    Args:
        what: One sentence that names what failed.
        where: File and place, reference, or host the failure is about.
        got: The value that was found.
        expected: What would have been right.
        next_step: The command to type, or the thing to change, next.
    """

    exit_code = 1

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
        """The sentence, then one indented line for each thing that is known."""
        details = {"where": self.where, "got": self.got, "expected": self.expected, "next": self.next_step}
        return "\n".join([self.what, *(f"  {name}: {text}" for name, text in details.items() if text)])


class ConfigurationError(StackcheckError):
    """A file or an argument is wrong."""

    exit_code = 2


class NothingSelectedError(StackcheckError):
    """A selector matched no stack."""

    exit_code = 3


class EngineError(StackcheckError):
    """The container engine is missing, too old, or stopped answering."""

    exit_code = 4


class BuildError(StackcheckError):
    """An image could not be built."""

    exit_code = 5


class ChecksFailedError(StackcheckError):
    """The suites ran and the verdict is not PASSED."""

    exit_code = 6


class CertificateError(StackcheckError):
    """A certificate is missing, forged, too old, revoked, or about something else."""

    exit_code = 7


class PublishError(StackcheckError):
    """Nothing was published: the image, its proof or the target was refused."""

    exit_code = 8


class FileError(StackcheckError):
    """A file cannot be read or written: the disk is full or read-only, or a permission is missing."""

    exit_code = 10


class MachineUnfitError(StackcheckError):
    """The machine was throttled, shared or broken, so nothing can be said of the image."""

    exit_code = 9
