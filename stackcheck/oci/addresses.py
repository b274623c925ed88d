"""Where the URLs of a registry lead.

In: a URL, or a host. Out: scheme, host and port; whether a host is this machine. Pure.
"""

import ipaddress
import re

from stackcheck.oci.documents import RegistryError

# Narrower than RFC 3986: URL parsers disagree about a user, a backslash or a blank, so these are refused.
# The address that is checked is then the address that is connected to.
_ADDRESS = re.compile(
    r"(?P<scheme>https?)://(?P<host>[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::(?P<port>[0-9]{1,5}))?"
    r"(?:[/?#][!-\[\]-~]*)?",
    re.ASCII | re.IGNORECASE,
)
_DEFAULT_PORTS = {"https": 443, "http": 80}
_LAST_PORT = 65535


def origin(url: str, named_by: str) -> tuple[str, str, int]:
    """Scheme, host and port: a credential is sent to no other origin.

    Raises:
        RegistryError: It is not a valid URL, or parsers disagree about it; `named_by` is where it came from.
    """
    try:
        return _read(url)
    except ValueError as error:
        raise RegistryError(
            "the registry sent an invalid address",
            where=named_by,
            got=f"{url[:200]!r}: {error}",
            expected="http(s)://HOST[:PORT]/… without a user name or a backslash",
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
        raise ValueError("not a valid URL")
    scheme = found["scheme"].lower()
    port = int(found["port"] or _DEFAULT_PORTS[scheme])
    if not is_port(port):
        raise ValueError(f"port {port} is out of range")
    return scheme, found["host"].lower(), port
