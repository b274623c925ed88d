"""TLS for registries with a private certificate authority, configured as for docker and podman.

In: a registry's host. Out: a TLS context that also trusts the authorities in `certs.d/HOST[:PORT]/*.crt`,
and has the client certificates there (`NAME.cert` with `NAME.key`); None if there is no such folder.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from stackcheck.errors import ConfigurationError

SYSTEM = (Path("/etc/docker/certs.d"), Path("/etc/containers/certs.d"))


def context(host: str) -> ssl.SSLContext | None:
    """The context for a registry.

    Raises:
        ConfigurationError: A file there is not a certificate, or a client certificate has no key.
    """
    files = [file for folder in _folders(host) for file in sorted(folder.glob("*")) if file.is_file()]
    if not any(file.suffix in {".crt", ".cert"} for file in files):
        return None
    found = ssl.create_default_context()
    for file in files:
        try:
            if file.suffix == ".crt":
                found.load_verify_locations(file)
            elif file.suffix == ".cert":
                found.load_cert_chain(file, file.with_suffix(".key"))
        except OSError as error:  # also ssl.SSLError
            raise ConfigurationError(
                "a certificate for a registry cannot be used",
                where=str(file),
                got=str(error),
                expected="PEM; for NAME.cert also NAME.key beside it",
            ) from error
    return found


def _folders(host: str) -> list[Path]:
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    places = (*SYSTEM, home / "docker" / "certs.d", home / "containers" / "certs.d")
    return [place / host for place in places if (place / host).is_dir()]
