"""The certificate of our own stack, from the files in docs/results: `stackcheck verify` and cosign accept it.

The layers, 6 GB, are not committed. A registry serves the rest, and neither program reads layers to verify.
"""

import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import layerless
import registry_process
from small_images import new_key
from stackcheck.certificate import cluster_policies, keys
from stackcheck.certificate.statement import PROVENANCE, SBOM, TEST_RESULT, VSA
from stackcheck.oci.layout import OciLayout
from waits import run_program

ROOT = Path(__file__).resolve().parents[2]
HELD = ROOT / "docs" / "results" / "stack-h200-x2-fa4"
STACK = "cuda13.0-torch2.11.0-fa4.0.0b36-py3.12-ubuntu24.04"
KEY = HELD / "stackcheck.pub"
HOST = ("--device-model", "H200", "--devices", "2", "--driver", "580.159.04", "--max-age", "36500d")
LIMIT_S = 300.0  # only for what hangs


@pytest.fixture(scope="module")
def target(registry_program: Path, tmp_path_factory) -> Iterator[str]:
    """The repository, in a registry that has what is committed."""
    folder = tmp_path_factory.mktemp("committed")
    layerless.serve_from(folder / "data", HELD / "published", "stacks")
    with registry_process.running(registry_program, folder) as port:
        yield f"127.0.0.1:{port}/stacks"


def verify(target: str, *words: str, key: Path = KEY) -> subprocess.CompletedProcess[str]:
    line = [ROOT / ".venv" / "bin" / "stackcheck", "verify", f"{target}:{STACK}", "--key", key, *words]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=LIMIT_S)


def cosign(
    program: Path, target: str, kind: str, *words: object, key: Path = KEY
) -> subprocess.CompletedProcess[str]:
    """The command of docs/guides/certificates.md."""
    digest = OciLayout(HELD / "published").read_manifest(STACK).digest
    line = [program, "verify-attestation", "--insecure-ignore-tlog=true", "--key", key, "--type", kind]
    return run_program([*line, *words, f"{target}@{digest}"], timeout=LIMIT_S)


def test_stackcheck_verifies_it_for_two_h200s_and_names_the_waivers(target):
    told = verify(target, *HOST)
    assert told.returncode == 0, told.stderr
    for words in ("H200", "test_attention.py::test_attention_of_models", "base from the packages of a host"):
        assert words in told.stdout + told.stderr


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--no-waivers",), "waiver"),
        (("--tier", "soak"), "tier"),
        (("--devices", "8"), "devices"),
        (("--device-model", "MI300X"), "MI300X"),
        (("--driver", "590.1"), "driver"),
    ],
)
def test_it_is_refused_for_what_it_does_not_say(target, words, reason):
    told = verify(target, *HOST, *words)
    assert (told.returncode, reason in told.stderr) == (7, True), told.stderr


def test_both_cosigns_verify_every_statement_and_the_verdict(target, cosigns, tmp_path):
    policy = tmp_path / "stackcheck.cue"
    policy.write_text(cluster_policies.policy_text())
    for program in cosigns.values():
        for kind, words in ((VSA, ("--policy", policy)), (TEST_RESULT, ()), (PROVENANCE, ()), (SBOM, ())):
            told = cosign(program, target, kind, *words)
            assert told.returncode == 0, told.stderr


def test_neither_accepts_another_key(target, cosigns, tmp_path):
    other = tmp_path / f"{uuid.uuid4().hex}.pub"
    other.write_bytes(keys.public_pem(new_key().public_key()))
    assert verify(target, *HOST, key=other).returncode == 7
    for program in cosigns.values():
        assert cosign(program, target, VSA, key=other).returncode != 0
