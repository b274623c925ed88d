"""--sign-with, with openssl and with a PKCS#11 token: the documented commands sign what `verify` accepts."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

import small_stacks
from small_images import NOW, certify, make_image
from stackcheck.certificate import keys, signers
from stackcheck.certificate.statement import open_envelope
from stackcheck.errors import ConfigurationError

PIN = "471108"


def documented(start: str) -> str:
    """A block of docs/guides/certificates.md, from a line that starts so."""
    page = (small_stacks.ROOT / "docs" / "guides" / "certificates.md").read_text(encoding="utf-8")
    return page[page.index(start) :].partition("```")[0]


def signs(folder: Path, public: Path, command: tuple[str, ...]) -> None:
    signer = signers.choose(public, command)
    image = make_image(folder / "oci", b"signed")
    for envelope in certify(image, signer, now=NOW):
        assert open_envelope(envelope.body, keys.load_public(public)).statement == envelope.statement


def test_openssl_signs(tmp_path, program_of):
    program_of("openssl", "openssl")
    keys.load_or_create(tmp_path / "my.key")
    line = re.search(r'--sign-with "(openssl [^"]*)"', documented("stackcheck certify STACK --key token.pub"))
    assert line
    command = tuple(shlex.split(line[1].replace("my.pem", str(tmp_path / "my.key"))))
    signs(tmp_path, tmp_path / "my.pub", command)
    keys.load_or_create(tmp_path / "other.key")
    with pytest.raises(ConfigurationError, match="no valid signature"):
        signs(tmp_path, tmp_path / "other.pub", command)


def test_a_token_signs_by_the_documented_script(tmp_path, program_of, monkeypatch):
    program_of("softhsm2-util", "softhsm2")
    program_of("pkcs11-tool", "opensc")
    program_of("openssl", "openssl")
    (tmp_path / "tokens").mkdir()
    (tmp_path / "softhsm2.conf").write_text(f"directories.tokendir = {tmp_path / 'tokens'}\n")
    monkeypatch.setenv("SOFTHSM2_CONF", str(tmp_path / "softhsm2.conf"))
    monkeypatch.setenv("PIN", PIN)
    script = tmp_path / "sign.sh"
    script.write_text(documented("#!/bin/sh\ndigest="))
    script.chmod(0o755)
    module = re.search(r"--module (\S+)", script.read_text())
    assert module
    run("softhsm2-util", "--init-token", "--free", "--label", "stackcheck", "--pin", PIN, "--so-pin", "1234")
    token = ("pkcs11-tool", "--module", module[1], "--token-label", "stackcheck")
    made = ("--keypairgen", "--key-type", "EC:prime256v1", "--label", "signing", "--pin", "env:PIN")
    run(*token, "--login", *made)
    der = tmp_path / "token.der"
    run(*token, "--read-object", "--type", "pubkey", "--label", "signing", "--output-file", str(der))
    run("openssl", "ec", "-pubin", "-inform", "DER", "-in", str(der), "-out", str(tmp_path / "token.pub"))
    signs(tmp_path, tmp_path / "token.pub", (str(script),))
    monkeypatch.setenv("PIN", "000000")
    with pytest.raises(ConfigurationError, match="no valid signature") as caught:
        signs(tmp_path, tmp_path / "token.pub", (str(script),))
    assert "000000" not in str(caught.value)


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
