"""Pip's settings on this machine, as `pip install` sees them, and the environment in which uv sees the same.

In: `pip config list`. Out: name -> values. Locks ask the indexes that these name, and builds pass them on:
both read them here.
"""

import ast
import functools
import os
import ssl
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from stackcheck.errors import ConfigurationError

Settings = Mapping[str, tuple[str, ...]]
SECTIONS = ("global", "install", ":env:")  # the later one wins
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy")
# As pip spells them.
_TRUE, _FALSE = {"y", "yes", "t", "true", "on", "1"}, {"n", "no", "f", "false", "off", "0"}


def pip_settings() -> Settings:
    """Name -> values. The answer is kept while the environment stays as it is, as pip takes half a second.

    Raises:
        ConfigurationError: pip is not installed, or cannot read its configuration.
    """
    return parse(_listed(tuple(sorted(os.environ.items()))))


def parse(listed: str) -> Settings:
    """What pip printed: the environment over `install` over `global`; an empty value counts as none."""
    sections: dict[str, dict[str, tuple[str, ...]]] = {name: {} for name in SECTIONS}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in sections and (words := tuple(str(ast.literal_eval(value)).split())):
            sections[section][name] = words
    return {name: words for section in SECTIONS for name, words in sections[section].items()}


def asks_no_index(settings: Settings) -> bool:
    """Whether pip install asks no index (`no-index`).

    Raises:
        ConfigurationError: The value is neither true nor false: pip refuses it, too.
    """
    said = " ".join(settings.get("no-index", ("false",))).lower()
    if said not in _TRUE | _FALSE:
        raise ConfigurationError(
            "pip's setting no-index is neither true nor false",
            got=said,
            expected="true or false",
            next_step=f"{sys.executable} -m pip config debug",
        )
    return said in _TRUE


def certificates(settings: Settings) -> Path | None:
    """The file of trusted certificates that pip uses, else the system's; None where the host has none."""
    of_requests = (os.environ.get(name, "") for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"))
    own = os.environ.get("SSL_CERT_FILE", "")
    default = ssl.get_default_verify_paths().cafile or ""
    # requests, by which pip asks, takes the environment's before pip's setting.
    named = (*of_requests, *settings.get("cert", ()), own, CERTIFICATES, default)
    return next((path for path in map(Path, filter(None, named)) if path.is_file()), None)


def for_uv(settings: Settings) -> dict[str, str]:
    """The environment in which uv asks as pip does: it reads no setting of pip, and its own change a lock."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("UV_") or name == "UV_CACHE_DIR"
    }
    if proxy := settings.get("proxy"):  # pip leaves the proxies of the environment out then
        names = {*PROXY_VARIABLES, "no_proxy"}
        kept = {name: value for name, value in kept.items() if name.lower() not in names}
        kept |= dict.fromkeys(PROXY_VARIABLES, proxy[-1])
    named = {"SSL_CLIENT_CERT": "client-cert", "UV_INSECURE_HOST": "trusted-host"}
    kept |= {name: " ".join(settings[option]) for name, option in named.items() if option in settings}
    if wait := settings.get("timeout") or settings.get("default-timeout"):
        kept["UV_HTTP_TIMEOUT"] = str(max(1, round(float(wait[-1]))))
    trusted = certificates(settings)
    return {**kept, "UV_SYSTEM_CERTS": "1", **({"SSL_CERT_FILE": str(trusted)} if trusted else {})}


@functools.lru_cache(maxsize=1)
def _listed(_environment: tuple[tuple[str, str], ...]) -> str:
    command = [sys.executable, "-P", "-m", "pip", "config", "list"]
    try:
        done = subprocess.run(command, capture_output=True, errors="replace", check=False, timeout=60)
        if done.returncode == 0:
            return done.stdout
        error = (done.stderr.strip() or done.stdout.strip())[-300:]  # pip writes some errors to stdout
    except (OSError, subprocess.SubprocessError) as failure:
        error = str(failure)
    missing = "No module named pip" in error
    raise ConfigurationError(  # without its answer a site's own index would be left out in silence
        "pip cannot be asked where this site's packages are",
        where=" ".join(command),
        got=error,
        next_step=f"{sys.executable} -m {'ensurepip' if missing else 'pip config debug'}",
    )
