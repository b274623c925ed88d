"""A key that others could exchange, or that is not one key, is refused; who may sign, and with what."""

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from small_checkout import CPU_STACK, call, verify
from small_images import new_key
from small_registry import serving
from stackcheck.certificate import key_sources, keyring, keys, passphrase, signers
from stackcheck.errors import CertificateError, ConfigurationError


@pytest.fixture
def signing(tmp_path) -> Path:
    path = tmp_path / "mine" / "x.key"
    keys.load_or_create(path)
    return path


def test_one_key_twice_or_a_key_beside_a_private_one_is_refused(tmp_path, signing):
    pem = keys.public_path(signing).read_bytes()
    (tmp_path / "two.pub").write_bytes(pem * 2)
    with pytest.raises(ConfigurationError) as caught:
        keys.load_public(tmp_path / "two.pub")
    assert caught.value.got == "the same key twice"
    signing.write_bytes(signing.read_bytes() + pem)
    for load in (keys.load_private_key, keys.load_public):
        with pytest.raises(ConfigurationError, match="no key that can be used"):
            load(signing)


def test_a_pipe_is_no_key_and_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        keys.load_public(tmp_path / "pipe")


def test_a_key_in_a_folder_that_everybody_can_write_to_is_refused(signing):
    signing.parent.chmod(0o777)
    for load in (keys.load_private_key, keys.load_public):
        with pytest.raises(ConfigurationError, match="other users can replace this key file"):
            load(signing)
    signing.parent.chmod(0o1777)  # as /tmp: there nobody can replace the file of another
    assert keys.load_private_key(signing)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize(
    ("kind", "owner", "group", "mode"),
    [("pub", 0, 0, 0o666), ("pub", 0, 12345, 0o664), ("key", 12345, 12345, 0o600)],
    ids=["everybody writes", "another group writes", "another user"],
)
def test_a_key_that_another_can_change_is_refused(signing, kind, owner, group, mode):
    path = signing.with_suffix(f".{kind}")
    os.chown(path, owner, group)
    path.chmod(mode)
    load = keys.load_public if kind == "pub" else keys.load_private_key
    with pytest.raises(ConfigurationError, match="other users can replace this key file") as caught:
        load(path)
    assert not owner or str(owner) in str(caught.value)


@pytest.mark.parametrize(
    "way", ["a link to it", "a link to its folder", "two links", "a link between", "its folder's folder"]
)
def test_a_key_on_a_way_that_others_can_change_is_refused(tmp_path, signing, way):
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


def test_links_in_a_ring_are_no_key(tmp_path):
    (tmp_path / "a.key").symlink_to(tmp_path / "b.key")
    (tmp_path / "b.key").symlink_to(tmp_path / "a.key")
    with pytest.raises(ConfigurationError):
        keys.load_private_key(tmp_path / "a.key")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602, 0o660])
def test_a_passphrase_that_others_can_use_is_refused(tmp_path, monkeypatch, mode):
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


def test_a_key_from_an_address_must_have_its_fingerprint():
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
def test_an_address_without_a_fingerprint_is_not_asked(fragment):
    with serving(lambda _: (200, {}, PEM)) as (host, seen):
        with pytest.raises(ConfigurationError, match="no fingerprint"):
            key_sources.public(f"http://{host}/stackcheck.pub{fragment}")
        assert seen == []


def test_a_key_is_not_fetched_over_plain_http_from_another_machine():
    with pytest.raises(ConfigurationError, match="https only"):
        key_sources.public(f"http://registry.example.org/stackcheck.pub#sha256={HINT}")


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b"\xff\xfe", b"x" * 10**6, PEM + keys.public_pem(new_key().public_key())],
    ids=["empty", "page", "bytes", "long", "two"],
)
def test_an_address_that_gives_anything_else_is_refused(body):
    with serving(lambda _: (200, {}, body)) as (host, _seen), pytest.raises(CertificateError):
        key_sources.public(f"http://{host}/stackcheck.pub#sha256={HINT}")


def test_an_address_that_does_not_answer_is_a_clear_error():
    with serving(lambda _: (404, {}, b"")) as (host, _seen):
        with pytest.raises(CertificateError, match="there is no public key at this address") as caught:
            key_sources.public(f"http://{host}/stackcheck.pub#sha256={HINT}")
        assert "404" in str(caught.value.got)


