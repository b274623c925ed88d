"""The command line: one function per verb, imported when the verb is called.

In: arguments. Out: results on stdout, progress and errors on stderr, an exit code (`stackcheck.errors`).
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from stackcheck import __version__
from stackcheck.cli import options as opt
from stackcheck.cli import output, usage
from stackcheck.cli.output import Printable, print_error, print_json_error
from stackcheck.errors import FileError, MachineUnfitError, StackcheckError
from stackcheck.files.atomic import UNUSABLE, file_error

if TYPE_CHECKING:
    from types import FrameType

    from typer._click import Command, Context, HelpFormatter  # typer carries click under this name

# For whom -> verb -> (its module in stackcheck.cli, its line in --help).
# A verb's module is imported when the verb is called, so that help and completion are quick.
GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "Use": {
        "find": ("find", "List the published images that are certified for a host."),
        "verify": ("consumer", "Check the certificate of a published image for this host."),
        "pull": ("consumer", "Verify an image, then fetch it into the local engine."),
        "run": ("run", "Verify an image, then run a command in it."),
        "export": ("site", "Write an image as one tar for docker, podman or Apptainer."),
        "sbom": ("consumer", "List the packages of a published image, from the signed document."),
        "policy": ("policy", "Print a policy that admits only certified images."),
    },
    "Make": {
        "doctor": ("host", "Show what this host has and lacks, with the commands that fix it."),
        "first-host": ("host", "Follow the page of the first AMD host, and pack what was seen."),
        "list": ("matrix", "List the stacks of the matrix and whether each is locked."),
        "explain": ("explain", "Show why a combination is allowed or refused, with the rules."),
        "images": ("make", "Build, test, certify and publish what this host can run."),
        "build": ("build", "Build the images of stacks."),
        "test": ("images", "Run the acceptance suites inside an image."),
        "judge": ("judge", "Give the verdict on a result.json, also of pytest alone."),
        "certify": ("images", "Run the suites, judge the result and sign the verdict."),
        "publish": ("images", "Publish a certified image with its certificate."),
    },
    "Operate": {
        "nightly": ("nightly", "Validate the published images again on this host."),
        "gate": ("gate", "Say in a minute whether this node is fit for an image."),
        "fleet": ("fleet", "Run the suites on many machines, by Slurm or Kubernetes."),
        "history": ("history", "List the runs that were kept, or one metric over them."),
        "status": ("status", "Show the fleet on one screen: each node's last night."),
        "report": ("report", "Write the page: what is certified, what failed, how fast it is."),
        "compare": ("compare", "Compare two runs, or run two images in turn on this node."),
        "bisect": ("bisect", "Find which component between two stacks breaks a check."),
        "revoke": ("published", "Revoke a certificate, with a signed reason."),
        "promote": ("published", "Copy a certified image and its certificate to another target."),
        "gc": ("published", "Remove blobs that nothing in a layout on disk references."),
    },
    "Maintain": {
        "lock": ("matrix", "Write the pins and hashes of stacks."),
        "outdated": ("matrix", "Compare pins with the newest versions in the package indexes."),
        "compat": ("explain", "Check the compatibility rules for contradictions."),
        "render": ("matrix", "Write the Dockerfiles of stacks, or check them with --check."),
        "base": ("site", "Make the base of stacks from this host's own packages."),
        "wheelhouse": ("site", "Make wheels from what is installed in an environment."),
        "mirror": ("site", "List which files a site has to copy for stacks."),
        "prove": ("prove", "Plant every fault and show that each check can fail."),
        "baseline": ("baseline", "Propose thresholds from the results of healthy runs."),
        "contribute": ("contribute", "Write a signed bundle of a run without identities."),
        "key": ("policy", "Show the signing key; make it on first use."),
    },
}
VERBS = {verb: line for group in GROUPS.values() for verb, line in group.items()}

WIDEST = 120  # columns of --help; a narrower terminal has its own width
INTERRUPTED = 130  # the code that shells give to a program that Ctrl-C ended


class VerbGroup(TyperGroup):
    """A command group that imports a verb's module when the verb is called."""

    def list_commands(self, ctx: Context) -> list[str]:  # noqa: ARG002  # the base class's signature
        """Every verb, in the order of --help."""
        return list(VERBS)

    def get_command(self, ctx: Context, cmd_name: str) -> Command | None:
        """The command of one verb, or None when there is no such verb."""
        if cmd_name not in VERBS:
            return None
        try:
            module = importlib.import_module(f"stackcheck.cli.{VERBS[cmd_name][0]}")
        except ModuleNotFoundError:
            if not ctx.resilient_parsing:
                raise
            return TyperCommand(cmd_name)  # a shell completes the name of a verb whose extra is not installed
        group = typer.main.get_group(module.app)
        return group.get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Context, args: list[str]) -> tuple[str | None, Command | None, list[str]]:
        """The verb that the arguments begin with; a wrong one names its likely neighbours."""
        if args[0] not in VERBS and not args[0].startswith("-"):
            raise usage.no_such_verb(args[0], VERBS)
        if not ctx.resilient_parsing:
            usage.require_extra(args[0])
        return super().resolve_command(ctx, args)

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
        for group, verbs in GROUPS.items():
            with formatter.section(group):
                formatter.write_dl([(verb, text) for verb, (_, text) in verbs.items()])


