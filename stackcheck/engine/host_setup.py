"""Give a bare host a container engine: the distribution's packages and a running daemon.

In: a Debian or Ubuntu host, root, its own apt sources. Out: a daemon that answers, with BuildKit and the
containerd image store. An engine that is already there, or that `DOCKER_HOST` names, is not touched. On a
host without an init system stackcheck starts the daemon itself and writes its pid to `PID_FILE`.
"""

import contextlib
import dataclasses
import grp
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stackcheck.engine import apt, container
from stackcheck.errors import EngineError

DAEMON_FILE = Path("/etc/docker/daemon.json")
# One store for build, run and save: an image keeps its manifest digest from the build to the registry.
DAEMON_SETTINGS = {"features": {"containerd-snapshotter": True}}
INSTALL_TIMEOUT_S = 600.0
# Debian 12's own docker.io (20.10) has no buildx and no containerd store. Debian 13's client and daemon run
# on 12's C library, containerd and runc; every other package of 13 is pinned away.
DEBIAN_12 = "bookworm"
DEBIAN_12_TAKES_FROM = "trixie"
# Docker's own packages, and Microsoft's, by part. For the distribution's packages apt would remove these.
OTHER_PACKAGES = {
    "docker-ce": {"dockerd": "docker-ce", "docker": "docker-ce-cli", "buildx": "docker-buildx-plugin"},
    "moby-engine": {"dockerd": "moby-engine", "docker": "moby-cli", "buildx": "moby-buildx"},
}
PODMAN_AS_DOCKER = "podman-docker"
DOCTOR = "sudo stackcheck doctor --fix"
SOCKET = Path("/var/run/docker.sock")
PID_FILE = Path("/run/stackcheck-dockerd.pid")
LOG_FILE = Path("/var/log/stackcheck-dockerd.log")
INIT_FOLDER = Path("/run/systemd/system")
START_TIMEOUT_S = 60.0
# What stays of the build cache at the first try: enough for the stages of most builds of one matrix entry.
CACHE_KEPT_BYTES = 10 * 10**9
PRUNE_TIMEOUT_S = 600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """What to install on this host and from where."""

    packages: tuple[str, ...]
    second_suite: str | None = None

    def commands(self) -> tuple[str, ...]:
        """The same as commands to type."""
        install = f"apt-get install -y --no-install-recommends {' '.join(self.packages)}"
        lines = [install] if self.packages else []
        if self.second_suite:
            lines.insert(0, f"# with a second source of {self.second_suite}, pinned to these packages")
        return (DOCTOR, "or, by hand:", *lines, "dockerd &")


def ensure_engine(report: Callable[[str], None], *, builds: bool = True) -> None:
    """Make sure that a daemon answers and, if `builds`, that the client can build.

    Raises:
        EngineError: `DOCKER_HOST` names a daemon that does not answer, or nothing may be installed here; the
            message has the commands to type.
    """
    if socket_answers() and (not builds or has_buildx()):
        return
    if os.environ.get("DOCKER_HOST") and not socket_answers():
        raise EngineError(
            "the daemon that DOCKER_HOST names does not answer",
            where=os.environ["DOCKER_HOST"],
            next_step="start it, or unset DOCKER_HOST to use the local one",
        )
    if os.geteuid() != 0:
        raise missing_engine("no daemon answers, and only root may install or start one")
    recipe = recipe_for_host()
    if not (shutil.which("dockerd") and has_buildx()):
        install(recipe, report)
    if not socket_answers():
        start_daemon(report)


def missing_engine(found: str) -> EngineError:
    """The error for a user without an engine, with the commands that give one."""
    there = way_to_what_is_there()
    return EngineError(
        "there is no container engine that this user can reach",
        where=os.environ.get("DOCKER_HOST"),
        got=found,
        expected="a Docker daemon with buildx",
        next_step=there or "\n    ".join(recipe_for_host().commands()),
    )


def way_to_what_is_there() -> str | None:
    """How this user reaches an engine that is installed and does not answer; None where none is installed.

    Raises:
        EngineError: podman is in Docker's place.
    """
    if host := os.environ.get("DOCKER_HOST"):
        return f"start the daemon at {host}, or unset DOCKER_HOST to use the local one"
    if PODMAN_AS_DOCKER in _installed([PODMAN_AS_DOCKER]):
        raise podman_instead(PODMAN_AS_DOCKER)
    if os.geteuid() != 0 and SOCKET.exists() and not os.access(SOCKET, os.W_OK):
        group = _name_of_group(SOCKET.stat().st_gid)
        return f'sudo usermod --append --groups {group} "$USER", then log in again; its members are as root'
    if shutil.which("dockerd") and has_buildx():
        return "sudo systemctl start docker" if INIT_FOLDER.is_dir() else DOCTOR
    return None


def _name_of_group(number: int) -> str:
    """The name of a group of this host, or its number if no file names it."""
    with contextlib.suppress(KeyError):
        return grp.getgrgid(number).gr_name
    return str(number)


