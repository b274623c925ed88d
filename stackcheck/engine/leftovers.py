"""Containers that must not stay. In: a client and a name, or the labels of all. Out: they are gone.

A busy daemon refuses a removal at first. A process that SIGKILL ended removes nothing: so each container says
in its labels which process made it, and the next run on the same machine removes those of dead processes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from stackcheck.errors import EngineError

if TYPE_CHECKING:
    from docker import APIClient, DockerClient
    from docker.models.containers import Container

LABEL = "org.stackcheck.run"  # the id of the process
OWNER = "org.stackcheck.owner"  # the same, with what makes it unique
REMOVAL_TIMEOUT_S = 60.0  # a daemon gives a container ten seconds to die, then it refuses to remove it
REMOVAL_POLL_S = 0.5
_STATE, _STARTED = 0, 19  # of the fields behind a process's name in /proc/PID/stat: proc(5)


def labels() -> dict[str, str]:
    """The labels of a container that this process makes."""
    place, started = _place(), _started(os.getpid())
    unique = {OWNER: f"{place} {os.getpid()} {started}"} if place and started else {}
    return {LABEL: str(os.getpid())} | unique


def remove(
    api: APIClient, name: str, volumes: Iterable[str] = (), *, patience_s: float = REMOVAL_TIMEOUT_S
) -> None:
    """Remove a container and its volumes, by name: what made it may not have said its id.

    Raises:
        EngineError: The daemon answers, but keeps the container.
    """
    import docker

    # If the daemon died, the container is gone too, and the error of the run itself reports that.
    with contextlib.suppress(docker.errors.DockerException, OSError):
        _remove_container(api, name, patience_s)
    for volume in volumes:
        with contextlib.suppress(docker.errors.DockerException, OSError):
            api.remove_volume(volume, force=True)


def _remove_container(api: APIClient, name: str, patience_s: float) -> None:
    import docker

    end = time.monotonic() + patience_s
    while True:
        try:
            api.remove_container(name, v=True, force=True)
        except docker.errors.NotFound:
            return
        except docker.errors.APIError as error:  # it does not die yet, or its removal is under way
            if time.monotonic() >= end:
                raise EngineError(
                    "the engine does not remove a container",
                    where=name,
                    got=str(error.explanation or error),
                    next_step=f"docker rm --force {name}",
                ) from error
        else:
            return
        time.sleep(REMOVAL_POLL_S)


def sweep(client: DockerClient) -> int:
    """Remove the containers of processes of this machine that are dead; how many there were."""
    place = _place()
    if not place:
        return 0
    made = client.containers.list(all=True, filters={"label": OWNER}, ignore_removed=True)
    left = [each for each in made if _is_left(each.labels[OWNER], place)]
    for container in left:
        with contextlib.suppress(EngineError):  # it does not stop a new run, which is not about it
            remove(client.api, str(container.name), _volumes(container), patience_s=0)
    return len(left)


def _volumes(container: Container) -> list[str]:
    """The volumes that `container.run` named; the engine removes the others with the container."""
    mounts = container.attrs.get("Mounts") or ()
    names = [str(mount.get("Name") or "") for mount in mounts]
    return [name for name in names if name.startswith(f"{container.name}-")]


def _is_left(owner: str, place: str) -> bool:
    """Whether a process of this machine made it, and is dead. Another machine may use the same daemon."""
    where, _, process = owner.partition(" ")
    pid, _, started = process.partition(" ")
    return where == place and pid.isdecimal() and not _lives(int(pid), started)


def _lives(pid: int, started: str) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    return _started(pid) in {started, None}  # else another process has the id now


def _place() -> str | None:
    """This boot of this kernel, and the namespace in which process ids count; None where no /proc tells."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115  # a link to no path
    except OSError:
        return None


def _started(pid: int) -> str | None:
    """When a process started, in ticks since the boot; "" if it is dead, None if nothing tells."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return "" if fields[_STATE] in {"Z", "X"} else fields[_STARTED]  # a zombie makes and removes nothing
