"""What `lock` and a build ask for follows the settings of pip on the host, however they are written."""

import configparser
import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from stackcheck.engine import apt
from stackcheck.errors import ConfigurationError
from stackcheck.files import pip_settings, requirements
from stackcheck.imaging.wheels import host_settings, wheel_supply, wheelhouse
from stackcheck.matrix import resolve
from stackcheck.matrix.stack import Stack
from stackcheck.mirrors import NO_MIRRORS, Mirrors
from stackcheck.recipe import lock
from stackcheck.recipe.indexes import UnresolvedError
from stackcheck.recipe.upstream import OutOfReachError, Upstream, torch_places

ROOT = Path(__file__).resolve().parents[4]
PUBLIC, AMDS = "https://download.pytorch.org/whl/", "https://repo.radeon.com/rocm/manylinux/"
MIRRORED = Mirrors(
    urls={
        PUBLIC.rstrip("/"): "https://mirror.example.org/torch",
        AMDS.rstrip("/"): "https://mirror.example.org/amd",
    }
)
# What a host's pip may be told, each alone and with the others.
INDEX = (None, "https://pip.example.org/simple", "file:///srv/simple")
EXTRA = (None, "https://more.example.org/simple", "file:///srv/more")
LINKS = (None, "https://links.example.org/", "/srv/wheels")
NO_INDEX = (None, "true")
STACKS = (("amd", "upstream"), ("amd", "amd"), ("nvidia", "upstream"))
CONFIGURATIONS = [*itertools.product(INDEX, EXTRA, LINKS, NO_INDEX)]


@functools.cache
def stack_of(vendor: str, wheels: str) -> Stack:
    """A stack of the matrix whose torch is built there."""
    every = resolve.load_stacks(ROOT)
    return next(one for one in every if (one.vendor, one.wheels) == (vendor, wheels))


def configure(monkeypatch: pytest.MonkeyPatch, values: Sequence[str | None]) -> str:
    names = ("index-url", "extra-index-url", "find-links", "no-index")
    listed = "".join(f"global.{n}='{v}'\n" for n, v in zip(names, values, strict=True) if v)
    monkeypatch.setattr(pip_settings, "_listed", lambda _environment: listed)
    return listed


def asked_by_lock(stack: Stack, upstream: Upstream) -> tuple[str, ...]:
    """The last question's places: as if pip's own places had no torch."""
    questions: list[tuple[str, ...]] = []

    def question(places: Sequence[str]) -> str:
        questions.append(tuple(places))
        if len(questions) == 1 and stack.wheels != "amd":
            raise UnresolvedError("torch", silent=False)
        return "found"

    lock.ask(stack, upstream, question)
    return questions[-1]


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize(
    ("mirrors", "reached"), [(NO_MIRRORS, True), (NO_MIRRORS, False), (MIRRORED, True), (MIRRORED, False)]
)
def test_a_build_asks_torchs_makers_where_and_only_where_lock_did(
    name, mirrors, reached, monkeypatch, tmp_path
):
    stack = stack_of(*name)
    monkeypatch.setattr(Upstream, "answers", lambda _self, url: None if reached else f"{url}: out of reach")
    monkeypatch.setattr(host_settings, "ca_bundle", lambda _settings: None)
    ((_, public),) = torch_places(stack)
    own = mirrors.url(public)
    for values in CONFIGURATIONS:
        configure(monkeypatch, values)
        upstream = Upstream(mirrors=mirrors)
        try:
            of_lock = own in [place.partition("=")[2] for place in asked_by_lock(stack, upstream)]
        except (UnresolvedError, OutOfReachError):
            of_lock = False
        told = configparser.ConfigParser()
        told.read_string(conf_of_build(stack, upstream, monkeypatch, tmp_path) or "[global]\n")
        settings = dict(told["global"])
        named = " ".join(
            settings.get(setting, "") for setting in ("index-url", "extra-index-url", "find-links")
        ).split()
        asked = own in named and ("no-index" not in settings or own in settings.get("find-links", ""))
        if of_lock:
            assert asked, (values, settings)
        elif not (mirrors is MIRRORED or reached):
            assert own not in named, (values, settings)
        if values[0] == INDEX[2]:  # the host's main index is a folder: the default one is never asked
            assert "no-index" in settings or "index-url" in settings


