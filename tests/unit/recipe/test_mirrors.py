"""A site's mirrors file: what it may say, and who decides; AMD's key is known by its fingerprint."""

import base64
from pathlib import Path

import pytest

from stackcheck import mirrors
from stackcheck.errors import ConfigurationError
from stackcheck.files import openpgp
from stackcheck.matrix import resolve
from stackcheck.mirrors import NO_MIRRORS, Mirrors
from stackcheck.recipe import mirror_list, rocm
from stackcheck.recipe.upstream import OutOfReachError, Upstream

TEXT = """\
schema: 1
urls:
  https://download.pytorch.org/whl: https://mirror.example.org/pytorch/
  https://download.pytorch.org/whl/rocm7.2: https://fast.example.org/rocm
registries: {docker.io: "registry.example.org:5000/hub"}
apt:
  ubuntu24.04: ["deb [signed-by=/usr/share/keyrings/site.gpg] https://mirror.example.org/ubuntu noble main"]
keys: {"https://repo.radeon.com": keys/rocm.gpg}
"""
WHL = "https://download.pytorch.org/whl"


def write(folder: Path, text: str = TEXT) -> Path:
    path = folder / "mirrors.yaml"
    path.write_text(text)
    return path


def test_the_longest_beginning_decides_and_other_addresses_stay(tmp_path):
    found = mirrors.load_mirrors(write(tmp_path))
    assert found.url(f"{WHL}/rocm7.2/torch/") == "https://fast.example.org/rocm/torch/"
    assert found.url(f"{WHL}/rocm7.14") == "https://mirror.example.org/pytorch/rocm7.14"
    assert found.url(f"{WHL}-other/x") == f"{WHL}-other/x"
    assert found.url("https://repo.radeon.com/rocm") == "https://repo.radeon.com/rocm"


def test_short_names_of_images_are_dockers(tmp_path):
    found = mirrors.load_mirrors(write(tmp_path))
    assert found.image("ubuntu:24.04") == "registry.example.org:5000/hub/library/ubuntu:24.04"
    assert found.image("rocm/dev-ubuntu-24.04:7") == "registry.example.org:5000/hub/rocm/dev-ubuntu-24.04:7"
    assert found.image("quay.io/a/b:1") == "quay.io/a/b:1"


def test_a_key_lies_beside_the_file_that_names_it(tmp_path):
    found = mirrors.load_mirrors(write(tmp_path))
    assert found.key("https://repo.radeon.com/rocm/apt/7.2.4", rocm.KEY) == tmp_path / "keys" / "rocm.gpg"
    assert found.key("https://elsewhere.example.org", rocm.KEY) == rocm.KEY


def test_the_flag_goes_before_the_environment_and_that_before_the_users_file(tmp_path, monkeypatch):
    for name, place in (("flag", "a"), ("environment", "b"), ("config/stackcheck", "c")):
        (tmp_path / name).mkdir(parents=True)
        write(tmp_path / name, f"schema: 1\nregistries: {{docker.io: {place}.example.org}}\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv(mirrors.VARIABLE, raising=False)
    assert mirrors.load_mirrors().image("a/b:1") == "c.example.org/a/b:1"
    monkeypatch.setenv(mirrors.VARIABLE, str(tmp_path / "environment" / "mirrors.yaml"))
    assert mirrors.load_mirrors().image("a/b:1") == "b.example.org/a/b:1"
    assert mirrors.load_mirrors(tmp_path / "flag" / "mirrors.yaml").image("a/b:1") == "a.example.org/a/b:1"
    monkeypatch.setenv(mirrors.VARIABLE, str(tmp_path / "absent.yaml"))
    with pytest.raises(ConfigurationError, match=r"absent\.yaml cannot be read"):
        mirrors.load_mirrors()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "schema: 1\nurls: {'https://a.example.org': 'https://me:hunter2@b.example.org'}\n",
            "a login belongs to",
        ),
        (
            "schema: 1\napt: {ubuntu24.04: ['deb https://me:hunter2@b.example.org/u noble main']}\n",
            "a login belongs to",
        ),
        ("schema: 1\nurls: {'https://a.example.org': 'ftp://b.example.org'}\n", "urls"),
        ("schema: 1\nregistries: {docker.io: 'HTTPS://x'}\n", "registries"),
        ("schema: 1\nmirror: {}\n", "mirror"),
        ("schema: 2\n", "schema"),
    ],
)
def test_a_wrong_file_is_refused_and_no_password_is_shown(tmp_path, text, problem):
    with pytest.raises(ConfigurationError, match=problem) as caught:
        mirrors.load_mirrors(write(tmp_path, text))
    assert "hunter2" not in str(caught.value)


