"""The files of a timer that calls `stackcheck nightly`: systemd, cron, GitHub Actions, Kubernetes.

In: which of them, and where stackcheck is. Out: the files, and the commands that start the timer. Nothing is
started here: who runs what on a machine is the operator's to decide.
"""

import hashlib
import json
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jinja2 import Environment, PackageLoader, StrictUndefined

from stackcheck import mirrors
from stackcheck.certificate import passphrase
from stackcheck.errors import ConfigurationError
from stackcheck.imaging.wheels import wheel_cache
from stackcheck.nightly import alert

Kind = Literal["systemd", "cron", "github", "kubernetes"]
UNIT = "stackcheck-nightly"
# Kind -> template -> where the file goes; `{root}` is the checkout.
FILES: Mapping[Kind, Mapping[str, str]] = {
    "systemd": {
        f"{UNIT}.{kind}": f"/etc/systemd/system/{UNIT}.{kind}" for kind in ("service", "timer", "path")
    }
    | {f"{UNIT}-failed.service": f"/etc/systemd/system/{UNIT}-failed.service"},
    "cron": {"crontab": f"/etc/cron.d/{UNIT}"},
    "github": {"workflow.yml": f"{{root}}/.github/workflows/{UNIT}.yml"},
    "kubernetes": {"cronjob.yaml": f"{{root}}/build/nightly/{UNIT}.yaml"},
}
NEXT: Mapping[Kind, tuple[str, ...]] = {
    "systemd": (
        "systemctl daemon-reload",
        f"systemctl enable --now {UNIT}.timer {UNIT}.path",
        f"systemctl list-timers {UNIT}.timer",
    ),
    "cron": ("nothing: cron reads the folder each minute",),
    "github": (
        "git add {path} && git commit -m 'Validate the images every night' {path} && git push",
        "add the secret STACKCHECK_KEY with the content of the signing key",
    ),
    "kubernetes": ("kubectl apply --namespace stackcheck -f {path}",),
}
# What stands unquoted in a unit file, a crontab, a shell and YAML alike.
_PLAIN = re.compile(r"[A-Za-z0-9_./:@+=-]+")
# What names a file, a folder or the engine in the shell, and a night reads.
# No secret: unit files can be read by all.
CARRIED = (
    *(f"XDG_{kind}_HOME" for kind in ("CONFIG", "CACHE", "DATA", "STATE")),
    *("DOCKER_HOST", "DOCKER_CONFIG", "PGPASSFILE", passphrase.FILE),
    *(alert.VARIABLE, mirrors.VARIABLE, wheel_cache.VARIABLE),
)
_DIGEST = re.compile(r".+@sha256:[0-9a-f]{64}")
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class TimerSettings:
    """What the files say.

    Attributes:
        environment: Variables of the shell that name files and folders (`CARRIED`); not on GitHub.
    """

    root: Path
    program: str  # the stackcheck that is called there
    user: str  # the user that runs it; needs Docker and the signing key
    options: tuple[str, ...] = ()  # options of `stackcheck nightly`
    alerts: tuple[str, ...] = ()  # the option that names who hears of the nights
    hour: int = 2  # when a night begins, in the machine's time zone; UTC on GitHub
    labels: tuple[str, ...] = ()  # labels of the self-hosted runners, one for each machine (GitHub)
    nodes: tuple[str, ...] = ()  # names of the nodes (Kubernetes)
    image: str = ""  # any image with nsenter and a shell, by digest (Kubernetes)
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Installation:
    """Files by path, and what to type next."""

    files: Mapping[Path, str]
    next_steps: tuple[str, ...]


def installation(kind: Kind, wanted: TimerSettings, folder: Path | None = None) -> Installation:
    """The files of one kind of timer; `folder` takes them instead of their usual places. Pure.

    Raises:
        ConfigurationError: A path, label or node has a character that such a file cannot hold, or is missing.
    """
    _check(kind, wanted)
    found = {}
    for template, usual in FILES[kind].items():
        path = Path(usual.format(root=wanted.root))
        found[folder / path.name if folder else path] = render(template, **_values(wanted))
    first = next(iter(found))
    return Installation(files=found, next_steps=tuple(step.format(path=first) for step in NEXT[kind]))


def minute(name: str) -> int:
    """A minute for each machine, so that a fleet does not start at one moment."""
    return hashlib.sha256(name.encode()).digest()[0] % 60


def carried(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The variables of this shell that its nights need too."""
    return tuple((name, environ[name]) for name in CARRIED if environ.get(name))


def render(template: str, **values: object) -> str:
    """The text of a template of this folder."""
    # GitHub's expressions are ${{ … }}, so ours have other brackets. The output is no HTML.
    environment = Environment(  # noqa: S701
        loader=PackageLoader("stackcheck.nightly"),
        variable_start_string="<<",
        variable_end_string=">>",
        block_start_string="<%",
        block_end_string="%>",
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(values)


def _values(wanted: TimerSettings) -> dict[str, object]:
    return {
        **vars(wanted),
        "options": "".join(f" {option}" for option in (*wanted.options, *wanted.alerts)),
        "alerts": "".join(f" {option}" for option in wanted.alerts),
        "minute": minute(platform.node()),
        "labels": json.dumps(list(wanted.labels)),
        "nodes": [{"name": name, "label": _label(name), "minute": minute(name)} for name in wanted.nodes],
        "sandbox": render("sandbox.conf"),
    }


def _label(node: str) -> str:
    """A node's name as part of a CronJob's name: at most 52 characters, lower case, no dot at its end."""
    short = hashlib.sha256(node.encode()).hexdigest()[:6]
    return f"{re.sub(r'[^a-z0-9-]', '-', node.lower())[:24].strip('-')}-{short}"


def require_plain(texts: Mapping[str, str]) -> None:
    """Refuse what cannot stand unquoted in a unit file, a shell and YAML; by the name of its option.

    Raises:
        ConfigurationError: One has another character.
    """
    for where, text in texts.items():
        if not _PLAIN.fullmatch(text):
            raise ConfigurationError(
                "a timer's files cannot hold this text",
                where=where,
                got=repr(text),
                expected="letters, digits and _ . / : @ + = -",
                next_step="move the checkout to a path without blanks",
            )


def _check(kind: Kind, wanted: TimerSettings) -> None:
    plain = {"--root": str(wanted.root), "the program": wanted.program, "--user": wanted.user}
    plain |= {f"option {option}": option for option in (*wanted.options, *wanted.alerts)}
    plain |= {f"${name}": value for name, value in wanted.environment}
    require_plain(plain)
    if kind == "kubernetes" and not (_PLAIN.fullmatch(wanted.image) and _DIGEST.fullmatch(wanted.image)):
        raise ConfigurationError(
            "the privileged pods need an image by digest",
            where="--image",
            got=wanted.image or "none",
            expected="NAME@sha256:DIGEST of any image with nsenter and a shell, such as debian:12-slim",
            next_step="docker inspect -f '{{index .RepoDigests 0}}' debian:12-slim",
        )
    needed = {"github": ("--label", wanted.labels), "kubernetes": ("--node", wanted.nodes)}
    option, names = needed.get(kind, ("", ("none",)))
    if not names or not all(_LABEL.fullmatch(name) for name in names):
        raise ConfigurationError(
            "each machine needs a name",
            where=option,
            got=", ".join(names) or "none",
            expected=f"{option} NAME for each machine: letters, digits, '-', '_' and '.'",
            next_step=f"stackcheck nightly install --{kind} {option} gpu-1 {option} gpu-2",
        )
