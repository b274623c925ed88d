import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

import waits
from stackcheck.engine import apt, host_setup
from stackcheck.errors import EngineError


@pytest.fixture(autouse=True)
def packages(monkeypatch) -> set[str]:
    """The engines' packages that this host has; none, unless a test adds some."""
    there: set[str] = set()
    monkeypatch.setattr(host_setup, "_installed", lambda asked: there & set(asked))
    return there


@pytest.fixture
def no_engine(monkeypatch) -> None:
    monkeypatch.setattr(host_setup, "socket_answers", lambda: False)
    monkeypatch.setattr(host_setup, "has_buildx", lambda: False)
    monkeypatch.delenv("DOCKER_HOST", raising=False)


# What podman 5.4.2 of Debian 13 answers to GET /version, shortened.
PODMAN = {
    "Platform": {"Name": "linux/amd64/debian-13"},
    "Components": [{"Name": "Podman Engine", "Version": "5.4.2"}, {"Name": "Conmon", "Version": "2.1.12"}],
    "Version": "5.4.2",
    "ApiVersion": "1.41",
}


def release(monkeypatch: pytest.MonkeyPatch, **fields: str) -> None:
    monkeypatch.setattr(apt, "host_release", lambda: fields)


@pytest.mark.parametrize(
    ("fields", "packages", "suite"),
    [
        (
            {"ID": "debian", "VERSION_CODENAME": "bookworm"},
            ("docker.io", "docker-cli", "docker-buildx"),
            "trixie",
        ),
        ({"ID": "debian", "VERSION_CODENAME": "trixie"}, ("docker.io", "docker-cli", "docker-buildx"), None),
        ({"ID": "ubuntu", "VERSION_CODENAME": "noble"}, ("docker.io", "docker-buildx"), None),
    ],
    ids=["debian12", "debian13", "ubuntu"],
)
def test_each_distribution_gives_its_own_packages(monkeypatch, fields, packages, suite):
    release(monkeypatch, **fields)
    assert host_setup.recipe_for_host() == host_setup.Recipe(packages=packages, second_suite=suite)


@pytest.mark.parametrize("distribution", ["debian", "ubuntu"])
@pytest.mark.parametrize("lacking", [{"buildx"}, {"docker", "buildx"}, {"dockerd"}, set()])
@pytest.mark.parametrize("publisher", host_setup.OTHER_PACKAGES)
def test_beside_dockers_own_packages_only_their_own_parts_are_installed(
    distribution, lacking, publisher, packages, monkeypatch
):
    """apt would take Docker's packages away, with what runs in them, for the distribution's."""
    release(monkeypatch, ID=distribution, VERSION_CODENAME="trixie")
    packages.add(publisher)
    monkeypatch.setattr(
        host_setup.shutil, "which", lambda name: None if name in lacking else f"/usr/bin/{name}"
    )
    monkeypatch.setattr(host_setup, "has_buildx", lambda: "buildx" not in lacking)
    found = set(host_setup.recipe_for_host().packages)
    assert found == {host_setup.OTHER_PACKAGES[publisher][part] for part in lacking}
    assert not found & {"docker.io", "docker-cli", "docker-buildx"}


def test_podman_in_dockers_place_is_refused_with_what_to_type(packages, monkeypatch):
    release(monkeypatch, ID="debian", VERSION_CODENAME="trixie")
    packages.add("podman-docker")
    with pytest.raises(EngineError, match="apt-get remove podman-docker"):
        host_setup.recipe_for_host()
    with pytest.raises(EngineError, match=r"podman 5\.4\.2 answers at Docker's socket"):
        host_setup.refuse_podman(PODMAN)
    host_setup.refuse_podman({"Components": [{"Name": "Engine", "Version": "26.1.5"}]})


@pytest.mark.parametrize(
    ("printed", "real"),
    [("github.com/docker/buildx 0.13.1+ds1 0.13.1+ds1-3", True), ("buildah 1.39.3", False), ("", False)],
)
def test_podmans_buildx_is_no_buildx(printed, real, monkeypatch):
    answered = subprocess.CompletedProcess((), 0, stdout=printed.encode())
    monkeypatch.setattr(host_setup.shutil, "which", lambda _name: "/usr/bin/docker")
    monkeypatch.setattr(host_setup.subprocess, "run", lambda *_args, **_options: answered)
    assert host_setup.has_buildx() is real


def test_an_unknown_distribution_is_not_touched(monkeypatch):
    release(monkeypatch, ID="plan9", PRETTY_NAME="Plan 9")
    with pytest.raises(EngineError, match="cannot set one up"):
        host_setup.recipe_for_host()


@pytest.mark.usefixtures("no_engine")
def test_without_root_the_commands_to_type_are_given(monkeypatch):
    release(monkeypatch, ID="debian", VERSION_CODENAME="trixie")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(EngineError) as caught:
        host_setup.ensure_engine(print)
    assert caught.value.exit_code == 4
    assert "apt-get install -y --no-install-recommends docker.io docker-cli docker-buildx" in str(
        caught.value
    )
    assert "sudo stackcheck doctor --fix" in str(caught.value)


