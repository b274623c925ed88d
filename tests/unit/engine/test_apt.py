import shutil
from pathlib import Path

import pytest

from stackcheck.engine import apt, host_setup
from stackcheck.errors import EngineError

ASSETS = Path(__file__).parents[1] / "assets" / "apt"


@pytest.fixture
def etc_apt(tmp_path: Path) -> Path:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "preferences.d").mkdir()
    return tmp_path


@pytest.fixture
def deb822(etc_apt: Path) -> Path:
    shutil.copy(ASSETS / "debian12.sources", etc_apt / "sources.list.d")
    return etc_apt


def test_only_enabled_binary_stanzas_count(deb822: Path) -> None:
    assert [source.uris for source in apt.sources(deb822)] == [
        ("http://mirror.example.org/debian",),
        ("http://mirror.example.org/debian-security",),
    ]


def test_one_line_sources_keep_their_keyring(etc_apt: Path) -> None:
    shutil.copy(ASSETS / "debian12.list", etc_apt / "sources.list")
    shutil.copy(ASSETS / "debian12.list", etc_apt / "sources.list.d" / "switched-off.list.disabled")
    assert apt.sources(etc_apt) == (
        apt.AptSource(
            uris=("http://mirror.example.org/debian",),
            suites=("bookworm",),
            components=("main", "contrib"),
            signed_by="/usr/share/keyrings/own.gpg",
        ),
    )


def test_another_suite_comes_from_the_hosts_own_mirror(deb822: Path) -> None:
    source = apt.for_suite("trixie", folder=deb822)
    assert source.text() == (
        "Types: deb\nURIs: http://mirror.example.org/debian\nSuites: trixie\nComponents: main\n"
        "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n"
    )


def test_a_host_without_its_own_archive_is_told_what_to_write(etc_apt: Path) -> None:
    with pytest.raises(EngineError) as caught:
        apt.for_suite("trixie", folder=etc_apt)
    assert "a source with a suite of Debian" in str(caught.value)


def test_the_second_source_is_pinned_away_but_for_the_engine(
    deb822: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apt, "host_release", lambda: {"VERSION_CODENAME": "bookworm"})
    before = apt.sources(deb822)
    host_setup.add_pinned_source("trixie", ("docker.io", "docker-cli"), folder=deb822)
    pins = (deb822 / "preferences.d" / "stackcheck-engine").read_text()
    assert "Package: docker.io docker-cli\nPin: release n=trixie\nPin-Priority: 990" in pins
    assert "Package: *\nPin: release n=trixie\nPin-Priority: -1" in pins
    assert apt.sources(deb822) == before  # what this tool wrote is never taken for the host's own


def test_apts_files_are_read_in_any_encoding(tmp_path: Path) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d" / "key.gpg").write_bytes(b"\x99\xff")
    (tmp_path / "sources.list").write_bytes(b"# f\xfcr uns\ndeb http://host/debian bookworm main\n")
    assert [source.suites for source in apt.sources(tmp_path)] == [("bookworm",)]