def conf_of_build(stack: Stack, upstream: Upstream, monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    """The pip.conf of a stage that lacks torch's wheel."""
    supply = wheel_supply.Supply(
        settings=host_settings.host_settings(), closed=False, cache=None, cached={}, debs={},
        upstream=upstream, report=print,
    )  # fmt: skip
    found = SimpleNamespace(lay_out=lambda _folder: ["a.whl"], missing=lambda *_args: ["torch"])
    monkeypatch.setattr(wheel_supply, "packages", lambda *_args: ("torch",))
    monkeypatch.setattr(wheel_supply, "pinned", lambda *_args: ())
    monkeypatch.setattr(wheelhouse, "look", lambda *_args: found)
    plan = SimpleNamespace(stack=dataclasses.replace(stack), platform="linux/amd64")
    return supply.lay_out(plan, SimpleNamespace(instructions=()), folder)  # type: ignore[arg-type]


def test_a_wheelhouse_of_our_own_does_not_hide_torchs_index(monkeypatch, tmp_path):
    monkeypatch.setattr(Upstream, "answers", lambda *_args: None)
    monkeypatch.setattr(host_settings, "ca_bundle", lambda _settings: None)
    configure(monkeypatch, (None, None, None, None))
    conf = conf_of_build(stack_of(*STACKS[0]), Upstream(), monkeypatch, tmp_path)
    assert f"extra-index-url = {PUBLIC}rocm" in conf
    assert "find-links = /stackcheck-wheelhouse\n" in conf


LISTED = """\
:env:.default-timeout='60'
:env:.find-links='/srv/wheels https://links.example.org/'
global.cert='/etc/ssl/site.crt'
global.extra-index-url='file:///srv/index/simple https://extra.example.org/simple'
global.find-links='/overridden'
global.index-url='https://reader:secret@index.example.org/simple'
install.pre='true'
"""


@pytest.fixture
def settings(monkeypatch) -> host_settings.HostSettings:
    monkeypatch.setattr(host_settings, "pip_settings", lambda: pip_settings.parse(LISTED))
    monkeypatch.setattr(host_settings, "ca_bundle", lambda _settings: None)
    return host_settings.host_settings()


def test_the_environment_wins_over_files_as_in_pip():
    parsed = pip_settings.parse(LISTED)
    assert parsed["find-links"] == ("/srv/wheels", "https://links.example.org/")
    assert parsed["pre"] == ("true",)


def test_local_places_become_the_wheelhouse_and_remote_ones_pass(settings):
    assert settings.folders == (Path("/srv/wheels"),)
    assert settings.indexes == (Path("/srv/index/simple"),)
    text = settings.pip_conf(wheelhouse=True)
    assert "find-links = /stackcheck-wheelhouse https://links.example.org/" in text
    assert "index-url = https://reader:secret@index.example.org/simple" in text
    assert "extra-index-url = https://extra.example.org/simple" in text
    assert "/srv" not in text


def test_a_host_with_only_a_local_index_asks_no_other(monkeypatch):
    monkeypatch.setattr(host_settings, "pip_settings", lambda: {"index-url": ("file:///srv/index/simple",)})
    monkeypatch.setattr(host_settings, "ca_bundle", lambda _settings: None)
    assert "no-index = true" in host_settings.host_settings().pip_conf(wheelhouse=True)


def test_a_bundle_too_large_for_a_secret_is_refused_before_the_build(tmp_path, monkeypatch):
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):  # which pip takes first
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "large.crt").write_bytes(b"x" * (host_settings.SECRET_LIMIT_BYTES + 1))
    with pytest.raises(ConfigurationError, match="too large"):
        host_settings.ca_bundle({"cert": (str(tmp_path / "large.crt"),)})


