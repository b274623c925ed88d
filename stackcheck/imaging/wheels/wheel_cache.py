"""A folder of wheels by hash, shared by stacks and, on shared storage, by machines.

In: locked packages, finished outputs of stages that compile. Out: the same files again, checked by hash: what
was downloaded or built once is not downloaded or built a second time. Files arrive by a rename, so that any
number of writers and an interrupted one leave only whole entries.

    <folder>/wheels/<sha256>/<file name>      what pip downloaded
    <folder>/stages/<seal>/<stage key>/…      what a stage handed over, with files.json that has its hashes

A wheel is what its lock names. No lock names what a stage compiled, so files.json is sealed with a secret of
the user: a stage that another user of a shared folder wrote or changed is not used. Machines that are to
share stages have the same secret.
"""

import contextlib
import functools
import hashlib
import hmac
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from stackcheck.errors import FileError
from stackcheck.files import users
from stackcheck.files.digest import sha256_of
from stackcheck.files.requirements import Locked, split_places
from stackcheck.imaging.platforms import InstallTarget

VARIABLE = "STACKCHECK_WHEEL_CACHE"
OFF = "off"
TIMEOUT_S = 3600.0
_REFUSED = re.compile(r"No matching distribution found for ([A-Za-z0-9._-]+)==")


def default_folder() -> Path | None:
    """The folder that the environment names, else the user's cache folder; None if it is set to `off`."""
    named = os.environ.get(VARIABLE)
    if named == OFF:
        return None
    if named:
        return Path(named).expanduser()
    return users.folder("XDG_CACHE_HOME") / "stackcheck" / "wheel-cache"


def secret_path() -> Path:
    """Where the secret is that seals stages: $XDG_CONFIG_HOME/stackcheck, or ~/.config/stackcheck."""
    return users.folder("XDG_CONFIG_HOME") / "stackcheck" / "wheel-cache.secret"