def has_buildx() -> bool:
    """Whether the Docker client on PATH has the buildx plugin; podman's `docker` only has the word."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(["docker", "buildx", "version"], capture_output=True, check=False, timeout=30)
        return done.returncode == 0 and b"docker/buildx" in done.stdout
    return False


def recipe_for_host() -> Recipe:
    """What this distribution needs for an engine; where it has Docker's own packages, what these lack.

    Raises:
        EngineError: stackcheck cannot set up an engine on this distribution, or podman is in Docker's place.
    """
    there = _installed([*OTHER_PACKAGES, PODMAN_AS_DOCKER])
    if PODMAN_AS_DOCKER in there:
        raise podman_instead(PODMAN_AS_DOCKER)
    for name, parts in OTHER_PACKAGES.items():
        if name in there:
            lacks = {part for part in ("dockerd", "docker") if not shutil.which(part)}
            lacks |= set() if has_buildx() else {"buildx"}
            return Recipe(packages=tuple(package for part, package in parts.items() if part in lacks))
    release = apt.host_release()
    name, codename = release.get("ID", "unknown"), release.get("VERSION_CODENAME", "")
    if name == "debian" and codename == DEBIAN_12:
        return Recipe(
            packages=("docker.io", "docker-cli", "docker-buildx"), second_suite=DEBIAN_12_TAKES_FROM
        )
    if name == "debian":
        return Recipe(packages=("docker.io", "docker-cli", "docker-buildx"))
    if name == "ubuntu":
        return Recipe(packages=("docker.io", "docker-buildx"))
    raise EngineError(
        "there is no container engine, and stackcheck cannot set one up on this distribution",
        got=release.get("PRETTY_NAME", name),
        expected="Debian 12 or newer, or Ubuntu 22.04 or newer",
        next_step="install Docker with buildx as your distribution documents it, then run: stackcheck doctor",
    )


def _installed(packages: Sequence[str]) -> set[str]:
    """Which of these packages are installed; none where there is no dpkg."""
    asked = ["dpkg-query", "--show", "--showformat=${Package} ${db:Status-Status}\n", *packages]
    try:
        done = subprocess.run(asked, capture_output=True, errors="replace", check=False, timeout=30)
    except OSError:
        return set()
    return {line.split()[0] for line in done.stdout.splitlines() if line.endswith(" installed")}


def refuse_podman(answers: Mapping[str, Any]) -> None:
    """Refuse what podman's socket answers to `docker version`.

    Raises:
        EngineError: It is podman's.
    """
    for part in answers.get("Components") or ():
        if str(part.get("Name", "")).startswith("Podman"):
            raise podman_instead(f"podman {part.get('Version')} answers at Docker's socket")


def podman_instead(found: str) -> EngineError:
    """The error for a host on which podman has Docker's place."""
    steps = ["unset DOCKER_HOST"] if os.environ.get("DOCKER_HOST") else []
    if _installed([PODMAN_AS_DOCKER]):
        steps.append(f"sudo apt-get remove {PODMAN_AS_DOCKER}")
    elif not steps:
        steps.append(f"stop what answers at {SOCKET}")
    return EngineError(
        "podman is in the place of Docker, and stackcheck builds and tests with Docker",
        where=os.environ.get("DOCKER_HOST"),
        got=found,
        expected="a Docker daemon with buildx; podman may stay beside it, and runs what is published: "
        "stackcheck run REF --print podman",
        next_step="; ".join([*steps, DOCTOR]),
    )


def install(recipe: Recipe, report: Callable[[str], None]) -> None:
    """Install the distribution's packages, beside a second pinned source where the recipe names one."""
    report(f"installing {', '.join(recipe.packages)} with apt-get: usually 20 to 60 s")
    if recipe.second_suite:
        add_pinned_source(recipe.second_suite, recipe.packages)
    ours = not DAEMON_FILE.exists()
    if ours:  # before the packages, as they start the service where there is an init
        DAEMON_FILE.parent.mkdir(parents=True, exist_ok=True)
        DAEMON_FILE.write_text(json.dumps(DAEMON_SETTINGS) + "\n", encoding="utf-8")
    try:
        apt_install(recipe.packages)
    except EngineError:
        if ours:  # an engine that is installed later must not get our settings
            DAEMON_FILE.unlink()
        raise


def add_pinned_source(suite: str, packages: Sequence[str], folder: Path = apt.APT) -> None:
    """Add the archive's other suite for these packages alone; it outlives the run, so updates reach them."""
    source = apt.for_suite(suite, folder=folder)
    (folder / "sources.list.d" / "stackcheck-engine.sources").write_text(source.text(), encoding="utf-8")
    pins = (
        f"Package: {' '.join(packages)}\nPin: release n={suite}\nPin-Priority: 990\n\n"
        f"Package: *\nPin: release n={suite}\nPin-Priority: -1\n"
    )
    (folder / "preferences.d" / "stackcheck-engine").write_text(pins, encoding="utf-8")


def install_packages(packages: Sequence[str], report: Callable[[str], None], *, why: str) -> None:
    """Install packages of the host's release.

    Raises:
        EngineError: Not root, or apt failed.
    """
    if os.geteuid() != 0:
        raise EngineError(
            f"{' and '.join(packages)} is not installed, and only root may install it",
            expected=why,
            next_step=f"sudo apt-get install -y {' '.join(packages)}",
        )
    report(f"installing {', '.join(packages)} with apt-get ({why}): usually 10 to 30 s")
    apt_install(packages)


