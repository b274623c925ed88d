"""The verb `nightly`. In: a host and a publish target.
Out: what the night concluded, and an exit code; or the files of a timer that calls it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from stackcheck.cli import build as building
from stackcheck.cli import options as opt
from stackcheck.cli import report as page
from stackcheck.cli.output import Progress, print_json, print_table
from stackcheck.errors import ConfigurationError, StackcheckError
from stackcheck.files import users
from stackcheck.files.atomic import write_atomically
from stackcheck.files.checkout import exclusive
from stackcheck.oci.store import parse_target

if TYPE_CHECKING:
    from stackcheck.nightly.install import Installation, Kind
    from stackcheck.nightly.planning import NightSettings
    from stackcheck.nightly.state import Plan
    from stackcheck.vendors import Vendor as VendorName

app = opt.new_app()
nightly = opt.new_app()
app.add_typer(nightly, name="nightly")


From = Annotated[
    str | None,
    opt.option(
        "--from TARGET", "Where the images are published: oci:DIR or HOST/REPO.", "`publish` in matrix.yaml"
    ),
]
Labels = Annotated[
    list[str] | None, opt.option("--label NAME", "Label of a self-hosted runner; may be repeated.")
]
Nodes = Annotated[list[str] | None, opt.option("--node NAME", "Name of a Kubernetes node; may be repeated.")]
PodImage = Annotated[
    str,
    opt.option(
        "--image NAME@sha256:DIGEST", "Image of the Kubernetes pods; it needs nsenter and a shell.", "none"
    ),
]
RunBy = Annotated[
    str | None, opt.option("--user NAME", "Who runs it: needs Docker and the signing key.", "this user")
]
Alerts = Annotated[
    Path | None,
    opt.option(
        "--alerts FILE",
        "A file with those who hear of the nights: webhooks, e-mail, a ping.",
        "$STACKCHECK_ALERTS, else the user's alerts.yaml",
        exists=True,
    ),
]
Into = Annotated[Path | None, opt.option("--into DIR", "Write the files there.", "their usual places")]


@nightly.callback(invoke_without_command=True)
def validate(
    context: typer.Context,
    *,
    stack: Annotated[
        list[str] | None, opt.option("--stack PATTERN", "Only tags that match; may be repeated.", "every tag")
    ] = None,
    target: From = None,
    alerts: Alerts = None,
    vendor: opt.Vendor = None,
    force: Annotated[
        bool, opt.option("--force", "Run every image for this host, also if nothing is due.")
    ] = False,
    key: opt.SigningKey = None,
    sign_with: opt.SignWith = None,
    plain_http: opt.PlainHttp = False,
    as_json: opt.AsJson = False,
    dry_run: opt.DryRun = False,
    root: opt.Root = opt.HERE,
) -> None:
    """Validate the published images again on this host, and renew, widen or revoke their certificates.

    An image is due if this host has changed since the last night (kernel, driver, firmware, power cap,
    partition), if its certificate is older than the policy says, or if the last night did not settle it. What
    is not run is listed with its reason. Exit 0: all that was due passed, or nothing was due; 6: an image
    failed; 9: the machine is unfit, or a reboot is pending; 3: no published image is for this host.
    """
    if context.invoked_subcommand:
        return
    from stackcheck.cli.images import settings_of
    from stackcheck.nightly import alert, summary
    from stackcheck.nightly.planning import NightSettings

    progress, people = Progress(), alert.load_addressees(alerts)
    try:
        place = opt.target_of(root.resolve(), target)
        flow = settings_of(root, target=place, key=key, sign_with=sign_with, plain_http=plain_http)
        # A new key would be useless here: no published certificate is signed with it.
        settings = NightSettings(
            flow=flow, key=flow.signer(), vendor=vendor, select=tuple(stack or ()), force=force
        )
        plan = _planned(settings) if dry_run else _run_night(settings, progress)
    except StackcheckError as error:
        if not dry_run:
            alert.send(alert.stopped(error.what, error.exit_code), people, progress)
        raise
    code = 0 if dry_run else summary.exit_code(plan)
    _show(plan, code, as_json=as_json)
    if not dry_run:
        _write_page(settings, progress)
        alert.send(alert.of(plan), people, progress)
    raise typer.Exit(code)


def _planned(settings: NightSettings) -> Plan:
    """What a night would do now; nothing is pulled, run or written."""
    from stackcheck.nightly import night, planning, state

    last = state.load_state(night.folder_of(settings.flow.root) / state.LAST_NIGHT, state.LastNight)
    return planning.make(settings, last, None)


def _run_night(settings: NightSettings, report: Progress) -> Plan:
    from stackcheck.history.history import open_history
    from stackcheck.nightly import night, summary

    root = settings.flow.root
    with exclusive(root, "stackcheck nightly", report):
        engine = building.connected(report, builds=False)
        plan = night.begin(settings, engine, report)
        plan = night.play(plan, settings, engine, open_history(root), report)
        summary.deliver(plan, night.folder_of(root))
        night.finish(plan, settings)
    return plan


def _write_page(settings: NightSettings, report: Progress) -> None:
    """Bring the page up to date. The night is over, so a page that cannot be written changes no exit code."""
    flow = settings.flow
    try:
        written = page.write_page(flow.root, flow.target, flow.key, plain_http=flow.plain_http)
    except StackcheckError as error:
        report(f"the page is not up to date: {error.what}; next: stackcheck report --from {flow.target}")
    else:
        report(f"page: {written}")


def _show(plan: Plan, code: int, *, as_json: bool) -> None:
    from stackcheck.nightly import summary

    if as_json:
        print_json(summary.as_json(plan) | {"exit_code": code})
        return
    print_table(("image", "outcome", "why"), list(summary.rows(plan)))
    for warning in summary.warnings(plan):
        print(f"warning: {warning}", file=sys.stderr)
    print(summary.line(plan))


@nightly.command("alert")
def alert_people(
    *,
    alerts: Alerts = None,
    trial: Annotated[
        bool, opt.option("--trial", "Send a message that is no alarm, to see that it arrives.")
    ] = False,
) -> None:
    """Tell people that a night stopped, as the systemd units do. Exit 2: a message did not arrive."""
    from stackcheck.nightly import alert

    people = alert.load_addressees(alerts)
    result, status = (os.environ.get(f"MONITOR_{name}", "") for name in ("SERVICE_RESULT", "EXIT_STATUS"))
    if not trial and alert.already_told(result, status):
        print(f"the night itself told people: it ended with {status}")
        return
    why = f"the unit of the nights failed: {result or 'unknown'} {status}".rstrip()
    message = alert.stopped(why, 1)
    if trial:
        message = alert.Alert(outcome="trial", line="stackcheck nightly alert --trial", exit_code=0)
    if people == alert.NOBODY or not alert.send(message, people, Progress()):
        raise ConfigurationError(
            "not everybody was told",
            got="no addressee" if people == alert.NOBODY else "see above",
            expected="an alerts.yaml whose addresses answer",
            next_step="correct it (docs/guides/nightly.md, “Alerts”), then: stackcheck nightly alert --trial",
        )
    print("everybody was told")


@nightly.command("install")
def install_timer(
    *,
    systemd: Annotated[bool, opt.option("--systemd", "A timer, a path unit and their service.")] = False,
    cron: Annotated[bool, opt.option("--cron", "Lines for cron.")] = False,
    github: Annotated[bool, opt.option("--github", "A workflow for self-hosted runners.")] = False,
    kubernetes: Annotated[bool, opt.option("--kubernetes", "A CronJob for each node.")] = False,
    label: Labels = None,
    node: Nodes = None,
    image: PodImage = "",
    hour: Annotated[int, opt.option("--hour", "When a night begins.", min=0, max=23)] = 2,
    user: RunBy = None,
    vendor: opt.Vendor = None,
    target: From = None,
    key: opt.SigningKey = None,
    sign_with: opt.SignWith = None,
    alerts: Alerts = None,
    folder: Into = None,
    as_json: opt.AsJson = False,
    dry_run: opt.DryRun = False,
    root: opt.Root = opt.HERE,
) -> None:
    """Write the files of a timer that calls `stackcheck nightly`, and print what to type next.

    The files name this user's signing key, and carry the variables of this shell that name files and folders
    ($XDG_CONFIG_HOME, $DOCKER_HOST, …), so that a night finds what this shell finds. No secret is written.
    """
    from stackcheck.nightly import install

    chosen = {"systemd": systemd, "cron": cron, "github": github, "kubernetes": kubernetes}
    wanted = install.TimerSettings(
        root=root.resolve(),
        program=".venv/bin/stackcheck" if github else str(Path(sys.executable).parent / "stackcheck"),
        user=user or users.name(),
        # On GitHub the key is a secret, which the workflow itself hands over.
        options=_passed_on(target, None if github else opt.key_path(key, sign_with), sign_with, vendor),
        alerts=("--alerts", str(alerts.absolute())) if alerts and not github else (),
        hour=hour,
        labels=tuple(label or ()),
        nodes=tuple(node or ()),
        image=image,
        environment=() if github else install.carried(os.environ),
    )
    made = install.installation(_kind([name for name, named in chosen.items() if named]), wanted, folder)
    write_installation(made, as_json=as_json, dry_run=dry_run)


def _kind(named: list[str]) -> Kind:
    if len(named) != 1:
        raise ConfigurationError(
            "name one kind of timer",
            got=", ".join(named) or "none",
            expected="one of --systemd, --cron, --github, --kubernetes",
            next_step="stackcheck nightly install --systemd --dry-run",
        )
    return cast("Kind", named[0])


def _passed_on(
    target: str | None, key: Path | None, sign_with: str | None, vendor: VendorName | None
) -> tuple[str, ...]:
    """The options of the nights that the timer starts."""
    return (
        *(("--from", parse_target(target)) if target else ()),
        *(("--key", str(key.absolute())) if key else ()),
        *(("--sign-with", sign_with) if sign_with else ()),
        *(("--gpu-vendor", vendor) if vendor else ()),
    )


def write_installation(made: Installation, *, as_json: bool, dry_run: bool) -> None:
    """Write the files of an installation, or show them, and what to type next."""
    for path, text in made.files.items():
        if not dry_run:
            write_atomically(path, (text.encode(),))
        if not as_json:
            print(f"{'would write' if dry_run else 'wrote'} {path}")
            print("".join(f"    {line}\n" for line in text.splitlines()) if dry_run else "", end="")
    if as_json:
        texts = {str(path): text for path, text in made.files.items()}
        print_json({"written": not dry_run, "files": texts, "next": list(made.next_steps)})
        return
    for step in made.next_steps:
        print(f"next: {step}")
