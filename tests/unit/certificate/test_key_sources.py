"""A key from an address is believed by its fingerprint only."""

from __future__ import annotations

import base64

import pytest

from small_images import new_key
from small_registry import serving
from stackcheck.certificate import key_sources, keyring, keys
from stackcheck.errors import CertificateError, ConfigurationError

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
