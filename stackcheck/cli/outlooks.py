"""What `doctor`, `list` and `images` say of a stack on a machine before anything is built.

In: what the user named, or this host. Out: outlooks, and lines on stdout.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

from stackcheck.cli import options as opt
from stackcheck.cli import output
from stackcheck.errors import ConfigurationError, NothingSelectedError
from stackcheck.matrix import matrix
from stackcheck.matrix.stack import Stack
from stackcheck.suite import outlook
from stackcheck.suite.outlook import Machine, Outlook

MachineName = Annotated[
    str | None, opt.option("--machine MODEL[:COUNT]", "Ask about this machine, such as H100:8.", "this host")
]
DriverName = Annotated[str | None, opt.option("--driver VERSION", "The driver of --machine.", "any")]


def machine(name: str | None, driver: str | None) -> Machine:
    """The machine that the options name, or this host.

    Raises:
        ConfigurationError: No such machine, or a driver without one.
    """
    if name:
        return outlook.named(name, driver)
    if driver:
        raise ConfigurationError(
            "--driver belongs to --machine", got=driver, next_step=f"--machine H100:8 --driver {driver}"
        )
    return outlook.here()


def counted(outlooks: Sequence[Outlook], on: Machine) -> str:
    """How many stacks can be certified, in one sentence."""
    able = sum(not one.reasons for one in outlooks)
    stacks = output.counted(len(outlooks), "stack")
    return f"{able} of {stacks} can be certified on {on.words()}"


def show_refused(outlooks: Iterable[Outlook]) -> None:
    """Print the stacks that cannot be certified, with every reason and the next step for the first."""
    for one in outlooks:
        if one.reasons:
            print(f"{one.stack_id}: not built, because it cannot be certified there:")
            for reason in one.reasons:
                print(f"  - {reason.says}")
            print(f"  next: {one.reasons[0].next_step}")


def require_here(on: Machine) -> None:
    """Refuse to build for a machine that the user named: a build is for this host.

    Raises:
        ConfigurationError: The machine is a named one.
    """
    if on.named:
        raise ConfigurationError(
            "--machine asks about a machine, and images builds on this one",
            got=on.words(),
            next_step="the same command with --dry-run",
        )


def require_some(outlooks: Sequence[Outlook], on: Machine) -> None:
    """Refuse a selection of which no stack can be certified.

    Raises:
        NothingSelectedError: With each stack and its reasons in short.
    """
    if all(one.reasons for one in outlooks):
        raise NothingSelectedError(
            f"no stack of the matrix can be certified on {on.words()}",
            got="\n    ".join(f"{one.stack_id}: {one.words}" for one in outlooks),
            expected="one that is locked, for this machine, and without a known fault that no waiver covers",
            next_step="stackcheck images --dry-run, which has every reason; or build all the same: --anyway",
        )


def of(stacks: Sequence[Stack], on: Machine, root: Path, *, site_locks: bool = False) -> dict[str, Outlook]:
    """Stack id -> its outlook."""
    policy = matrix.load_matrix(root.resolve() / "matrix.yaml").policy
    found = outlook.of_all(stacks, on, root.resolve(), policy, site_locks=site_locks)
    return {one.stack_id: one for one in found}
