"""Whatever sources a host has, a base comes from the right archive, or an error says what to do."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import apt_layouts
from stackcheck.engine import apt
from stackcheck.errors import BuildError, ConfigurationError, EngineError
from stackcheck.imaging import base_sources, bootstrap

SUITES = {"bookworm": "debian12", "trixie": "debian13"}
LINE = "deb [signed-by=/k.gpg] https://mirror.example.org/debian {suite} main"
PARTS = ("", "-security")
LACKS = ", without security updates"
TODAY, OLD = "B8B80B5B623EAB6AD8775C45B7C5D7D6350947F8", "1F89983E0081FDE018F3CC9673A4F27B8DD47936"


@pytest.fixture
def host(tmp_path, monkeypatch) -> Callable[..., None]:
    """Make the tool see a drawn host; `keyring` holds these keys, or is not there."""
    real = apt.sources

    def become(drawn: apt_layouts.Host, keyring: str | None, *, root: bool, candidate: str = "") -> None:
        folder = drawn.write(tmp_path / f"{len(list(tmp_path.iterdir()))}")
        monkeypatch.setattr(apt, "sources", lambda: real(folder))
        monkeypatch.setattr(apt, "host_release", lambda: {"PRETTY_NAME": drawn.release})
        monkeypatch.setattr(base_sources.os, "geteuid", lambda: 0 if root else 1000)
        monkeypatch.setattr(base_sources.shutil, "which", lambda name: f"/usr/bin/{name}")
        monkeypatch.setattr(base_sources, "_candidate_too_old", lambda _of: candidate)
        path = folder / "debian-archive-keyring.gpg"
        if keyring:
            path.write_bytes(b"keys")
        of = base_sources.dataclasses.replace(apt.DEBIAN, keyring=path)
        monkeypatch.setattr(base_sources, "DISTRIBUTIONS", (of,))
        monkeypatch.setattr(base_sources.openpgp, "fingerprints", lambda _bytes: frozenset({keyring}))

    return become


def stanzas(text: str) -> list[dict[str, str]]:
    """Sources of apt, read without the tool."""
    blocks = [
        re.findall(r"^([\w-]+): ?(.*(?:\n[ \t].*)*)", block, re.MULTILINE) for block in text.split("\n\n")
    ]
    return [{name: value.rstrip("\n") for name, value in block} for block in blocks if block]


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("seed", range(60))
def test_every_layout_gives_the_right_archive_or_says_what_to_write(seed, suite, host):
    drawn = apt_layouts.draw(seed)
    mirrored, root = seed % 3 == 0, seed % 2 == 0
    keyring = (None, TODAY, OLD)[seed % 5 % 3]
    host(drawn, keyring, root=root)
    mirror = tuple(LINE.format(suite=f"{suite}{part}") for part in PARTS[: 1 + seed % 2]) if mirrored else ()
    own = "this host's archive of debian" + ("" if drawn.security_archive else LACKS)
    site = "the site's mirror" + ("" if len(mirror) == len(PARTS) else LACKS)
    expected = [own] if drawn.distribution == "debian" else []
    expected += [site] if mirrored else []
    expected += ["the public archive of debian"] if keyring == TODAY or (keyring is None and root) else []
    if not expected:
        with pytest.raises(ConfigurationError) as caught:
            base_sources.ways(suite, SUITES[suite], mirror)
        told = str(caught.value)
        assert f"{SUITES[suite]}:" in told
        assert "debian-archive-keyring" in told
        assert all(f" {suite}{part} main" in told for part in ("", "-updates", "-security"))
        assert drawn.release in told
        return
    found = base_sources.ways(suite, SUITES[suite], mirror)
    assert [way.name for way in found] == expected
    for way in found:
        assert (way.sources == "") == (way.keyring is not None)
    if drawn.distribution == "debian":
        check_own(drawn, suite, stanzas(found[0].sources))
    if mirrored:
        (told,) = (stanzas(way.sources) for way in found if way.name == site)
        assert told == [
            {"Types": "deb", "URIs": "https://mirror.example.org/debian", "Suites": f"{suite}{part}",
             "Components": "main", "Signed-By": "/k.gpg"}
            for part in PARTS[: len(mirror)]
        ]  # fmt: skip


def check_own(drawn: apt_layouts.Host, suite: str, told: list[dict[str, str]]) -> None:
    """The host's own archive alone, at the base's suite, verified as the host verifies it."""
    archive = told[0]
    assert archive["URIs"].rstrip("/") == drawn.archive
    assert archive["Suites"] == f"{suite} {suite}-updates"
    assert [stanza["URIs"].rstrip("/") for stanza in told[1:]] == (
        [drawn.security_archive] if drawn.security_archive else []
    )
    assert all(stanza["Suites"] == f"{suite}-security" for stanza in told[1:])
    for stanza in told:
        assert stanza["Components"] == "main"
        assert stanza.get("Signed-By") == drawn.signed_by
        assert {name: stanza.get(name.title()) for name, _ in drawn.settings} == dict(drawn.settings)


def test_a_keyring_package_that_is_too_old_is_refused_before_it_is_installed(host):
    drawn = next(one for one in map(apt_layouts.draw, range(60)) if one.release == "ubuntu22.04")
    host(drawn, None, root=True, candidate="debian-archive-keyring 2021.1.1ubuntu2 is too old")
    with pytest.raises(ConfigurationError, match=r"2021\.1\.1ubuntu2 is too old"):
        base_sources.ways("bookworm", "debian12", ())


@pytest.mark.parametrize(
    ("version", "old"),
    [("2021.1.1ubuntu2", True), ("2021.1", True), ("2023.1", False), ("2023.4ubuntu1", False), ("", False)],
)
def test_versions_of_the_keyring_package_are_told_apart(version, old, monkeypatch):
    def shown(*_args: object, **_options: object) -> object:
        text = f"Package: debian-archive-keyring\nVersion: {version}\n" if version else ""
        return base_sources.subprocess.CompletedProcess((), 0, stdout=text)

    monkeypatch.setattr(base_sources.subprocess, "run", shown)
    assert bool(base_sources._candidate_too_old(apt.DEBIAN)) == old


def test_a_mirror_without_the_suite_is_named(host):
    drawn = next(one for one in map(apt_layouts.draw, range(60)) if one.distribution == "ubuntu")
    host(drawn, OLD, root=True)
    with pytest.raises(ConfigurationError, match="have no `trixie main`"):
        base_sources.ways("trixie", "debian13", (LINE.format(suite="bookworm"),))


def test_the_next_way_is_taken_where_one_does_not_give_the_base(tmp_path, monkeypatch):
    names = ("this host's archive of debian", "the site's mirror")
    found = tuple(base_sources.Way(name=name, sources=f"{name}\n") for name in names)
    monkeypatch.setattr(base_sources, "ways", lambda *_args: found)
    monkeypatch.setattr(bootstrap.os, "geteuid", lambda: 0)
    monkeypatch.setattr(bootstrap.shutil, "which", lambda name: name)
    asked: list[str] = []

    def run(command: list[str]) -> str | None:
        asked.append(Path(command[-1]).read_text())
        if len(asked) == 1:
            return "exit code 1\n    E: no suite bookworm"
        Path(command[-2]).write_bytes(b"a root")
        return None

    monkeypatch.setattr(bootstrap, "_run", run)
    monkeypatch.setattr(bootstrap, "installed_packages", lambda _tar: {"base-files": "12"})
    lines: list[str] = []
    made = bootstrap.bootstrap("bookworm", ("python3.11",), tmp_path, report=lines.append)
    assert asked == [f"{name}\n" for name in names]
    assert (made.way, made.reused) == ("the site's mirror", False)
    assert "this host's archive of debian did not give the base: E: no suite bookworm" in lines
    again = bootstrap.bootstrap("bookworm", ("python3.11",), tmp_path, report=lines.append)
    assert (again.way, again.reused, again.digest) == ("the site's mirror", True, made.digest)


def test_where_no_way_gives_the_base_each_reason_is_told(tmp_path, monkeypatch):
    found = tuple(base_sources.Way(name=name, sources="x") for name in ("one archive", "another"))
    monkeypatch.setattr(base_sources, "ways", lambda *_args: found)
    monkeypatch.setattr(bootstrap.os, "geteuid", lambda: 0)
    monkeypatch.setattr(bootstrap.shutil, "which", lambda name: name)
    monkeypatch.setattr(bootstrap, "_run", lambda command: f"{Path(command[-2]).name}: nothing")
    with pytest.raises(BuildError) as caught:
        bootstrap.bootstrap("bookworm", (), tmp_path, report=lambda _line: None)
    assert "one archive: rootfs.tar: nothing\n    another: rootfs.tar: nothing" in str(caught.value)
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize(
    ("there", "ids", "told"),
    [
        ((), "me:100000:65536\n", "sudo apt-get install -y mmdebstrap uidmap"),
        (("mmdebstrap",), "me:100000:65536\n", "sudo apt-get install -y uidmap"),
        (("mmdebstrap", "newuidmap"), "you:100000:65536\n", "usermod --add-subuids"),
        (("mmdebstrap", "newuidmap"), "me:100000:65536\n", None),
        (("mmdebstrap", "newuidmap"), "1000:100000:65536\n", None),
    ],
)
def test_without_root_what_is_missing_is_named(there, ids, told, tmp_path, monkeypatch):
    way = base_sources.Way(name="one archive", sources="x")
    monkeypatch.setattr(base_sources, "ways", lambda *_args: (way,))
    monkeypatch.setattr(bootstrap.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(bootstrap.users.pwd, "getpwuid", lambda _uid: type("User", (), {"pw_name": "me"}))
    monkeypatch.setattr(bootstrap.shutil, "which", lambda name: name if name in there else None)
    (tmp_path / "subuid").write_text(ids)
    monkeypatch.setattr(bootstrap, "SUBORDINATE_IDS", tmp_path / "subuid")
    if told is None:
        assert bootstrap.ready("bookworm", "debian12", ()) == (way,)
        command = bootstrap._command("bookworm", (), bootstrap.NOTHING_SELECTED, tmp_path / "r.tar", way)
        assert "--mode=unshare" in command
        return
    with pytest.raises(EngineError) as caught:
        bootstrap.ready("bookworm", "debian12", ())
    assert told in str(caught.value)


def test_the_hosts_proxies_reach_the_base_and_nothing_that_allows_unsigned_archives():
    dump = (
        'Acquire::http::Proxy "http://proxy.example.org:3128";',
        'Acquire::http::Proxy::mirror.example.org "DIRECT";',
        'Acquire::https::CaInfo "/etc/ssl/own.pem";',
        'Acquire::https::Proxy "";',
        'Acquire::ForceIPv4 "true";',
        'Acquire::Check-Valid-Until "false";',
        'Acquire::AllowInsecureRepositories "true";',
        'APT::Get::AllowUnauthenticated "true";',
        'APT::Install-Recommends "true";',
    )
    assert apt.reach_options(dump) == (*dump[:3], *dump[4:6])
