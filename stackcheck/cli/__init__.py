"""The command line: one function a verb, loaded when it is called; errors become messages and exit codes.

In: arguments. Out: results on stdout, progress and errors on stderr, an exit code (`stackcheck.errors`).
"""

from __future__ import annotations

import importlib
import signal
import sys
from typing import TYPE_CHECKING

import typer
from typer.core import TyperGroup

from stackcheck.errors import StackcheckError
from stackcheck.files.atomic import UNUSABLE, file_error

if TYPE_CHECKING:
    from types import FrameType

    from typer._click import Command, Context, HelpFormatter  # typer carries click under this name

# verb -> (module of stackcheck.cli that holds it, the line that --help prints).
# Help must not import every module: `stackcheck list` answers in under 300 ms.
VERBS: dict[str, tuple[str, str]] = {
    "doctor": ("host", "Say what this host has and lacks, each with the command that mends it."),
    "list": ("matrix", "List the stacks of the matrix and their state."),
    "explain": ("explain", "Say why a combination is allowed or refused: rule, reason, source."),
    "outdated": ("matrix", "Compare pins with what the package indexes offer."),
    "compat": ("explain", "Check the compatibility rules for contradictions."),
    "lock": ("matrix", "Write pins and hashes of stacks."),
    "render": ("matrix", "Write the Dockerfiles of stacks, or check them with --check."),
    "build": ("build", "Build the images of stacks."),
    "test": ("images", "Run the acceptance suites inside an image."),
    "certify": ("images", "Run the suites, judge, and sign the verdict."),
    "publish": ("images", "Publish a certified image, with its certificate, by digest."),
    "images": ("images", "Build, test, certify and publish every stack this host can run."),
    "export": ("export", "Write an image as one tar for docker, podman or Apptainer."),
    "verify": ("consume", "Check a published image's certificate against this host."),
    "pull": ("consume", "Verify, then fetch an image into the local engine."),
    "run": ("consume", "Verify, then run a command in a certified image."),
    "sbom": ("sbom", "List what is in a published image, from the signed document."),
    "revoke": ("operate", "Withdraw a certificate, with a signed reason."),
    "promote": ("operate", "Copy a certified image and its certificate to another target."),
    "prove": ("prove", "Plant every fault and show that each check can fail."),
    "baseline": ("baseline", "Propose thresholds from the results of healthy runs."),
    "key": ("operate", "Make or show the signing key."),
}

INTERRUPTED = 130  # what shells say of a program that Ctrl-C ended


class VerbGroup(TyperGroup):
    """A command group that imports a verb's module when the verb is called."""

    def list_commands(self, ctx: Context) -> list[str]:  # noqa: ARG002  # the base class's signature
        """Every verb, in the order of the flow."""
        return list(VERBS)

    def get_command(self, ctx: Context, cmd_name: str) -> Command | None:
        """The command of one verb, or None when there is no such verb."""
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"stackcheck.cli.{VERBS[cmd_name][0]}")
        group = typer.main.get_group(module.app)
        return group.get_command(ctx, cmd_name)

    def invoke(self, ctx: Context) -> object:
        """Run a verb; Typer would end an interrupted one without a word."""
        try:
            found = super().invoke(ctx)
            _hear_no_more()
        except KeyboardInterrupt:
            print("interrupted; the next run carries on from what was done", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        return found

    def format_commands(self, ctx: Context, formatter: HelpFormatter) -> None:  # noqa: ARG002
        """The verbs and their lines, from the table alone."""
        with formatter.section("Verbs"):
            formatter.write_dl([(verb, text) for verb, (_, text) in VERBS.items()])


app = typer.Typer(
    cls=VerbGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def stackcheck() -> None:
    """Decide whether a GPU training stack may be trusted: build, test, certify, publish, verify, run."""


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    """Let a signal unwind like Ctrl-C, so that nothing is left half-published or running."""
    raise KeyboardInterrupt


def _hear_no_more() -> None:
    """Let a signal end the interpreter when the work is over: unwound there, it would be a traceback."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def main() -> None:
    """Run one verb; turn errors into a message on stderr and an exit code."""
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # a lost terminal, unless under nohup
        signal.signal(signal.SIGHUP, _interrupt)
    try:
        app()
    except StackcheckError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(0)
    except OSError as error:
        if error.errno not in UNUSABLE:
            raise  # a defect of ours, with its traceback
        unusable = file_error(error)
        print(f"error: {unusable}", file=sys.stderr)
        sys.exit(unusable.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(INTERRUPTED)
    finally:
        _hear_no_more()
