"""The verbs `base` and `wheelhouse`. In: what this host has. Out: a base and wheels for a build."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stackcheck.cli.options import HERE, AsJson, DryRun, Root, Selectors, new_app
from stackcheck.cli.output import Progress, counted, print_facts, print_json
from stackcheck.errors import ConfigurationError
from stackcheck.matrix import resolve

if TYPE_CHECKING:
    from stackcheck.imaging.host_base import Cut
    from stackcheck.matrix.stack import Stack

app = new_app()


@app.command("base")
def make_base(
    selectors: Selectors = None,
    *,
    from_host: Annotated[
        bool, typer.Option("--from-host", help="Cut the base from the packages that this host has.")
    ] = False,
    keep_changed: Annotated[
        bool,
        typer.Option(
            "--keep-changed",
            help="Keep configuration files that were changed on this host, instead of refusing them.",
        ),
    ] = False,
    as_json: AsJson = False,
    dry_run: DryRun = False,
    root: Root = HERE,
) -> None:
    """Make the base of stacks from this host's own packages, and lock the stacks to it."""
    from stackcheck.engine import apt
    from stackcheck.imaging import host_base, plans
    from stackcheck.recipe import site_lock

    if not from_host:
        raise ConfigurationError(
            "an option is missing: what the base is made from",
            expected="--from-host; a base from a registry or a bootstrap is made by `build` itself",
            next_step="stackcheck base --from-host STACK",
        )
    report = Progress()
    stacks = resolve.load_stacks(root.resolve(), tuple(selectors or ()))
    for stack in stacks:
        _require_release(stack)
    if dry_run:
        print("\n".join(f"{one.id}: would be cut from {', '.join(one.base.packages)}" for one in stacks))
        return
    made: dict[str, Cut] = {}
    for stack in stacks:
        report(f"{stack.id}: cutting a base of {', '.join(stack.base.packages)} and what they need")
        made[stack.id] = host_base.cut(
            stack.base.packages,
            plans.bases(root.resolve()),
            system=host_base.release_words(apt.host_release()),
            keep_changed=keep_changed,
        )
        cut = made[stack.id]
        site_lock.take_base(stack, cut.digest, cut.facts(), root.resolve())
    if as_json:
        print_json([{"stack": name, "base": str(cut.path), **cut.facts()} for name, cut in made.items()])
        return
    for name, cut in made.items():
        print_facts({"stack": name} | _facts(cut))


def _facts(cut: Cut) -> dict[str, str]:
    facts = {
        "system": cut.system,
        "base": str(cut.path),
        "digest": cut.digest,
        "packages": str(len(cut.packages)),
        "size": f"{cut.size_bytes / 1e6:.1f} MB",
    }
    facts |= {"left out": " ".join(cut.left_out)} if cut.left_out else {}
    return facts | ({"changed": " ".join(cut.changed)} if cut.changed else {})


def _require_release(stack: Stack) -> None:
    """The base of a stack is only cut from a host with the stack's own distribution."""
    from stackcheck.engine import apt
    from stackcheck.imaging.wheels import host_settings

    release = apt.host_release()
    here = (release.get("ID"), release.get("VERSION_CODENAME"))
    wanted = host_settings.RELEASES.get(stack.os)
    if wanted != here:
        raise ConfigurationError(
            "this host has another distribution than the stack",
            where=stack.id,
            got=release.get("PRETTY_NAME", "unknown"),
            expected=stack.os,
            next_step="stackcheck list; choose a stack of this host's distribution, or a host of the stack's",
        )


@app.command("wheelhouse")
def make_wheelhouse(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder for the wheels; it is created.")],
    selectors: Selectors = None,
    *,
    from_environment: Annotated[
        Path | None,
        typer.Option(
            "--from-environment",
            metavar="PYTHON",
            help="Make the wheels from the packages of this Python interpreter.",
            show_default="none",
        ),
    ] = None,
    as_json: AsJson = False,
    root: Root = HERE,
) -> None:
    """Fill a folder with wheels of installed packages: what the stacks need, or all without a selector."""
    from stackcheck.imaging.wheels import environment
    from stackcheck.recipe.extensions import needs

    if from_environment is None:
        raise ConfigurationError(
            "an option is missing: where the wheels come from",
            expected="--from-environment PYTHON",
            next_step="stackcheck wheelhouse DIR --from-environment /opt/venv/bin/python STACK",
        )
    stacks = resolve.load_stacks(root.resolve(), tuple(selectors)) if selectors else ()
    wanted = [text for stack in stacks for text in (*stack.requirements, *needs(stack))]
    made = environment.fill(folder.resolve(), from_environment, wanted=wanted, report=Progress())
    if as_json:
        print_json(
            {
                "written": list(made.written),
                "given": list(made.given),
                "absent": list(made.absent),
                "size_bytes": made.size_bytes,
            }
        )
        return
    facts = {
        "folder": str(folder.resolve()),
        "made": f"{counted(len(made.written), 'wheel')}, {made.size_bytes / 1e9:.2f} GB",
        "given": counted(len(made.given), "wheel"),
    }
    if made.absent:
        facts["absent"] = ", ".join(made.absent) + ": copy these wheels into the folder, then run this again"
    print_facts(facts)
