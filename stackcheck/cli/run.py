"""The verb `run`. In: a reference and a command. Out: the command in the verified image, as if it ran here.

Its exit code is the command's; 125 is an error of stackcheck, 126 and 127 a command that cannot be started.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated

import typer

from stackcheck import vendors
from stackcheck.certificate.job import SHM_SIZE_BYTES, STOP_TIMEOUT_S, Network, Openings
from stackcheck.cli import options as opt
from stackcheck.cli.consumer import Conditions, conditional, verified_for
from stackcheck.cli.output import Progress
from stackcheck.engine.client import Engine
from stackcheck.engine.container import Mount
from stackcheck.engine.launch_lines import NAME, Form, LaunchedJob, render
from stackcheck.errors import ConfigurationError, FileError
from stackcheck.vendors import Vendor

if TYPE_CHECKING:
    from stackcheck.certificate.verify import Verified

app = opt.new_app()

UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_USER = re.compile(r"\d+(:\d+)?")


Env = Annotated[
    list[str] | None,
    opt.option("--env -e NAME[=VALUE]", "A variable; without a value, that of this shell.", "none"),
]
EnvFile = Annotated[
    list[Path] | None, opt.option("--env-file FILE", "Variables, one a line.", "none", exists=True)
]
Volumes = Annotated[
    list[str] | None, opt.option("--volume -v HERE:THERE[:ro]", "One more folder or file.", "none")
]
NetworkKind = Annotated[Network, opt.option("--network", "Whether it has a network.")]
Gpus = Annotated[
    str | None,
    opt.option(
        "--gpus GPUS",
        "`none`, how many, or ids with commas; one id is device=3.",
        "those of this shell or Slurm job",
    ),
]
ShmSize = Annotated[str, opt.option("--shm-size SIZE", "Limit of /dev/shm: 512m or 16g.")]
Workdir = Annotated[str | None, opt.option("--workdir -w PATH", "Where it starts.", "the current folder")]
User = Annotated[str | None, opt.option("--user -u UID[:GID]", "Who it is.", "you")]
StopTimeout = Annotated[
    float, opt.option("--stop-timeout SECONDS", "Time to end after a signal; then it is killed.", min=0)
]
Printed = Annotated[
    Form | None,
    opt.option(
        "--print", "Print a line or a manifest for a job of your own; run nothing.", "run the command here"
    ),
]
JobName = Annotated[str, opt.option("--name NAME", "With --print: the job's name.")]
Nodes = Annotated[int, opt.option("--nodes", "With --print: nodes of the job.", min=1)]
Command = Annotated[list[str], opt.argument("COMMAND", "What to run in the image; write -- before it.")]


@app.command("run")
@conditional
def run_image(
    reference: opt.Ref,
    command: Command,
    *,
    env: Env = None,
    env_file: EnvFile = None,
    volume: Volumes = None,
    network: NetworkKind = "none",
    gpus: Gpus = None,
    shm_size: ShmSize = f"{SHM_SIZE_BYTES >> 30}g",
    workdir: Workdir = None,
    user: User = None,
    stop_timeout: StopTimeout = STOP_TIMEOUT_S,
    form: Printed = None,
    nodes: Nodes = 1,
    name: JobName = NAME,
    conditions: Conditions,
    dry_run: opt.DryRun = False,
) -> None:
    """Verify an image, then run a command in it as `docker run` does; only the current folder is mounted.

    Exits with the command's code; 125: an error of stackcheck, 126 or 127: the command cannot be started.
    """
    verified = verified_for(reference, conditions)
    openings = Openings(
        env=_visible(_vendor(verified), gpus) | _variables(env or [], env_file or []),
        volumes=tuple(map(_volume, volume or [])),
        network=network,
        shm_size_bytes=_bytes(shm_size),
        workdir=_inside(workdir, "--workdir") if workdir else None,
        user=_user(user),
        stop_timeout_s=stop_timeout,
    )
    if form:
        print(
            render(form, replace(_job(verified, command, conditions.devices, nodes), name=_label(name))),
            end="",
        )
    elif dry_run:
        words, folder = " ".join(command), Path.cwd()
        vendor = _vendor(verified)
        print(f"{verified.reference}: run {words} with {folder} mounted (vendor {vendor})")
    else:
        code = _run(
            verified, command, openings, without_gpus=gpus == "none", plain_http=conditions.plain_http
        )
        raise typer.Exit(code)


def _vendor(verified: Verified) -> Vendor:
    found: Vendor = verified.facts["host"]["vendor"]
    return found


def _run(
    verified: Verified, command: list[str], openings: Openings, *, without_gpus: bool, plain_http: bool
) -> int:
    from stackcheck.certificate import job, pull

    engine = Engine.connect()
    name = pull.pull(verified, engine, report=Progress(), plain_http=plain_http)
    vendor: Vendor = "cpu" if without_gpus else _vendor(verified)
    needs = vendors.module(vendor).container_needs()
    return job.run(name, engine, command, needs=needs, folder=Path.cwd(), openings=openings)


def _visible(vendor: Vendor, gpus: str | None) -> dict[str, str]:

    return {} if gpus == "none" else vendors.chosen_devices(vendor, gpus, os.environ)


def _variables(given: list[str], files: list[Path]) -> dict[str, str]:
    """The variables of files, then those of options, which win; one without a value is this shell's."""
    lines = [(str(path), line.strip()) for path in files for line in _lines(path)]
    found: dict[str, str] = {}
    for where, text in [*lines, *(("--env", text) for text in given)]:
        name, has_value, value = text.partition("=")
        if not name or any(char.isspace() or char == "\0" for char in name):
            raise ConfigurationError(
                "this is no variable", where=where, got=repr(text), expected="NAME=VALUE, or NAME"
            )
        if has_value or name in os.environ:
            found[name] = value if has_value else os.environ[name]
    return found