PASSPHRASE = "korrekt-Pferd-Batterie-7351"
# A token: it has the key, prints its signature, and has seen the bytes.
TOKEN = """\
import sys
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
key = serialization.load_pem_private_key(open(sys.argv[1], "rb").read(), None)
sys.stdout.buffer.write(key.sign(sys.stdin.buffer.read(), ec.ECDSA(hashes.SHA256())))
"""


@pytest.fixture
def token(tmp_path) -> tuple[str, ...]:
    """The command of a program that signs with the key beside token.pub."""
    (tmp_path / "my_token.py").write_text(TOKEN)
    keys.load_or_create(tmp_path / "token.key")
    return (sys.executable, str(tmp_path / "my_token.py"), str(tmp_path / "token.key"))


def signature(folder: Path, *command: str) -> bytes:
    found = signers.choose(folder / "token.pub", command)
    return found.sign(b"data", ec.ECDSA(hashes.SHA256()))


def test_a_program_signs_with_a_key_that_never_comes_here(tmp_path, token):
    public = keys.load_public(tmp_path / "token.pub")
    assert keyring.signer(public, signature(tmp_path, *token), b"data")


def test_a_signature_of_64_bytes_is_read_as_a_token_gives_it(tmp_path):
    key = keys.load_or_create(tmp_path / "token.key")
    r, s = decode_dss_signature(key.sign(b"data", ec.ECDSA(hashes.SHA256())))
    (tmp_path / "raw").write_bytes(r.to_bytes(32) + s.to_bytes(32))
    assert keyring.signer(key.public_key(), signature(tmp_path, "cat", str(tmp_path / "raw")), b"data")


@pytest.mark.parametrize(
    ("command", "got"),
    [
        (("no-such-program",), "No such file"),
        (("false",), "exit 1"),
        (("true",), "0 bytes"),
        (("cat", "/proc/self/cmdline"), "no signature"),
        (("yes",), "exit"),
        (("sh", "-c", "echo token locked >&2; exit 3"), "token locked"),
    ],
)
def test_a_program_that_gives_no_signature_is_refused(tmp_path, command, got):
    keys.load_or_create(tmp_path / "token.key")
    if command == ("yes",):
        command = ("sh", "-c", "yes | head -c 100000")
        got = "100000 bytes"
    with pytest.raises(ConfigurationError, match="no valid signature") as caught:
        signature(tmp_path, *command)
    assert got in str(caught.value.got)


def test_a_program_with_another_key_or_a_retired_one_is_refused(tmp_path, token):
    public = tmp_path / "token.pub"
    own = public.read_bytes()
    for content in (keys.public_pem(new_key().public_key()), b"retired: 2026-11-01\n" + own):
        public.write_bytes(content)
        with pytest.raises(ConfigurationError, match="no valid signature"):
            signature(tmp_path, *token)


def test_an_encrypted_key_opens_with_its_passphrase_and_with_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "k.key"
    monkeypatch.setenv("STACKCHECK_KEY_PASSPHRASE", PASSPHRASE)
    key = keys.load_or_create(path, encrypt=True)
    assert b"ENCRYPTED" in path.read_bytes()
    assert keyring.hints(keys.load_public(keys.public_path(path))) == (keyring.hint(key.public_key()),)
    monkeypatch.setenv("STACKCHECK_KEY_PASSPHRASE", "wrong")
    with pytest.raises(ConfigurationError, match="no key that can be used") as caught:
        keys.load_private_key(path)
    assert "wrong" not in str(caught.value)
    monkeypatch.delenv("STACKCHECK_KEY_PASSPHRASE")
    monkeypatch.setenv("STACKCHECK_KEY_PASSPHRASE_FILE", str(tmp_path / "secret"))
    with pytest.raises(ConfigurationError, match="passphrase cannot be read"):
        keys.load_private_key(path)
    (tmp_path / "secret").write_text(f"{PASSPHRASE}\n")
    (tmp_path / "secret").chmod(0o600)
    assert keys.load_private_key(path).public_key() == key.public_key()
    monkeypatch.delenv("STACKCHECK_KEY_PASSPHRASE_FILE")
    monkeypatch.setattr(sys, "stdin", Path(os.devnull).open())  # noqa: SIM115  # ends with the test
    with pytest.raises(ConfigurationError, match="no terminal"):
        keys.load_private_key(path)


