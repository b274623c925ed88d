"""The certificates from real GPUs in docs/results are valid: signed, of one run, and judged PASSED."""

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from stackcheck.certificate.statement import TEST_RESULT, VSA, open_envelope
from stackcheck.oci.layout import OciLayout
from stackcheck.suite import expected, results, verdict
from stackcheck.suite.requirements import Requirements

ROOT = Path(__file__).resolve().parents[3]
HELD = ROOT / "docs" / "results" / "certificate-h200-x2"
FILES = sorted((HELD / "statements").glob("*.dsse.json"))
OURS = ROOT / "docs" / "results" / "stack-h200-x2-fa4"


def public_key(held: Path) -> ec.EllipticCurvePublicKey:
    key = load_pem_public_key((held / "stackcheck.pub").read_bytes())
    assert isinstance(key, ec.EllipticCurvePublicKey)
    return key


def published(held: Path) -> list[bytes]:
    """The four envelopes of a published image, in the form of cosign 2: the layers of `.att`."""
    layout = OciLayout(held / "published")
    (tag,) = (name for name in layout.tags() if name.endswith(".att"))
    return [
        b"".join(layout.read_blob(layer.digest)) for layer in layout.read_manifest(tag).descriptors("layers")
    ]


@pytest.mark.parametrize("held", [HELD, OURS], ids=["host", "ours"])
def test_its_statements_are_signed_and_are_of_the_result_beside_them(held: Path) -> None:
    envelopes = published(held) if held is OURS else [path.read_bytes() for path in FILES]
    by_type = {
        one.statement.predicate_type: one
        for one in (open_envelope(body, public_key(held)) for body in envelopes)
    }
    tested, summary = by_type[TEST_RESULT], by_type[VSA]
    result = results.load_result(held / "result.json")
    judged = json.loads((held / "verdict.json").read_text())
    assert result.image is not None
    subject = tested.statement.document["subject"][0]["digest"]["sha256"]
    assert f"sha256:{subject}" == result.image.manifest_digest
    assert tested.statement.predicate["urn:stackcheck:run:v1"]["id"] == result.run_id
    assert sorted(tested.statement.predicate["passedTests"]) == sorted(judged["passed"])
    assert summary.statement.predicate["verificationResult"] == "PASSED"


def test_the_gate_of_today_refuses_its_result_and_names_what_it_does_not_show() -> None:
    """It is of before the gate asked for attention as models call it, and for skips with a kind."""
    result = results.load_result(HELD / "result.json")
    assert result.image is not None
    ids = expected.check_ids(ROOT, vendor="nvidia", tier="standard", count=2)
    needed = Requirements(checks=ids, image_config_digest=result.image.config_digest)
    found = verdict.judge(result, needed)
    assert (found.status, len(found.passed), len(found.skipped)) == ("FAILED", 158, 14)
    assert "test_attention.py::test_attention_of_models[default-bf16]: no result" in found.reasons
