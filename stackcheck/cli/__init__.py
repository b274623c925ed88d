"""The command line: one function per verb, imported when the verb is called.

In: arguments. Out: results on stdout, progress and errors on stderr, an exit code (`stackcheck.errors`).
"""

from __future__ import annotations

import importlib
import signal
import sys
from typing import TYPE_CHECKING

import typer
from typer.core import TyperGroup

from stackcheck.cli.output import print_error
from stackcheck.errors import StackcheckError
from stackcheck.files.atomic import UNUSABLE, file_error

if TYPE_CHECKING:
    from types import FrameType

    from typer._click import Command, Context, HelpFormatter  # typer carries click under this name

# verb -> (its module in stackcheck.cli, its line in --help).
# Help must not import every module: `stackcheck list` answers in under 300 ms.
VERBS: dict[str, tuple[str, str]] = {
    "doctor": ("host", "Show what this host has and lacks, with the commands that fix it."),
    "list": ("matrix", "List the stacks of the matrix and whether each is locked."),
    "explain": ("explain", "Show why a combination is allowed or refused, with the rules."),
    "outdated": ("matrix", "Compare pins with the newest versions in the package indexes."),
    "compat": ("explain", "Check the compatibility rules for contradictions."),
    "lock": ("matrix", "Write the pins and hashes of stacks."),
    "base": ("site", "Make the base of stacks from this host's own packages."),
    "wheelhouse": ("site", "Make wheels from what is installed in an environment."),
    "mirror": ("mirror", "List which files a site has to copy for stacks."),
    "render": ("matrix", "Write the Dockerfiles of stacks, or check them with --check."),
    "build": ("build", "Build the images of stacks."),
    "test": ("images", "Run the acceptance suites inside an image."),
    "judge": ("judge", "Give the verdict on a result.json, also of pytest alone."),
    "certify": ("images", "Run the suites, judge the result and sign the verdict."),
    "publish": ("images", "Publish a certified image with its certificate."),
    "images": ("images", "Build, test, certify and publish what this host can run."),
    "export": ("export", "Write an image as one tar for docker, podman or Apptainer."),
    "find": ("find", "List the published images that are certified for a host."),
    "verify": ("consumer", "Check the certificate of a published image for this host."),
    "pull": ("consumer", "Verify an image, then fetch it into the local engine."),
    "run": ("consumer", "Verify an image, then run a command in it."),
    "sbom": ("consumer", "List the packages of a published image, from the signed document."),
    "revoke": ("published", "Revoke a certificate, with a signed reason."),
    "promote": ("published", "Copy a certified image and its certificate to another target."),
    "gc": ("published", "Remove blobs that nothing in a layout on disk references."),
    "nightly": ("nightly", "Validate the published images again on this host."),
    "fleet": ("fleet", "Run the suites on many machines, by Slurm or Kubernetes."),
    "history": ("history", "List the runs that were kept, or one metric over them."),
    "report": ("report", "Write the page: what is certified, what failed, how fast it is."),
    "compare": ("compare", "Compare two runs, or run two images in turn on this node."),
    "scale": ("scale", "Predict the speed of a training job on many GPUs."),
    "bisect": ("bisect", "Find which component between two stacks breaks a check."),
    "prove": ("prove", "Plant every fault and show that each check can fail."),
    "baseline": ("baseline", "Propose thresholds from the results of healthy runs."),
    "policy": ("policy", "Print a policy that admits only certified images."),
    "key": ("key", "Show the signing key; make it on first use."),
}

INTERRUPTED = 130  # the code that shells give to a program that Ctrl-C ended


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
        """Run a verb, and report an interruption: Typer alone would exit without a message."""
        try:
            found = super().invoke(ctx)
            _default_signals()
        except KeyboardInterrupt:
            print("interrupted; the next run continues from the finished steps", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        return found

    def format_commands(self, ctx: Context, formatter: HelpFormatter) -> None:  # noqa: ARG002
        """The verbs and their help lines, from the table."""
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
    """Decide whether a GPU training stack can be trusted: build, test, certify, publish, verify, run."""


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    """Handle a signal like Ctrl-C, so that nothing stays half-published or running."""
    raise KeyboardInterrupt


def _default_signals() -> None:
    """Restore the default handlers when the work is done: an exception at interpreter exit is a traceback."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def main() -> None:
    """Run one verb; turn errors into a message on stderr and an exit code."""
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # a closed terminal, unless under nohup
        signal.signal(signal.SIGHUP, _interrupt)
    try:
        app(prog_name="stackcheck")
    except StackcheckError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(0)
    except OSError as error:
        if error.errno not in UNUSABLE:
            raise  # a defect of stackcheck: the traceback is needed
        unusable = file_error(error)
        print_error(unusable)
        sys.exit(unusable.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(INTERRUPTED)
    finally:
        _default_signals()