app = typer.Typer(
    cls=VerbGroup,
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": WIDEST},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:  # Typer's signature
    if asked:
        print(f"stackcheck {__version__}")
        raise typer.Exit


@app.callback()
def stackcheck(
    *,
    version: Annotated[  # noqa: ARG001  # its callback answers
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Show the version and exit.")
    ] = False,
    quiet: Annotated[
        bool, opt.option("--quiet -q", "Write results and errors only; before the command.")
    ] = False,
    verbose: Annotated[
        bool, opt.option("--verbose -v", "Show requests and where an error arose; before the command.")
    ] = False,
) -> None:
    """Decide whether a GPU training stack can be trusted: build, test, certify, publish, verify, run."""
    output.volume.update(quiet=quiet, verbose=verbose)
    if verbose:
        logging.basicConfig(level=logging.DEBUG, format="[%(name)s] %(message)s", stream=sys.stderr)


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
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed: a file that a verb opens would get its number
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115  # to the end
    # Tags, packages, results and lines of containers are foreign: in no verb do they steer the terminal.
    out, err = Printable(sys.stdout), Printable(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        _run(out)


def _run(out: Printable) -> None:
    try:
        ended = app(prog_name="stackcheck", standalone_mode=False)
        out.flush()
        sys.exit(ended if isinstance(ended, int) else 0)
    except StackcheckError as error:
        _fail(error, out)
    except TyperException as error:
        if usage.is_help(error):
            print(error.format_message(), file=sys.stderr)
            sys.exit(2)
        _fail(usage.as_error(error), out)
    except (ModuleNotFoundError, OSError, subprocess.TimeoutExpired) as error:
        found = _of_this_host(error)
        if found is None:
            raise  # a defect of stackcheck: the traceback is needed
        _fail(found, out)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(INTERRUPTED)
    finally:
        _default_signals()


def _of_this_host(error: ModuleNotFoundError | OSError | subprocess.TimeoutExpired) -> StackcheckError | None:
    """The error of what the host lacks or does; None: a defect of stackcheck."""
    if isinstance(error, ModuleNotFoundError):
        return usage.missing_library(error)
    if isinstance(error, subprocess.TimeoutExpired):
        words = error.cmd if isinstance(error.cmd, str) else " ".join(map(str, error.cmd))
        return MachineUnfitError("a program does not end", where=words, got=f"{error.timeout:g} s")
    if error.errno == errno.ENOENT and error.filename is None:  # of os.getcwd and tempfile alone
        step = "go to a folder that exists, or name one for temporary files: export TMPDIR=FOLDER"
        return file_error(error, Path(os.environ.get("PWD", ".")), step)
    if not Path("/proc/self").exists() and str(error.filename).startswith("/proc"):
        return FileError("/proc is not mounted", where=error.filename, next_step="mount -t proc proc /proc")
    if error.errno is None and "TLS" in str(error) and "invalid path: " in str(error):  # requests says it so
        path = str(error).rpartition("invalid path: ")[2]
        step = "REQUESTS_CA_BUNDLE, CURL_CA_BUNDLE or pip's `cert` names it: correct or unset that"
        return FileError("a file of trusted certificates is not there", where=path, next_step=step)
    return file_error(error) if error.errno in UNUSABLE else None


def _fail(error: StackcheckError, out: Printable) -> None:
    """Report an error, with --json on stdout too unless the verb's own document is there already."""
    error.exit_code = usage.exit_code(error, sys.argv[1:])
    with contextlib.suppress(FileError):  # the code of the first error is the one to end with
        out.flush()
    with contextlib.suppress(FileError):
        print_error(error)
        if usage.asks_for_json(sys.argv[1:]) and not out.written:
            print_json_error(error)
            out.flush()
    sys.exit(error.exit_code)
