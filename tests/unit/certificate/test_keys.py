"""A key that others could exchange, or that is not one key, is refused before anything is believed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from stackcheck.certificate import keys, passphrase
from stackcheck.errors import ConfigurationError


@pytest.fixture
def signing(tmp_path: Path) -> Path:
    path = tmp_path / "mine" / "x.key"
    keys.load_or_create(path)
    return path


def test_one_key_twice_or_a_key_beside_a_private_one_is_refused(tmp_path: Path, signing: Path) -> None:
    pem = keys.public_path(signing).read_bytes()
    (tmp_path / "two.pub").write_bytes(pem * 2)
    with pytest.raises(ConfigurationError) as caught:
        keys.load_public(tmp_path / "two.pub")
    assert caught.value.got == "the same key twice"
    signing.write_bytes(signing.read_bytes() + pem)
    for load in (keys.load_private_key, keys.load_public):
        with pytest.raises(ConfigurationError, match="no key that can be used"):
            load(signing)


def test_a_pipe_is_no_key_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        keys.load_public(tmp_path / "pipe")


def test_a_key_in_a_folder_that_everybody_can_write_to_is_refused(signing: Path) -> None:
    signing.parent.chmod(0o777)
    for load in (keys.load_private_key, keys.load_public):
        with pytest.raises(ConfigurationError, match="other users can replace this key file"):
            load(signing)
    signing.parent.chmod(0o1777)  # as /tmp: there nobody can replace the file of another
    assert keys.load_private_key(signing)


def test_a_public_key_that_everybody_can_write_is_refused(signing: Path) -> None:
    public = keys.public_path(signing)
    public.chmod(0o666)
    with pytest.raises(ConfigurationError, match="other users can replace this key file"):
        keys.load_public(public)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_key_of_another_user_is_refused(signing: Path) -> None:
    os.chown(signing, 12345, 12345)
    with pytest.raises(ConfigurationError, match="other users can replace this key file") as caught:
        keys.load_private_key(signing)
    assert "12345" in str(caught.value)


@pytest.mark.parametrize(
    "way", ["a link to it", "a link to its folder", "two links", "a link between", "its folder's folder"]
)
def test_a_key_on_a_way_that_others_can_change_is_refused(tmp_path: Path, signing: Path, way: str) -> None:
    """However the path leads there: by links of files and folders, and deep below an open folder."""
    safe, opened = tmp_path / "safe", tmp_path / "open"
    (opened / "closed").mkdir(parents=True)
    safe.mkdir()
    shutil.copy(signing, opened / "closed" / "x.key")
    named = {
        "a link to it": safe / "x.key",
        "a link to its folder": safe / "folder" / "x.key",
        "two links": safe / "first.key",
        "a link between": safe / "to_open" / "x.key",
        "its folder's folder": opened / "closed" / "x.key",
    }[way]
    (safe / "x.key").symlink_to(opened / "closed" / "x.key")
    (safe / "folder").symlink_to(opened / "closed")
    (safe / "first.key").symlink_to("../safe/./x.key")
    (opened / "back").symlink_to(signing.parent)
    (safe / "to_open").symlink_to(opened / "back")
    assert keys.load_private_key(named)
    opened.chmod(0o777)
    for load in (keys.load_private_key, keys.load_public):
        with pytest.raises(ConfigurationError, match="other users can replace this key file") as caught:
            load(named)
        assert str(opened) in str(caught.value)


def test_links_in_a_ring_are_no_key(tmp_path: Path) -> None:
    (tmp_path / "a.key").symlink_to(tmp_path / "b.key")
    (tmp_path / "b.key").symlink_to(tmp_path / "a.key")
    with pytest.raises(ConfigurationError):
        keys.load_private_key(tmp_path / "a.key")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another group")
def test_a_key_that_another_group_can_write_is_refused(signing: Path) -> None:
    public = keys.public_path(signing)
    os.chown(public, 0, 12345)
    public.chmod(0o664)
    with pytest.raises(ConfigurationError, match="other users can replace this key file"):
        keys.load_public(public)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602, 0o660])
def test_a_passphrase_that_others_can_use_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    file = tmp_path / "passphrase"
    file.write_text("word\n")
    monkeypatch.setenv(passphrase.FILE, str(file))
    file.chmod(mode)
    with pytest.raises(ConfigurationError, match="can be used by others"):
        passphrase.known(tmp_path / "x.key")
    file.chmod(0o400)
    assert passphrase.known(tmp_path / "x.key") == b"word"
