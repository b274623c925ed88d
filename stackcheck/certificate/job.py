"""A user's job in a pulled image: closed, but for what the user opens by name.

In: a pulled image, a command, `Openings`. Out: the exit code of the command. It sees one folder and the
devices of the host, has no network, and cannot change the image.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from stackcheck import vendors
from stackcheck.engine.client import Engine, Mount, RunSpec
from stackcheck.engine.container import USER_ENV
from stackcheck.engine.devices import with_devices
from stackcheck.vendors import ContainerNeeds

WORKSPACE = "/workspace"
SHM_SIZE_BYTES = 16 << 30  # an upper limit of a tmpfs; nothing is reserved
STOP_TIMEOUT_S = 60.0  # a trainer writes a checkpoint
Network = Literal["none", "bridge", "host"]


@dataclass(frozen=True, kw_only=True)
class Openings:
    """What a user opens.

    Attributes:
        workdir: Where the command starts; None: the current folder, which is mounted as /workspace.
    """

    env: Mapping[str, str] = field(default_factory=dict)  # variables beside those that every job has
    volumes: tuple[Mount, ...] = ()  # folders and files of the host beside the current folder
    network: Network = "none"
    shm_size_bytes: int = SHM_SIZE_BYTES  # the limit of /dev/shm
    workdir: str | None = None
    user: str | None = None  # UID[:GID]; None: the user who runs this, so that what it writes is the user's
    stop_timeout_s: float = STOP_TIMEOUT_S  # how long the command has to end after a signal


CLOSED = Openings()


def container(
    name: str, command: Sequence[str], needs: ContainerNeeds, folder: Path, openings: Openings = CLOSED
) -> RunSpec:
    """The container of a command, with one folder of the host, its devices, and what is opened."""
    return with_devices(
        RunSpec(
            image=name,
            command=tuple(command),
            user=openings.user or f"{os.getuid()}:{os.getgid()}",
            env={**dict(vendors.site_environment()), **dict(needs.env), **USER_ENV, **openings.env},
            mounts=(Mount(source=folder, target=WORKSPACE, read_only=False), *openings.volumes),
            shm_size_bytes=openings.shm_size_bytes,
            network=openings.network,
            workdir=openings.workdir or WORKSPACE,
        ),
        needs,
    )


def run(
    name: str,
    engine: Engine,
    command: Sequence[str],
    *,
    needs: ContainerNeeds,
    folder: Path,
    openings: Openings = CLOSED,
) -> int:
    """Run a command in a pulled image as if it ran here, `folder` as /workspace; return its exit code."""
    spec = container(name, command, needs, folder, openings)
    return engine.run_here(spec, stop_timeout_s=openings.stop_timeout_s)
