"""A key that others could exchange, or that is not one key, is refused before anything is believed."""

import base64
import os
import shutil
from pathlib import Path

import pytest

from small_images import new_key
from small_registry import serving
from stackcheck.certificate import key_sources, keyring, keys, passphrase
from stackcheck.errors import CertificateError, ConfigurationError


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


# A key from an address is believed by its fingerprint only.

KEY = new_key().public_key()
PEM = keys.public_pem(KEY)
HINT = keyring.hint(KEY)


def test_a_key_from_an_address_must_have_its_fingerprint() -> None:
    with serving(lambda _: (200, {}, PEM)) as (host, _seen):
        for text in (HINT, base64.b64decode(HINT).hex()):
            assert key_sources.public(f"http://{host}/stackcheck.pub#sha256={text}") == KEY
        other = keyring.hint(new_key().public_key())
        with pytest.raises(CertificateError, match="does not have the expected fingerprint") as caught:
            key_sources.public(f"http://{host}/stackcheck.pub#sha256={other}")
        assert (caught.value.got, caught.value.expected) == (HINT, other)


# The key is another one in each process, and pytest-xdist wants the same names in all.
@pytest.mark.parametrize(
    "fragment",
    [
        "",
        "#",
        "#sha256=",
        "#sha256=abc",
        pytest.param(f"#md5={HINT}", id="md5"),
        pytest.param(f"#{HINT}", id="bare"),
    ],
)
def test_an_address_without_a_fingerprint_is_not_asked(fragment: str) -> None:
    with serving(lambda _: (200, {}, PEM)) as (host, seen):
        with pytest.raises(ConfigurationError, match="no fingerprint"):
            key_sources.public(f"http://{host}/stackcheck.pub{fragment}")
        assert seen == []


def test_a_key_is_not_fetched_over_plain_http_from_another_machine() -> None:
    with pytest.raises(ConfigurationError, match="https only"):
        key_sources.public(f"http://registry.example.org/stackcheck.pub#sha256={HINT}")


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b"\xff\xfe", b"x" * 10**6, PEM + keys.public_pem(new_key().public_key())],
    ids=["empty", "page", "bytes", "long", "two"],
)
def test_an_address_that_gives_anything_else_is_refused(body: bytes) -> None:
    with serving(lambda _: (200, {}, body)) as (host, _seen), pytest.raises(CertificateError):
        key_sources.public(f"http://{host}/stackcheck.pub#sha256={HINT}")


def test_an_address_that_does_not_answer_is_a_clear_error() -> None:
    with serving(lambda _: (404, {}, b"")) as (host, _seen):
        with pytest.raises(CertificateError, match="there is no public key at this address") as caught:
            key_sources.public(f"http://{host}/stackcheck.pub#sha256={HINT}")
        assert "404" in str(caught.value.got)
