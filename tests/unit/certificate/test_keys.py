"""A key that others could exchange, or that is not one key, is refused before anything is believed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from stackcheck.certificate import keys
from stackcheck.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path


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
    for load in (keys.load, keys.load_public):
        with pytest.raises(ConfigurationError, match="no key that can be used"):
            load(signing)


def test_a_pipe_is_no_key_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        keys.load_public(tmp_path / "pipe")


def test_a_key_in_a_folder_that_everybody_can_write_to_is_refused(signing: Path) -> None:
    signing.parent.chmod(0o777)
    for load in (keys.load, keys.load_public):
        with pytest.raises(ConfigurationError, match="other users can replace this key file"):
            load(signing)
    signing.parent.chmod(0o1777)  # as /tmp: there nobody can replace the file of another
    assert keys.load(signing)


def test_a_public_key_that_everybody_can_write_is_refused(signing: Path) -> None:
    public = keys.public_path(signing)
    public.chmod(0o666)
    with pytest.raises(ConfigurationError, match="other users can replace this key file"):
        keys.load_public(public)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_key_of_another_user_is_refused(signing: Path) -> None:
    os.chown(signing, 12345, 12345)
    with pytest.raises(ConfigurationError, match="other users can replace this key file") as caught:
        keys.load(signing)
    assert "12345" in str(caught.value)