@pytest.fixture
def started(monkeypatch) -> Iterator[list[str]]:
    """The arguments and the environment of every process that was started."""
    found: list[str] = []
    whole = subprocess.Popen.__init__

    def recorded(self: Any, args: Any, **changes: Any) -> None:
        found.append(f"{args} {changes.get('env') or ''}")
        whole(self, args, **changes)

    monkeypatch.setattr(subprocess.Popen, "__init__", recorded)
    return found


def forms(key: ec.EllipticCurvePrivateKey) -> list[bytes]:
    """The ways in which a private key could be written somewhere."""
    plain = key.private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    number = key.private_numbers().private_value
    raw = number.to_bytes(32)
    body = base64.b64encode(plain)
    texts = (raw.hex(), raw.hex().upper(), str(number), base64.b64encode(raw).decode().rstrip("="))
    return [raw, body[40:100], *(item.encode() for item in texts)]


@pytest.mark.usefixtures("own_home", "no_disk_flushes")
@pytest.mark.parametrize("how", ["passphrase", "program"])
def test_no_secret_is_in_an_argument_a_log_a_result_or_an_image(
    tmp_path, fake_engine, started, *, token, monkeypatch, capsys, how
):
    if how == "program":
        path, options = tmp_path / "token.key", ("--sign-with", " ".join(token))
        public = tmp_path / "token.pub"
        key = keys.load_private_key(path)
        arguments: tuple[str, ...] = ("--key", str(public), *options)
    else:
        monkeypatch.setenv("STACKCHECK_KEY_PASSPHRASE", PASSPHRASE)
        path = keys.default_path()
        said = call(capsys, "key", "--passphrase")
        public, key, arguments = keys.public_path(path), keys.load_private_key(path), ()
        assert said.code == 0
    out = ""
    for words in (("certify", CPU_STACK), ("publish", CPU_STACK)):
        done = call(capsys, *words, *arguments)
        assert done.code == 0, done.err
        out += done.out + done.err
    monkeypatch.delenv("STACKCHECK_KEY_PASSPHRASE", raising=False)  # a reader needs none
    found = json.loads(verify(capsys, f"oci:dist:{CPU_STACK}", "--json", "--key", str(public)).out)
    monkeypatch.setenv("STACKCHECK_KEY_PASSPHRASE", PASSPHRASE)
    done = call(capsys, "revoke", found["run"], "--reason", "NaN", *arguments)
    out += f"{found} {done.out} {done.err} {fake_engine.runs} {fake_engine.builds} {started}"
    assert done.code == 0, done.err
    assert verify(capsys, f"oci:dist@{found['digest']}", "--key", str(public)).code == 7
    files = {item: item.read_bytes() for item in tmp_path.rglob("*") if item.is_file() and item != path}
    assert len(files) > 20
    for secret in (*forms(key), PASSPHRASE.encode()):
        assert secret not in out.encode()
        assert [str(item) for item, body in files.items() if secret in body] == []
    assert secret_forms_are_found(key, path)


def secret_forms_are_found(key: ec.EllipticCurvePrivateKey, path: Path) -> bool:
    """The search can fail: an unencrypted key file has one of these forms."""
    body = path.read_bytes().replace(b"\n", b"")
    return b"ENCRYPTED" in body or any(form in body for form in forms(key))


@pytest.mark.parametrize(
    "script",
    [
        "exec yes",
        "exec yes >&2",
        "head -c 3000000 /dev/zero",
        "sleep 600 & echo not a signature",  # a child keeps the output open
        "sleep 600 & exit 3",
    ],
)
def test_a_program_that_prints_without_an_end_or_leaves_a_child_ends_soon_and_is_refused(
    tmp_path, monkeypatch, script
):
    """It would take up all memory, or hold up the run for as long as its child lives."""
    keys.load_or_create(tmp_path / "token.key")
    waited: list[float | None] = []
    wait = subprocess.Popen.wait

    def counted(process: Any, timeout: float | None = None) -> int:
        waited.append(timeout)
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", counted)
    before = os.times().children_user
    with pytest.raises(ConfigurationError, match="no valid signature") as caught:
        signature(tmp_path, "sh", "-c", script)
    assert "within" not in str(caught.value.expected), "it ended by itself, not by the time limit"
    assert waited[0] == signers.TIMEOUT_S
    assert os.times().children_user - before < 60
