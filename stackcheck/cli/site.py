"""The verbs of a site: base, wheelhouse, mirror, export. In: what it has. Out: files to build and carry."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from stackcheck import mirrors as sites
from stackcheck.cli import options as opt
from stackcheck.cli.output import Progress, counted, print_facts, print_json, print_table
from stackcheck.engine import apt
from stackcheck.errors import ConfigurationError
from stackcheck.imaging import platforms
from stackcheck.imaging.host_base import Cut
from stackcheck.matrix import resolve
from stackcheck.matrix.stack import Stack
from stackcheck.oci.image_layout import ImageLayout
from stackcheck.recipe.extensions import needs
from stackcheck.suite.subject import find_image

if TYPE_CHECKING:
    from stackcheck.recipe.mirror_list import WantedFiles

app = opt.new_app()


@app.command("base")
def make_base(
    selectors: opt.Selectors = None,
    *,
    from_host: Annotated[
        bool, opt.option("--from-host", "Cut the base from the packages that this host has.")
    ] = False,
    keep_changed: Annotated[
        bool,
        opt.option(
            "--keep-changed",
            "Keep configuration files that were changed on this host, instead of refusing them.",
        ),
    ] = False,
    as_json: opt.AsJson = False,
    dry_run: opt.DryRun = False,
    root: opt.Root = opt.HERE,
) -> None:
    """Make the base of stacks from this host's own packages, and lock the stacks to it."""
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
    folder: Annotated[Path, opt.argument("DIR", "The folder for the wheels; it is created.")],
    selectors: opt.Selectors = None,
    *,
    from_environment: Annotated[
        Path | None,
        opt.option(
            "--from-environment PYTHON",
            "Make the wheels from the packages of this Python interpreter.",
            "none",
        ),
    ] = None,
    as_json: opt.AsJson = False,
    root: opt.Root = opt.HERE,
) -> None:
    """Fill a folder with wheels of installed packages: what the stacks need, or all without a selector."""
    from stackcheck.imaging.wheels import environment

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


@app.command("export")
def export_image(
    name: Annotated[str, opt.argument("STACK|IMAGE", "A stack id, or an image that was tested here.")],
    *,
    output: Annotated[Path | None, opt.option("--output FILE", "The tar file to write.", "STACK.tar")] = None,
    as_json: opt.AsJson = False,
    dry_run: opt.DryRun = False,
    root: opt.Root = opt.HERE,
) -> None:
    """Write an image as one tar for `docker load`, `podman load` and Apptainer."""
    image = find_image(name, root.resolve())
    layout = ImageLayout(image.layout)
    path = output or Path(f"{image.layout.parent.name}.tar")
    if dry_run:
        print(f"{image.manifest_digest}: write {path}, {layout.size_bytes() / 1e6:.1f} MB")
        return
    layout.export(image.reference, path)
    facts = {"tar": str(path), "digest": image.manifest_digest, "next": f"docker load --input {path}"}
    print_json(facts) if as_json else print_facts(facts)


@app.command("mirror")
def mirror(
    selectors: opt.Selectors = None,
    *,
    print_: Annotated[
        bool, opt.option("--print", "Print what a site has to copy; download nothing.")
    ] = False,
    mirrors: opt.MirrorsFile = None,
    as_json: opt.AsJson = False,
    root: opt.Root = opt.HERE,
) -> None:
    """List which files a site has to copy to lock and build stacks without the public hosts."""
    from stackcheck.recipe import mirror_list
    from stackcheck.recipe.upstream import Upstream

    if not print_:
        raise ConfigurationError(
            "copying is the work of the site's own tools",
            expected="--print",
            next_step="stackcheck mirror --print",
        )
    upstream = Upstream(mirrors=sites.load_mirrors(mirrors))
    stacks = resolve.load_stacks(root, selectors or ())
    best = {stack.id: platforms.target(stack, platforms.native()).best for stack in stacks}
    found = {
        stack.id: mirror_list.wanted(stack, root / "images", upstream, best[stack.id]) for stack in stacks
    }
    if as_json:
        print_json({name: [dataclasses.asdict(one) for one in files] for name, files in found.items()})
        return
    for name, files in found.items():
        print(name)
        print_table(("kind", "name", "place", "bytes", "sha256", "note"), [_wanted_row(one) for one in files])


def _wanted_row(one: WantedFiles) -> tuple[str, ...]:
    hashes = f"one of {len(one.sha256)}" if len(one.sha256) > 1 else "".join(one.sha256)
    size = "?" if one.size_bytes is None else str(one.size_bytes)
    return one.kind, one.name, one.place, size, hashes or "?", one.note