def test_apt_sources_pass_only_between_equal_distributions(monkeypatch):
    monkeypatch.setattr(apt, "host_release", lambda: {"ID": "debian", "VERSION_CODENAME": "bookworm"})
    source = apt.AptSource(
        uris=("http://mirror.example.org/debian",),
        suites=("bookworm", "bookworm-updates"),
        components=("main",),
        signed_by="/k.gpg",
    )
    monkeypatch.setattr(apt, "sources", lambda: (source,))
    assert host_settings.apt_sources("debian13") == (
        "deb [signed-by=/k.gpg] http://mirror.example.org/debian trixie main\n"
        "deb [signed-by=/k.gpg] http://mirror.example.org/debian trixie-updates main\n"
    )
    assert host_settings.apt_sources("ubuntu24.04") == ""


def host_with(tmp_path: Path, files: dict[str, bytes]) -> host_settings.HostSettings:
    folder, index = tmp_path / "wheels", tmp_path / "index"
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    page = index / "simple" / "my-lib" / "index.html"
    page.parent.mkdir(parents=True)
    (index / "files").mkdir()
    (index / "files" / "my_lib-2.0-py3-none-any.whl").write_bytes(b"indexed")
    digest = hashlib.sha256(b"indexed").hexdigest()
    page.write_text(
        f'<a href="../../files/my_lib-2.0-py3-none-any.whl#sha256={digest}">x</a>'
        '<a href="https://files.example.org/my_lib-2.0-py3-none-any.whl">remote</a>'
        '<a href="../../files/gone-2.0-py3-none-any.whl">gone</a>'
    )
    return host_settings.HostSettings(pip={}, folders=(folder,), indexes=(index / "simple",), ca=None)


def entry(name: str, data: bytes) -> str:
    return f"{name} \\\n    --hash=sha256:{hashlib.sha256(data).hexdigest()}\n"


def gather(lock: str, host: host_settings.HostSettings, folder: Path) -> tuple[str, ...]:
    return wheelhouse.look(requirements.read_packages(lock), host, {}).lay_out(folder)


def test_only_what_the_lock_names_is_gathered(tmp_path):
    host = host_with(
        tmp_path,
        {
            "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl": b"torch",
            "torch-2.12.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl": b"old torch",
            "other-1.0-py3-none-any.whl": b"other",
            "notes.txt": b"no wheel",
        },
    )
    lock = entry("torch==2.13.0+cpu", b"torch") + entry("my-lib==2.0", b"indexed")
    assert gather(lock, host, tmp_path / "house") == (
        "my_lib-2.0-py3-none-any.whl",
        "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl",
    )


def test_a_users_wheel_is_left_as_it_is_and_one_of_the_cache_is_linked(tmp_path):
    """uv unpacks a local wheel anew when its inode's time has changed, as a link to it would."""
    host = host_with(tmp_path, {"a-1.0-py3-none-any.whl": b"a"})
    users = host.folders[0] / "a-1.0-py3-none-any.whl"
    cached = tmp_path / "cache" / "b-1.0-py3-none-any.whl"
    cached.parent.mkdir()
    cached.write_bytes(b"b")
    wanted = requirements.read_packages(entry("a==1.0", b"a") + entry("b==1.0", b"b"))
    before = users.stat().st_ctime_ns
    house = tmp_path / "house"
    named = wheelhouse.look(wanted, host, {hashlib.sha256(b"b").hexdigest(): cached}).lay_out(house)
    assert named == (users.name, cached.name)
    assert users.stat().st_ctime_ns == before
    assert (house / users.name).read_bytes() == b"a"
    assert (house / cached.name).samefile(cached)
