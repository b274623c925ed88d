"""Credentials for registries, as `docker login` stored them on this host.

In: a registry's host. Out: user name and password, an identity token, or nothing. Read from config.json of
$DOCKER_CONFIG or ~/.docker, through a credential helper if it names one. Nothing is printed or stored.
"""

import base64
import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stackcheck.errors import ConfigurationError
from stackcheck.files import users

DOCKER_HUB = "https://index.docker.io/v1/"  # the key under which docker keeps the credentials of docker.io
TOKEN_USER = "<token>"  # noqa: S105  # the user name of a helper whose secret is an identity token
HELPER_TIMEOUT_S = 30


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """A user name with a password, or an identity token in its place; the secrets never show in a repr."""

    username: str = ""
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)


def find(host: str) -> Credentials | None:
    """The credentials for a registry; None without a login.

    Raises:
        ConfigurationError: docker's config.json is broken, or its credential helper failed.
    """
    path = Path(os.environ.get("DOCKER_CONFIG") or users.home() / ".docker") / "config.json"
    if not path.exists():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        names = (DOCKER_HUB, host) if host == "docker.io" else (host, f"https://{host}")
        helper = next(((config.get("credHelpers") or {}).get(name) for name in names), None)
        if helper := helper or config.get("credsStore"):
            return _from_helper(helper, names[0])
        logins = config.get("auths") or {}
        entry = next((logins[name] for name in names if name in logins), None)
        return _from_entry(entry) if entry else None
    except (ValueError, AttributeError, TypeError, OSError, RecursionError) as error:
        raise ConfigurationError(
            "docker's configuration cannot be read", where=str(path), got=str(error), next_step="docker login"
        ) from error


def _from_entry(entry: dict[str, Any]) -> Credentials | None:
    username, _, password = base64.b64decode(entry.get("auth", ""), validate=True).decode().partition(":")
    token = str(entry.get("identitytoken", ""))
    if not (username or token):
        return None
    return Credentials(username=username, password=password, identity_token=token)


def _from_helper(helper: str, host: str) -> Credentials | None:
    program = f"docker-credential-{helper}"
    try:
        done = subprocess.run(
            [program, "get"],
            input=host,
            capture_output=True,
            errors="replace",
            timeout=HELPER_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(
            "docker's credential helper cannot be run", where=program, got=type(error).__name__
        ) from error
    if done.returncode:
        if "not found" in done.stdout:  # the protocol's answer if there was no login
            return None
        raise ConfigurationError("docker's credential helper failed", where=program, got=done.stderr[:200])
    try:
        answer = json.loads(done.stdout)
        username, secret = str(answer["Username"]), str(answer["Secret"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:  # its text may hold the secret
        raise ConfigurationError(
            "docker's credential helper gave no credentials",
            where=program,
            got=type(error).__name__,
            expected="JSON with Username and Secret",
            next_step=f"docker login {host}",
        ) from None
    if username == TOKEN_USER:
        return Credentials(identity_token=secret)
    return Credentials(username=username, password=secret)
