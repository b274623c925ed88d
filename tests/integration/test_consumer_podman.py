"""What `run --print podman` prints, run as it is by Debian's podman: by root, and by a user without rights.

The image is published to a real registry with a certificate, the line is printed by `stackcheck run` after it
verified that, and podman fetches the digest that the line names. A machine of a test may give podman less
than a host does, so podman's own files say: a store without overlays, plain HTTP on loopback, low limits.
"""

import contextlib
import datetime as dt
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import shell_image
from host_locks import one_at_a_time
from small_images import STACK_ID, SmallImage, new_key, release
from stackcheck.certificate import keys
from stackcheck.oci.layout import OciLayout
from waits import run_program

pytestmark = [pytest.mark.integration, pytest.mark.slow]

KEY = new_key()
HOST = ("--device-model", "CPU", "--driver", "none")
PROGRAMS = {"podman": "podman", "catatonit": "catatonit", "newuidmap": "uidmap"}
SETTINGS = {
    "storage.conf": '[storage]\ndriver = "vfs"\ngraphroot = "{home}/store"\nrunroot = "{home}/run"\n',
    "containers.conf": '[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]\n'
    '[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n',
    "registries.conf": '[[registry]]\nlocation = "{registry}"\ninsecure = true\n',
    "policy.json": '{{"default": [{{"type": "insecureAcceptAnything"}}]}}',
}
INSIDE = """\
echo $((6*7)) in $PWD as $UID at $HOSTNAME
while read -r name value; do
  case $name in CapEff: | NoNewPrivs:) echo $name $value ;; esac
done </proc/self/status
echo /sys/class/net/*
echo kept > made; echo made too > /tmp/scratch
: > /root-is-writable
"""


@pytest.fixture(scope="module")
def printed(registry: str, program_of: Callable[[str, str], Path], tmp_path_factory) -> str:
    """The line for an image that was published and verified."""
    for program, package in PROGRAMS.items():
        program_of(program, package)
    folder = tmp_path_factory.mktemp("podman")
    digest = shell_image.make_layout(folder / "oci")
    (config,) = OciLayout(folder / "oci").only_manifest().descriptors("config")
    target = f"{registry}/stacks/{uuid.uuid4().hex}"
    image = SmallImage(folder / "oci", digest, config.digest)
    release(image, target, KEY, now=dt.datetime.now(dt.UTC))
    (folder / "key.pub").write_bytes(keys.public_pem(KEY.public_key()))
    words = ("run", f"{target}:{STACK_ID}", *HOST, "--key", folder / "key.pub", "--print", "podman")
    command = [sys.executable, "-m", "stackcheck", *words, "--", "/bin/bash", "-c", INSIDE]
    line = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"{target}@{digest}" in line
    return line


@contextlib.contextmanager
def a_user() -> Iterator[str]:
    """A user without rights, with a home and a range of ids of its own, as `useradd` gives them."""
    name = f"podman{uuid.uuid4().hex[:8]}"
    with one_at_a_time("users"):
        subprocess.run(["useradd", "--create-home", "--shell", "/bin/sh", name], check=True)
    try:
        yield name
    finally:
        with one_at_a_time("users"):
            subprocess.run(["userdel", "--remove", "--force", name], check=False, capture_output=True)


@contextlib.contextmanager
def home_of(user: str, registry: str) -> Iterator[Path]:
    """A folder for the store of one user; its path is short, as podman demands."""
    home = Path(tempfile.mkdtemp(prefix="podman-", dir="/tmp"))
    home.chmod(0o755)  # the root of a user's container is a third user
    settings = home / ".config" / "containers"
    settings.mkdir(parents=True)
    (home / "work").mkdir()
    (home / "runtime").mkdir(mode=0o700)
    for name, text in SETTINGS.items():
        (settings / name).write_text(text.format(home=home, registry=registry))
    subprocess.run(["chown", "--recursive", user, home], check=True)
    try:
        yield home
    finally:
        for paused in home.rglob("pause.pid"):  # a user's podman leaves a process that holds its namespace
            os.kill(int(paused.read_text()), signal.SIGKILL)
        shutil.rmtree(home)


def as_user(user: str, home: Path) -> list[str]:
    settings = home / ".config" / "containers"
    env = {
        "HOME": home,
        "XDG_RUNTIME_DIR": home / "runtime",
        "PATH": os.environ["PATH"],
        "CONTAINERS_STORAGE_CONF": settings / "storage.conf",
        "CONTAINERS_CONF": settings / "containers.conf",
        "CONTAINERS_REGISTRIES_CONF": settings / "registries.conf",
    }
    change = ["setpriv", f"--reuid={user}", "--regid", str(pwd.getpwnam(user).pw_gid), "--init-groups"]
    return [*change, "env", "-i", *(f"{key}={value}" for key, value in env.items()), "sh", "-c"]


def run(user: str, registry: str, line: str) -> tuple[subprocess.CompletedProcess[str], int]:
    """What the line ends with, and the owner of the file that the job left in its folder."""
    with home_of(user, registry) as home:
        done = run_program([*as_user(user, home), line], cwd=home / "work")
        made = home / "work" / "made"
        assert made.exists(), done.stderr
        assert made.read_text() == "kept\n"
        return done, made.stat().st_uid


def test_podman_runs_the_printed_line_for_root_and_for_a_user_without_rights(registry, printed):
    assert os.geteuid() == 0, "this test makes a user, so it needs root"
    with a_user() as user:
        for name in ("root", user):
            done, owner = run(name, registry, printed)
            uid = pwd.getpwnam(name).pw_uid
            said = dict.fromkeys(done.stdout.splitlines())
            assert list(said) == [
                f"42 in /workspace as {uid} at stackcheck",
                "CapEff: 0000000000000000",
                "NoNewPrivs: 1",
                "/sys/class/net/lo",
            ], (name, done.stderr)
            assert owner == uid
            assert done.returncode == 1
            assert "Read-only file system" in done.stderr


def test_podman_refuses_an_image_whose_bytes_the_registry_changed(registry, printed):
    """The line names a digest: nothing else can come in its place."""
    name, digest = next(word for word in printed.split() if "@sha256:" in word).split("@")
    other = digest[:-1] + ("0" if digest[-1] != "0" else "1")
    with home_of("root", registry) as home:
        line = printed.replace(digest, other)
        done = subprocess.run([*as_user("root", home), line], capture_output=True, text=True, check=False)
        assert done.returncode == 125, json.dumps([name, done.stdout, done.stderr])
        assert not (home / "work" / "made").exists()