def _lines(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FileError("the file of variables cannot be read", where=str(path), got=str(error)) from error
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def _volume(text: str) -> Mount:
    """HERE:THERE[:ro|rw]; what is not there is refused: the engine would make a folder of root's."""
    here, colon, rest = text.partition(":")
    there, _, mode = rest.partition(":")
    source = Path(here).expanduser().absolute()
    if not here or not colon or mode not in {"", "ro", "rw"} or not source.exists():
        raise ConfigurationError(
            "this cannot be mounted",
            where="--volume",
            got=text if source.exists() else f"{text}: {source} is not there",
            expected="HERE:THERE, or HERE:THERE:ro, with a folder or file of this host",
        )
    return Mount(source=source, target=_inside(there, "--volume"), read_only=mode == "ro")


def _inside(path: str, where: str) -> str:
    if not PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or path == "/":
        raise ConfigurationError(
            "a place in the container is named by its whole path", where=where, got=path, expected="/a/path"
        )
    return path


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)([bkmgt]?)b?", text.lower())
    if not found or not int(found[1]):
        raise ConfigurationError("this is no size", where="--shm-size", got=text, expected="512m or 16g")
    return int(found[1]) * UNITS[found[2]]


def _label(text: str) -> str:
    """A name that Kubernetes allows for a Job and its Service."""
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,51}[a-z0-9])?", text):
        raise ConfigurationError(
            "this cannot name a job",
            where="--name",
            got=text,
            expected="a-z, 0-9 and -, at most 53 characters",
        )
    return text


def _user(text: str | None) -> str | None:
    if text is not None and not _USER.fullmatch(text):
        raise ConfigurationError(
            "a user is a number: an image has names of its own",
            where="--user",
            got=text,
            expected="UID or UID:GID",
            next_step=f"--user $(id -u {text})",
        )
    return text


def _job(verified: Verified, command: list[str], devices: int | None, nodes: int) -> LaunchedJob:
    from stackcheck.certificate import pull

    host = verified.facts["host"]
    in_registry = not verified.reference.target.startswith("oci:")
    count = len(host["devices"])
    driver = f", driver {verified.driver}" if verified.driver else ""
    return LaunchedJob(
        image=str(verified.reference) if in_registry else pull.local_name(verified),
        command=tuple(command),
        words=vendors.module(host["vendor"]).launch_words(),
        devices=devices or count,
        nodes=nodes,
        certified_for=f"{verified.device_model} x{count}{driver}",
        in_registry=in_registry,
    )
