"""What an address says of where a request goes. Pure."""

from __future__ import annotations

import ipaddress
import re

from stackcheck.oci.documents import RegistryError

# Narrower than RFC 3986: what parsers of addresses read in different ways (a user, a backslash, a blank) is
# no address here, so what is checked is what is connected to.
_ADDRESS = re.compile(
    r"(?P<scheme>https?)://(?P<host>[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::(?P<port>[0-9]{1,5}))?"
    r"(?:[/?#][!-\[\]-~]*)?",
    re.ASCII | re.IGNORECASE,
)
_DEFAULT_PORTS = {"https": 443, "http": 80}
_LAST_PORT = 65535


def origin(url: str, named_by: str) -> tuple[str, str, int]:
    """What a credential belongs to: scheme, host and port.

    Raises:
        RegistryError: It is no address, or one that can be read in two ways; `named_by` sent us there.
    """
    try:
        return _read(url)
    except ValueError as error:
        raise RegistryError(
            "the registry names no usable address",
            where=named_by,
            got=f"{url[:200]!r}: {error}",
            expected="http(s)://HOST[:PORT]/… with neither a user nor a backslash",
        ) from error


def is_port(number: int) -> bool:
    """Whether a connection can be made to a port of this number."""
    return 1 <= number <= _LAST_PORT


def is_loopback(netloc: str) -> bool:
    """Whether a host (with or without a port) is this machine itself."""
    try:
        host = _read(f"http://{netloc}")[1].strip("[]")
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read(url: str) -> tuple[str, str, int]:
    found = _ADDRESS.fullmatch(url)
    if found is None:
        raise ValueError("this is no address")
    scheme = found["scheme"].lower()
    port = int(found["port"] or _DEFAULT_PORTS[scheme])
    if not is_port(port):
        raise ValueError(f"port {port} is out of range")
    return scheme, found["host"].lower(), port