class WheelCache:
    """A folder that keeps wheels and the outputs of stages, by hash."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @functools.cached_property
    def _secret(self) -> bytes:
        """The user's secret, made on first use.

        Raises:
            FileError: It cannot be made or read, or others can read it.
        """
        path = secret_path()
        with self._changing():
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                with (
                    tempfile.NamedTemporaryFile(dir=path.parent) as file,
                    contextlib.suppress(FileExistsError),
                ):
                    file.write(secrets.token_bytes(32))
                    file.flush()
                    os.link(file.name, path)  # mode 0600; another process may have been first
            body, status = path.read_bytes(), path.stat()
        if len(body) != 32 or status.st_mode & 0o077 or status.st_uid not in {0, os.geteuid()}:
            raise FileError(
                "the secret of the wheel cache cannot be used",
                where=str(path),
                got=f"{len(body)} bytes, mode {status.st_mode & 0o777:04o}, of user {status.st_uid}",
                expected="32 bytes that only you can read",
                next_step=f"rm {path}: a new one is made, and stages are compiled again",
            )
        return body

    def _stage(self, key: str) -> Path:
        """The folder of a stage; users with different secrets do not meet."""
        return self.folder / "stages" / hashlib.sha256(self._secret).hexdigest()[:12] / key

    def _seal(self, key: str, listed: bytes) -> str:
        return hmac.new(self._secret, key.encode() + b"\0" + listed, hashlib.sha256).hexdigest()

    def find(self, wanted: Sequence[Locked], report: Callable[[str], None]) -> dict[str, Path]:
        """Hash -> file of locked packages that are here and whole; a damaged one is removed."""
        found = {}
        for digest in sorted({digest for package in wanted for digest in package.hashes}):
            for path in sorted((self.folder / "wheels" / digest).glob("*")):
                if sha256_of(path) == digest:
                    found[digest] = path
                else:
                    report(f"{path.name} in the wheel cache is damaged: removed")
                    with self._changing():
                        path.unlink(missing_ok=True)
        return found

    def fill(
        self, wanted: Sequence[Locked], target: InstallTarget, options: Sequence[str]
    ) -> dict[Locked, str]:
        """Download locked packages into the cache; return what could not be downloaded, with pip's message.

        `options` are more options for pip: an index that the host's own settings lack.
        """
        left = [package for package in wanted if package.hashes]
        refused: dict[Locked, str] = {}
        with self._unfinished() as folder:
            while left:
                done = _pip(left, folder, (*target.pip_options, *options))
                if done.returncode == 0:
                    break
                lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
                why = lines[-1].removeprefix("ERROR: ") if lines else "pip printed no error"
                named = {name.lower().replace("_", "-") for name in _REFUSED.findall(done.stderr)}
                gone = [package for package in left if package.name in named] or left
                refused |= {one: why for one in gone if not _source_archive(one, folder, options)}
                left = [package for package in left if package not in gone]
            for path in sorted(folder.iterdir()):
                self._keep(path, self.folder / "wheels" / sha256_of(path) / path.name)
        return refused

    def keep_file(self, path: Path) -> Path:
        """Copy a file into the cache, under its hash; where it lies there."""
        place = self.folder / "wheels" / sha256_of(path) / path.name
        with self._unfinished() as folder:
            shutil.copyfile(path, folder / path.name)
            self._keep(folder / path.name, place)
        return place

    def has(self, key: str) -> bool:
        """Whether the cache has the output of a stage with this key; it is not checked."""
        return (self._stage(key) / "files.json").is_file()

    def handed_over(self, key: str, report: Callable[[str], None]) -> Path | None:
        """The output folder of a stage with this key, if the cache has it and it is whole."""
        folder = self._stage(key)
        listed, seal = folder / "files.json", folder / "files.json.seal"
        if not listed.is_file():
            return None
        body = listed.read_bytes()
        sealed = seal.is_file() and hmac.compare_digest(seal.read_bytes(), self._seal(key, body).encode())
        if sealed and json.loads(body) == _hashes(folder / "files"):
            return folder / "files"
        report(f"the output of stage {key[:12]} in the wheel cache is damaged: removed")
        with self._changing():
            shutil.rmtree(folder)
        return None

    def keep(self, key: str, output: Path) -> None:
        """Store the output of a stage."""
        with self._unfinished() as folder:
            fresh = folder / "stage"
            # With the present time: every stage writes the same fixed time, and BuildKit believes that it
            # already has a file if one of the same name, size and time was in another folder.
            shutil.copytree(output, fresh / "files", copy_function=shutil.copy)
            listed = json.dumps(_hashes(fresh / "files"), indent=1).encode() + b"\n"
            (fresh / "files.json").write_bytes(listed)
            (fresh / "files.json.seal").write_text(self._seal(key, listed), "utf-8")
            self._keep(fresh, self._stage(key))

    def _keep(self, path: Path, place: Path) -> None:
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.rename(place)
        except OSError:
            if not place.exists():  # else another machine was faster, with the same hash or key
                raise

    @contextlib.contextmanager
    def _unfinished(self) -> Iterator[Path]:
        with self._changing():
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=self.folder) as name:
                yield Path(name)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise FileError(
                "cannot write the wheel cache",
                where=str(self.folder),
                got=error.strerror,
                next_step=f"free disk space, fix the permissions, or use --wheel-cache DIR, or {OFF}",
            ) from error


def _hashes(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else ()
    return {str(path.relative_to(folder)): sha256_of(path) for path in sorted(files)}


def _source_archive(package: Locked, folder: Path, options: Sequence[str]) -> bool:
    """Whether a package's source archive was downloaded: pip in the image builds its wheel.

    pip asks the archive for its requirements, so its set-up runs here, as it did when the stack was locked.
    """
    chosen = (f"--no-binary={package.name}", *options)
    return _pip([package], folder, chosen).returncode == 0


def _pip(wanted: Sequence[Locked], folder: Path, options: Sequence[str]) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as name:
        listed = Path(name) / "requirements.lock"
        places, others = split_places(options)
        lines = [f"--{option} {place}" for option, of in places.items() for place in of]
        lines += [package.requirement for package in wanted]
        listed.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        command += [*others, "--dest", str(folder), "--requirement", str(listed)]
        try:
            return subprocess.run(
                command, capture_output=True, errors="replace", timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            said = f"ERROR: pip did not end within {TIMEOUT_S:.0f} s"
            return subprocess.CompletedProcess(command, returncode=1, stdout="", stderr=said)
