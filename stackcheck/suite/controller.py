"""The process that runs the suites and writes the result, beside the container of the image, not in it.

In: a command of this tool's own Python. Out: its lines and its exit code. It reaches the image only through
an agent in the container (tests/acceptance/harness/inside.py), so no byte of the image runs in it. Devices
are leased through one folder for each host, in which tests/acceptance/harness/leases.py holds its locks.
"""

import contextlib
import grp
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stackcheck.errors import ChecksFailedError, ConfigurationError
from stackcheck.policy import Tier
from stackcheck.suite import inputs, steering
from stackcheck.vendors import Vendor

INSIDE = "inside"  # the folder in the result's that the container may write
AGENT = ("/stackcheck/tests/acceptance/harness/agent.py", "/stackcheck/out/agent")
# -I: no PYTHON* variable, no user site, no working directory. -S: the launcher adds site-packages.
ISOLATED = ("-I", "-S", "-B", "-u")
STOP_S = 10.0


class Controller:
    """One process: it starts when its container runs, and its end, with a `code`, ends the container."""

    def __init__(
        self, command: tuple[str, ...], *, folder: Path, run_file: Path, env: Mapping[str, str]
    ) -> None:
        self.code: int | None = None
        self.folder, self.run_file = folder, run_file
        self.command = command
        self._env = dict(env)
        self._on_line: Callable[[str], None] = lambda _line: None  # before anybody wants them

    def report_to(self, on_line: Callable[[str], None]) -> None:
        """Hand over each line that it prints."""
        self._on_line = on_line

    @contextlib.contextmanager
    def __call__(self, end_container: Callable[[], None]) -> Iterator[None]:
        """Run beside a container: in the body the caller waits for the container's end."""
        with subprocess.Popen(
            self.command,
            cwd=self.folder,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for the tool, which ends this process in order
        ) as process:
            thread = threading.Thread(target=self._follow, args=(process, end_container), daemon=True)
            thread.start()
            try:
                yield
                ended_early = self.code is None
            finally:
                stop(process)
                thread.join(STOP_S)
        if ended_early:
            self.code = None  # whatever it wrote: the image was gone

    def _follow(self, process: subprocess.Popen[str], end_container: Callable[[], None]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._on_line(line.rstrip("\n"))
        self.code = process.wait()
        end_container()

    def require_end(self, tail: Iterable[str]) -> int:
        """The exit code. `tail`: the last lines of container and controller, for the message.

        Raises:
            ChecksFailedError: The container ended before it.
        """
        if self.code is None:
            raise ChecksFailedError(
                "the container was killed or ended early, so its result does not count",
                where=str(self.folder),
                got="the agent of the container ended before the suites; the log ends with:\n    "
                + "\n    ".join(tail),
                expected="a container that ends when the suites have ended",
                next_step=f"see who killed it: dmesg | grep -i 'out of memory'; read {self.log}",
            )
        return self.code

    @property
    def log(self) -> Path:
        """What the container printed."""
        return self.folder.with_name("container.log")


def beside(
    out: Path, vendor: Vendor, tier: Tier, options: Sequence[str], *, leases: Iterable[Path]
) -> Controller:
    """The controller of a run in `out`, with this Python and the frozen suites there."""
    suite, folder = out.absolute() / "suite", out.absolute() / "run"
    command = (
        *(sys.executable, *ISOLATED, str(suite / inputs.RUNNER / "launcher.py"), "-m", "pytest"),
        *(str(suite / "tests"), "-p", "no:cacheprovider", f"--gpu-vendor={vendor}", f"--tier={tier}"),
        *(f"--run-file={out.absolute() / 'run.json'}", f"--result-dir={folder}"),
        *(f"--agent={folder / INSIDE}", *(f"--lease-dir={lease}" for lease in leases)),
        *options,
    )
    return Controller(command, folder=folder, run_file=out / "run.json", env=_environment(folder))


def _environment(folder: Path) -> dict[str, str]:
    """Nothing of the image or of the user's environment, but where temporary files go."""
    kept = {name: os.environ[name] for name in ("TMPDIR",) if name in os.environ}
    return {"PATH": os.defpath, "HOME": str(folder), "LANG": "C.UTF-8", **kept, **steering.OURS}


def stop(process: subprocess.Popen[Any], wait_s: float = STOP_S) -> None:
    """End a process: first as a scheduler does, so that it writes what it has."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(wait_s)
        except subprocess.TimeoutExpired:
            process.kill()


FOLDER = Path("/tmp/stackcheck-leases")  # noqa: S108  # a link in its place is refused
GROUP = "stackcheck"  # of the people who share the devices of a host, where an administrator made it
MODE = 0o3770  # new files get the folder's group, and only their owner removes them


def group() -> int:
    """The group that may write to the folder: GROUP, else this user's own."""
    with contextlib.suppress(KeyError):
        return grp.getgrnam(GROUP).gr_gid
    return os.getegid()


def folders(vendor: str) -> tuple[Path, ...]:
    """The lease folder, which is made if it is missing; none for a CPU, which runs may share.

    Raises:
        ConfigurationError: Its path exists and is not a folder, or others own it.
    """
    if vendor == "cpu":
        return ()
    with contextlib.suppress(FileExistsError):
        FOLDER.mkdir(mode=0o700)
    try:
        folder = os.open(FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise ConfigurationError(
            "the path of the device leases is not a directory that can be used",
            where=str(FOLDER),
            got="a symbolic link" if FOLDER.is_symlink() else error.strerror,
            expected="a directory, or nothing: it is made when it is missing",
            next_step=f"rm {FOLDER}",
        ) from None
    try:
        _close(folder)
    finally:
        os.close(folder)
    return (FOLDER,)


def _close(folder: int) -> None:
    """Let nobody but the group write there."""
    status = os.fstat(folder)
    if (stat.S_IMODE(status.st_mode), status.st_gid) == (MODE, group()):
        return
    try:
        os.fchown(folder, -1, group())
        os.fchmod(folder, MODE)  # last: a change of the group clears bits
    except PermissionError:
        raise ConfigurationError(
            "the folder of device leases belongs to another user",
            where=str(FOLDER),
            got=f"mode {stat.S_IMODE(status.st_mode):04o} of user {status.st_uid}, group {status.st_gid}",
            expected=f"mode {MODE:04o} of the group `{GROUP}`, in which you are",
            next_step=f"as root: groupadd -f {GROUP} && usermod -aG {GROUP} USER, then: rm -r {FOLDER}",
        ) from None
