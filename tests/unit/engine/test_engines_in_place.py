"""Engines that are already there: whatever answers, and whoever asks, nothing is installed for nothing.

A host is drawn: what answers at the local socket and at `DOCKER_HOST`, which packages it has, who asks.
"""

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import docker
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stackcheck.engine import apt, host_setup
from stackcheck.errors import EngineError

# What docker.io 29.1 and podman 5.7 answer to GET /version, shortened.
ANSWERS = {
    "docker": {"Components": [{"Name": "Engine", "Version": "29.1.3"}]},
    "podman": {"Components": [{"Name": "Podman Engine", "Version": "5.7.0"}]},
}
NAMED = "unix:///run/named.sock"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawn:
    """A host and who asks; an engine is "docker", "podman", or "" where nothing answers."""

    local: str
    named: str | None
    user: str
    packages: frozenset[str]
    buildx: bool

    @property
    def answers(self) -> str:
        """The engine that this user reaches."""
        if self.named is not None:
            return self.named
        return self.local if self.user != "stranger" else ""

    @property
    def has_dockerd(self) -> bool:
        return bool(self.packages - {host_setup.PODMAN_AS_DOCKER}) or self.local == "docker"


@st.composite
def hosts(draw: Any) -> Drawn:
    return Drawn(
        local=draw(st.sampled_from(("docker", "podman", ""))),
        named=draw(st.sampled_from((None, "docker", "podman", ""))),
        user=draw(st.sampled_from(("root", "member", "stranger"))),
        packages=draw(st.frozensets(st.sampled_from((*host_setup.OTHER_PACKAGES, "podman-docker")))),
        buildx=draw(st.booleans()),
    )


def asked(host: Drawn, socket: Path) -> tuple[list[tuple[str, ...]], str | None]:
    """What `ensure_engine` installed, and its error."""
    installed: list[tuple[str, ...]] = []

    class Client:
        def __init__(self, **_: object) -> None:
            if not host.answers:
                raise docker.errors.DockerException("refused")

        def version(self) -> dict[str, Any]:
            return ANSWERS[host.answers]

        def close(self) -> None:
            """Nothing is open."""

    socket.unlink(missing_ok=True)
    if host.local:
        socket.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(docker, "from_env", Client)
        patch.setattr(host_setup, "SOCKET", socket)
        patch.setattr(host_setup, "has_buildx", lambda: host.buildx)
        patch.setattr(host_setup, "_installed", lambda names: host.packages & set(names))
        patch.setattr(host_setup, "_name_of_group", lambda _number: "docker")
        patch.setattr(host_setup, "install", lambda recipe, _report: installed.append(recipe.packages))
        patch.setattr(host_setup, "start_daemon", lambda _report: None)
        patch.setattr(
            shutil,
            "which",
            lambda name: f"/usr/bin/{name}" if name != "dockerd" or host.has_dockerd else None,
        )
        patch.setattr(apt, "host_release", lambda: {"ID": "ubuntu", "VERSION_CODENAME": "noble"})
        patch.setattr(os, "geteuid", lambda: 0 if host.user == "root" else 1000)
        patch.setattr(os, "access", lambda *_: host.user != "stranger")
        patch.delenv("DOCKER_HOST", raising=False)
        if host.named is not None:
            patch.setenv("DOCKER_HOST", NAMED)
        try:
            host_setup.ensure_engine(lambda _line: None)
        except EngineError as error:
            return installed, str(error)
    return installed, None


@pytest.fixture(scope="module")
def socket(tmp_path_factory) -> Path:
    """Where the local engine's socket is."""
    return tmp_path_factory.mktemp("run") / "docker.sock"


@given(host=hosts())
def test_podman_is_refused_before_anything_is_installed(host, socket):
    installed, error = asked(host, socket)
    silent = host.named is None and not host.answers
    if host.answers == "podman" or (silent and "podman-docker" in host.packages):
        assert (installed, "podman is in the place of Docker" in str(error)) == ([], True)
        assert ("unset DOCKER_HOST" in str(error)) == bool(host.named)
        assert ("apt-get remove podman-docker" in str(error)) == ("podman-docker" in host.packages)


@given(host=hosts())
def test_who_may_not_install_is_told_the_way_to_what_is_there(host, socket):
    installed, error = asked(host, socket)
    if host.answers == "docker" and host.buildx:
        assert (installed, error) == ([], None)
    if host.user == "root":
        return
    assert not installed
    if host.named == "":
        assert NAMED in str(error)
    elif host.named is None and not host.answers and "podman-docker" not in host.packages:
        if host.local:
            assert "usermod --append --groups docker" in str(error)
        elif host.has_dockerd and host.buildx:
            assert "apt-get install" not in str(error)