@pytest.mark.usefixtures("no_engine")
def test_a_named_daemon_that_is_silent_is_never_replaced(monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "tcp://build.example.org:2375")
    monkeypatch.setattr(host_setup, "install", lambda *_: pytest.fail("installed beside a named daemon"))
    with pytest.raises(EngineError, match="DOCKER_HOST"):
        host_setup.ensure_engine(print)


def test_settings_of_an_engine_that_could_not_be_installed_are_taken_back(tmp_path, monkeypatch):
    def refuse(packages: tuple[str, ...]) -> None:
        assert (tmp_path / "docker/daemon.json").exists()
        raise EngineError("apt-get failed", got=" ".join(packages))

    monkeypatch.setattr(host_setup, "DAEMON_FILE", tmp_path / "docker/daemon.json")
    monkeypatch.setattr(host_setup, "apt_install", refuse)
    with pytest.raises(EngineError, match="apt-get failed"):
        host_setup.install(host_setup.Recipe(packages=("docker.io",)), lambda _: None)
    assert not (tmp_path / "docker/daemon.json").exists()


def test_apt_says_why_in_its_own_last_words(monkeypatch):
    def refuse(command: list[str], **_options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(
            command, 100, stdout="", stderr="E: Unable to locate package docker.io"
        )

    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(EngineError) as caught:
        host_setup.apt_install(["docker.io"])
    assert "Unable to locate package docker.io" in str(caught.value)


def test_a_reused_pid_is_not_taken_for_the_daemon(tmp_path, monkeypatch):
    monkeypatch.setattr(host_setup, "PID_FILE", tmp_path / "pid")
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        (tmp_path / "pid").write_text(f"{sleeper.pid}\n")
        assert host_setup.daemon_pid() is None
        assert host_setup.stop_daemon() is False
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait(timeout=waits.LIMIT_S)


@pytest.fixture
def dockerd(tmp_path, monkeypatch) -> Callable[[str], None]:
    """Puts a script in dockerd's place; the daemon answers from when it has made the file `up`."""
    monkeypatch.setattr(host_setup, "INIT_FOLDER", tmp_path / "no-init")
    monkeypatch.setattr(host_setup, "PID_FILE", tmp_path / "pid")
    monkeypatch.setattr(host_setup, "LOG_FILE", tmp_path / "log")
    monkeypatch.setattr(host_setup, "socket_answers", lambda **_: (tmp_path / "up").exists())
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)

    def write(script: str) -> None:
        (tmp_path / "dockerd").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "dockerd").chmod(0o755)

    return write


def test_a_daemon_that_does_not_have_its_name_yet_is_waited_for(dockerd, tmp_path):
    dockerd("echo $$ > started; (sleep 0.6; touch up) & exec sleep 600")
    host_setup.start_daemon(lambda _: None)
    assert host_setup.daemon_pid() is None  # it goes by the name of sleep
    os.kill(int((tmp_path / "started").read_text()), signal.SIGKILL)


def test_a_daemon_that_ends_at_once_is_told_with_its_last_words(dockerd):
    dockerd("echo no such storage driver; exit 1")
    with pytest.raises(EngineError, match="did not start") as caught:
        host_setup.start_daemon(lambda _: None)
    assert caught.value.got == "no such storage driver"


@pytest.fixture
def pruned(monkeypatch) -> list[str]:
    """What `docker` was asked to keep at each prune, in a daemon that this tool started."""
    kept: list[str] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[:5] == ["docker", "builder", "prune", "--all", "--force"]
        kept.append(command[5].removeprefix("--keep-storage="))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(host_setup, "daemon_pid", lambda: 4711)
    monkeypatch.setattr(subprocess, "run", run)
    return kept


@pytest.mark.parametrize(
    ("prunes_needed", "kept"), [(0, []), (1, ["10000000000"]), (9, ["10000000000", "0"])]
)
def test_build_cache_goes_only_as_far_as_room_is_needed(pruned, prunes_needed, kept):
    host_setup.free_build_cache(lambda: len(pruned) >= prunes_needed, lambda _: None)
    assert pruned == kept


@pytest.mark.parametrize("hangs", [False, True])
def test_a_cache_that_cannot_be_removed_is_an_error_with_a_next_step(pruned, monkeypatch, *, hangs):
    def fail(command: list[str], timeout: float, **_: object) -> subprocess.CompletedProcess[str]:
        if hangs:
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, 1, "", "database is locked")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(EngineError, match="no end within" if hangs else "database is locked") as caught:
        host_setup.free_build_cache(lambda: False, lambda _: None)
    assert "free disk space by hand" in str(caught.value)
    assert pruned == []


def test_the_cache_of_another_daemon_is_left_alone(pruned, monkeypatch):
    monkeypatch.setattr(host_setup, "daemon_pid", lambda: None)
    host_setup.free_build_cache(lambda: False, lambda _: None)
    assert pruned == []