def apt_install(packages: Sequence[str]) -> None:
    """`apt-get update` and `install`, with apt's last lines in the error."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    lock = ("-o", "DPkg::Lock::Timeout=300")  # another apt run: wait for it
    for command in (
        ["apt-get", *lock, "update", "-q"],
        ["apt-get", *lock, "install", "-q", "-y", "--no-install-recommends", *packages],
    ):
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                errors="replace",
                check=False,
                env=environment,
                timeout=INSTALL_TIMEOUT_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EngineError("apt-get did not finish", got=str(error), where=" ".join(command)) from error
        if done.returncode:
            tail = (done.stdout + done.stderr).strip().splitlines()[-12:]
            raise EngineError(
                "apt-get failed",
                where=" ".join(command),
                got="\n    ".join(tail),
                next_step="fix this host's apt sources, then run the command above",
            )


def socket_answers(timeout_s: float = 5.0) -> bool:
    """Whether Docker's daemon answers at `DOCKER_HOST`, or else at the default socket.

    Raises:
        EngineError: podman answers in its place, or docker's settings cannot be read.
    """
    import docker

    gone = (docker.errors.DockerException, OSError)  # also of requests
    with contextlib.suppress(*gone), contextlib.closing(container.opened(timeout_s)) as client:
        refuse_podman(client.version())
        return True
    return False


def start_daemon(report: Callable[[str], None]) -> None:
    """Start the service where there is an init, else `dockerd` by hand with its own pid file and log.

    Raises:
        EngineError: It did not answer in time; the message has the log's last lines.
    """
    process = None
    if INIT_FOLDER.is_dir():
        report("starting the docker service: usually 2 to 10 s")
        subprocess.run(["systemctl", "start", "docker"], check=False, timeout=START_TIMEOUT_S)
    else:
        report(f"starting dockerd (pid file {PID_FILE}, log {LOG_FILE}): usually 2 to 10 s")
        process = _spawn_daemon()
    deadline = time.monotonic() + START_TIMEOUT_S
    while not socket_answers(timeout_s=2.0):
        # The process is asked, not its name: a program that is still being loaded does not have its name yet.
        if time.monotonic() > deadline or (process and process.poll() is not None):
            raise EngineError(
                "dockerd did not start",
                where=str(LOG_FILE),
                got="\n    ".join(_log_tail()),
                next_step=f"read {LOG_FILE}, fix what it names, then run: stackcheck doctor --fix",
            )
        time.sleep(0.2)


def _spawn_daemon() -> subprocess.Popen[bytes]:
    with LOG_FILE.open("ab") as log:
        # A session of its own: Ctrl-C in the terminal that started it must not end it.
        process = subprocess.Popen(
            ["dockerd"], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    PID_FILE.write_text(f"{process.pid}\n", encoding="utf-8")
    return process


def _log_tail(lines: int = 8) -> list[str]:
    if not LOG_FILE.exists():
        return []
    return LOG_FILE.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]


def free_build_cache(enough: Callable[[], bool], report: Callable[[str], None]) -> None:
    """Remove build cache, the oldest first, until there is `enough` room.

    Only of a daemon that this tool started: the cache of another may be hours of work, and its owner decides.

    Raises:
        EngineError: The daemon did not remove it.
    """
    for kept in (CACHE_KEPT_BYTES, 0):
        if enough() or daemon_pid() is None:
            return
        report(f"disk space is short: removing build cache until {kept / 1e9:.0f} GB of it are left")
        command = ["docker", "builder", "prune", "--all", "--force", f"--keep-storage={kept}"]
        try:
            done = subprocess.run(
                command, capture_output=True, errors="replace", check=False, timeout=PRUNE_TIMEOUT_S
            )
            problem = done.stderr.strip() if done.returncode else None
        except subprocess.TimeoutExpired as error:
            problem = f"no end within {error.timeout:g} s"
        if problem is not None:
            raise EngineError(
                "the build cache was not removed",
                where=" ".join(command),
                got=problem,
                next_step="free disk space by hand, then run: stackcheck doctor --fix",
            )


def stop_daemon(timeout_s: float = 30.0) -> bool:
    """Stop the dockerd that this tool started, by its pid; False if it does not run."""
    pid = daemon_pid()
    if pid is None:
        return False
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while daemon_pid() is not None and time.monotonic() < deadline:
        time.sleep(0.2)
    if daemon_pid() is not None:
        os.kill(pid, signal.SIGKILL)
    PID_FILE.unlink(missing_ok=True)
    return True


def daemon_pid() -> int | None:
    """The pid of the dockerd that this tool started, while it runs."""
    if not PID_FILE.exists():
        return None
    pid = int(PID_FILE.read_text(encoding="utf-8"))
    try:
        name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return None
    # A pid is reused after a reboot: only a living dockerd counts.
    return pid if name == "dockerd" and state != "Z" else None
