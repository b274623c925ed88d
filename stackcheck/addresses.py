"""What an address says of where a request goes. Pure."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def origin(url: str) -> tuple[str, str, int | None]:
    """What a credential belongs to: scheme, host and port; `ValueError` for what is no address."""
    parts = urlsplit(url)
    default = {"https": 443, "http": 80}.get(parts.scheme)
    return parts.scheme, parts.hostname or "", parts.port or default


def is_loopback(netloc: str) -> bool:
    """Whether a host (with or without a port) is this machine itself."""
    host = urlsplit(f"//{netloc}").hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
