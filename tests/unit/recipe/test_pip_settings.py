"""Locks and builds see the settings that pip sees, however a site writes them; pip itself is asked."""

import http.server
import itertools
import json
import os
import random
import ssl
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import loopback
import small_index
from stackcheck.errors import ConfigurationError
from stackcheck.files.pip_settings import asks_no_index, pip_settings
from stackcheck.recipe import indexes
from stackcheck.recipe.upstream import Upstream

# What pip's own parser makes of the environment: the default index is null.
ORACLE = """
import json
from pip._internal.commands import create_command
from pip._internal.models.index import PyPI
found, _ = create_command("install").parse_args(["x"])
index = None if found.index_url == PyPI.simple_url else found.index_url
print(json.dumps([index, found.extra_index_urls, found.find_links, bool(found.no_index)]))
"""
ADDRESSES = (
    "https://one.example/simple", "https://r%40b:p%25w=x@two.example/s", "http://three.example:8080/s/#frag",
    "file:///srv/index", "/srv/wheels", "relative/wheels", "'/srv/quoted'", 'https://q.example/"s"',
)  # fmt: skip
LISTS = ("extra-index-url", "find-links")
SECTIONS = ("global", "install", "download", "list")


def drawn(rng: random.Random, folder: Path) -> dict[str, str]:
    """Variables of pip, one of which names a configuration file."""
    lines = []
    for section in rng.sample(SECTIONS, rng.randint(0, 3)):
        lines.append(f"[{section}]")
        for option in rng.sample(("index-url", "index_url", *LISTS, "no-index"), rng.randint(0, 3)):
            value = _value(rng, option, "\n    ")
            lines.append(f"{option}{rng.choice(('=', ' = ', ': '))}{value}")
    (folder / "pip.conf").write_text("\n".join(lines) + "\n")
    names = rng.sample(("index-url", *LISTS, "no-index"), rng.randint(0, 2))
    return {"PIP_CONFIG_FILE": str(folder / "pip.conf")} | {
        f"PIP_{name.upper().replace('-', '_')}": _value(rng, name, " ") for name in names
    }


def _value(rng: random.Random, option: str, between: str) -> str:
    if option == "no-index":
        return rng.choice(("1", "true", "Yes", "on", "y", "0", "false", "no", ""))
    if option in LISTS:
        begin = rng.choice(("", between))
        return begin + between.join(rng.sample(ADDRESSES, rng.randint(0, 3)))
    return rng.choice((*ADDRESSES, ""))


def usual(every: Iterable[object]) -> list[object]:
    """Each seventh one; the rest runs with the slow tests."""
    return [
        one
        if n % 7 == 0
        else pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.slow)
        for n, one in enumerate(every)
    ]


def only(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("seed", usual(range(12)))
def test_the_places_of_a_lock_are_those_that_pip_would_ask(seed, tmp_path, monkeypatch):
    variables = drawn(random.Random(seed), tmp_path)
    only(monkeypatch, variables)
    asked = subprocess.run([sys.executable, "-c", ORACLE], capture_output=True, text=True, check=False)
    assert asked.returncode == 0, (variables, asked.stderr)
    index, extra, links, alone = json.loads(asked.stdout)
    settings = pip_settings()
    assert list(settings.get("index-url", ())) == ([index] if index else [])
    assert (list(settings.get("extra-index-url", ())), list(settings.get("find-links", ()))) == (extra, links)
    assert asks_no_index(settings) == alone
    places = indexes.pip_places(find_links=True)
    assert [place.partition("=")[2] for place in places if "=" in place] == [
        *([index] if index else []),
        *extra,
        *links,
    ]


@pytest.mark.parametrize(
    ("text", "variables", "named"),
    [
        ("index-url = https://one.example/simple\n", {}, "pip.conf"),
        ("[global]\ntimeout = soon\n", {}, "'soon'"),
        ("", {"PIP_RETRIES": "many"}, "'many'"),
    ],
)
def test_a_configuration_that_pip_cannot_read_is_refused(text, variables, named, tmp_path, monkeypatch):
    (tmp_path / "pip.conf").write_text(text)
    only(monkeypatch, {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), **variables})
    with pytest.raises(ConfigurationError, match="pip cannot be asked") as caught:
        pip_settings()
    assert named in str(caught.value.got)
    assert str(caught.value.next_step).endswith("-m pip config debug")