def test_a_silent_mirror_is_named_by_the_public_host(tmp_path):
    text = "schema: 1\nurls: {'https://repo.radeon.com': 'http://127.0.0.1:9/amd'}\n"
    text += "registries: {docker.io: '127.0.0.1:9'}\n"
    upstream = Upstream(mirrors=mirrors.load_mirrors(write(tmp_path, text)), timeout_s=(0.5, 0.5))
    with pytest.raises(OutOfReachError, match=r"^the mirror of repo\.radeon\.com is out of reach"):
        upstream.reach("https://repo.radeon.com/rocm/apt/7.2.4")
    with pytest.raises(OutOfReachError, match=r"^the mirror of docker\.io is out of reach"):
        upstream.base_digest("ubuntu:24.04")
    assert "127.0.0.1" not in str(upstream.answers("https://repo.radeon.com/rocm/manylinux/rocm-rel-7.2.4/"))


# What a site copies for a stack of which no index tells the files' names here.

ROOT = Path(__file__).resolve().parents[3]


def test_an_unlocked_stack_lists_what_it_asks_for_and_says_that_more_follows():
    (stack,) = resolve.load_stacks(ROOT, ("rocm7.2.1-torch2.13.0-*",))
    found = mirror_list.wanted(stack, ROOT / "images", Upstream(), lambda _: None)
    by_name = {one.name: one for one in found}
    assert by_name["torch==2.13.0+rocm7.2"].place == "https://download.pytorch.org/whl/rocm7.2"
    assert by_name["triton-rocm==3.7.1"].place == "https://download.pytorch.org/whl/rocm7.2"
    assert by_name["numpy==2.4.6"].place == mirror_list.PACKAGE_INDEX
    assert "not locked" in by_name["torch==2.13.0+rocm7.2"].note
    assert by_name["flash_attn-2.8.3.tar.gz"].sha256
    assert by_name["ubuntu:24.04"].kind == "image"
    assert by_name["amd-smi-lib"].place == "https://repo.radeon.com/rocm/apt/7.2.1 noble main"
    assert len(by_name) == len(found)


# Made with `gpg --quick-generate-key … ed25519 sign`; the fingerprint is what gpg lists.
FINGERPRINT = "63EF81905856ABEDBCD019C0E2CE1B949A6886FC"
BASE64 = """\
mDMEawL9RhYJKwYBBAHaRw8BAQdAvxDMcL/7IY6JvUgr/mV1X3A3LvWznW6go4RPfDSuuQ20H1N0
YW5kLWluIDxzdGFuZC1pbkBleGFtcGxlLm9yZz6IkAQTFggAOBYhBGPvgZBYVqvtvNAZwOLOG5Sa
aIb8BQJrAv1GAhsDBQsJCAcCBhUKCQgLAgQWAgMBAh4BAheAAAoJEOLOG5SaaIb8D7UBAPqf14Ys
YyYasFEcaSvBrxtpxp8DPCyhO2E3fYZEHcU8AQCu4losWE8jkACriqWVUJ6Umc19OQeGVNCIf2wd
l/+NDw==
"""
BINARY = base64.b64decode(BASE64)
ARMOURED = f"{openpgp.ARMOUR.decode()}\n\n{BASE64}=abcd\n-----END PGP PUBLIC KEY BLOCK-----\n".encode()


@pytest.mark.parametrize("content", [BINARY, ARMOURED], ids=["binary", "armoured"])
def test_a_keys_fingerprint_is_that_of_gpg(content):
    assert openpgp.fingerprints(content) == {FINGERPRINT}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"<html>not found</html>", "no OpenPGP keyring"),
        (BINARY[:40], "in the middle of a packet"),
        (BINARY[:2] + b"\x05" + BINARY[3:], "key of version 5, expected 4"),
        (b"\x99\x00", "in the middle of a packet"),
        (b"\xc6\xe1", "a packet of partial length"),
    ],
)
def test_what_is_no_key_is_named(content, says):
    with pytest.raises(ValueError, match=says):
        openpgp.fingerprints(content)


def test_another_key_than_amds_is_refused(tmp_path, monkeypatch):
    stack = next(stack for stack in resolve.load_stacks(ROOT) if rocm.takes_smi(stack))
    key = tmp_path / "rocm.gpg"
    key.write_bytes(BINARY)
    own = Mirrors(keys={"https://repo.radeon.com": key})
    assert rocm.source(stack, own).signed_by == str(key)  # a site's own choice
    monkeypatch.setattr(rocm, "KEY", key)
    for content, got in ((BINARY, FINGERPRINT), (b"<html>", "it is no OpenPGP keyring"), (b"", "no key")):
        key.write_bytes(content)
        with pytest.raises(
            ConfigurationError, match="must hold the key of AMD's package archive and no other"
        ) as no:
            rocm.source(stack, NO_MIRRORS)
        assert no.value.got == got
        assert no.value.expected == rocm.FINGERPRINT
    monkeypatch.setattr(rocm, "FINGERPRINT", FINGERPRINT)
    key.write_bytes(BINARY)
    assert rocm.source(stack, NO_MIRRORS).signed_by == str(key)
    key.write_bytes(BINARY + BINARY.replace(b"\xbf\x10", b"\xbf\x11"))  # apt would take the other's signature
    with pytest.raises(ConfigurationError, match="and no other"):
        rocm.source(stack, NO_MIRRORS)