def test_a_switch_that_is_neither_on_nor_off_is_refused():
    with pytest.raises(ConfigurationError, match="neither true nor false"):
        asks_no_index({"no-index": ("perhaps",)})


# ---- What pip finds a lock finds ------------------------------------------------------------------------


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder, also as a proxy for any host."""

    def translate_path(self, path: str) -> str:
        return super().translate_path(urlsplit(path).path)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator[dict[str, str]]:
    """A package index by http, which is also a proxy, and by https of an authority that nobody knows."""
    folder = tmp_path_factory.mktemp("site")
    small_index.add_wheel(folder, "smallpackage", "1.0")
    pem = loopback.certificate(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    absent, serving = "http://index.invalid", loopback.serving
    with serving(Handler, folder) as plain, serving(Handler, folder, context=context) as host:
        places = {"http": f"http://{plain}", "https": f"https://{host}", "host": host}
        yield places | {"authority": str(pem), "absent": absent}


CONFIGURED = {
    "plain": "index-url = {http}",
    "two lines": "index-url = {http}/none\nextra-index-url =\n  {http}/nor-here\n  {http}",
    "own authority": "index-url = {https}\ncert = {authority}",
    "trusted host": "index-url = {https}\ntrusted-host = {host}",
    "proxy": "index-url = {absent}\nproxy = {http}\ntrusted-host = index.invalid",
    "nothing": "index-url = {absent}",
    "unknown authority": "index-url = {https}",
}
VARIABLES = {
    "none": {},
    "an authority by name": {"REQUESTS_CA_BUNDLE": "{authority}"},
    "another proxy": {"http_proxy": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1,index.invalid"},
    "uv's own": {
        "UV_OFFLINE": "1",
        "UV_INDEX_URL": "{absent}",
        "UV_NO_BINARY": "1",
        "UV_RESOLUTION": "lowest",
    },
    "uv's time": {"UV_EXCLUDE_NEWER": "2001-01-01T00:00:00Z", "UV_REQUIRE_HASHES": "1"},
}


# Before 24 pip let a proxy of the environment win over its own.
PAIRS = [pair for pair in itertools.product(CONFIGURED, VARIABLES) if pair != ("proxy", "another proxy")]


@pytest.mark.parametrize(("configured", "noise"), usual(PAIRS))
def test_a_lock_finds_what_pip_finds(configured, noise, site, tmp_path, monkeypatch):
    text = CONFIGURED[configured].format(**site)
    (tmp_path / "pip.conf").write_text(f"[global]\n{text}\nretries = 0\ntimeout = 5\n")
    only(monkeypatch, {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), "UV_CACHE_DIR": str(tmp_path / "uv")})
    for name in ("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "CURL_CA_BUNDLE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in VARIABLES[noise].items():
        monkeypatch.setenv(name, value.format(**site))
    indexes.versions.cache_clear()
    known = configured != "unknown authority" or noise == "an authority by name"
    of_pip: tuple[str, ...] = ()
    if known and configured != "nothing":
        of_pip = indexes.versions("smallpackage", python="3.11")
    else:  # no silence counts as an answer
        with pytest.raises(indexes.UnresolvedError, match="no index of this machine answers"):
            indexes.versions("smallpackage", python="3.11")
    try:
        places = indexes.pip_places(find_links=True)
        of_lock = indexes.resolve(["smallpackage"], python="3.11", places=places)
    except indexes.UnresolvedError:
        of_lock = ""
    assert of_lock.split(" ")[0] == ("smallpackage==1.0" if of_pip else "")
    if of_pip and configured not in {"two lines", "trusted host"}:
        index = next(line for line in text.splitlines() if line.startswith("index-url"))
        assert Upstream()._session.get(f"{index.rpartition(' ')[2]}/smallpackage/", timeout=60).ok
