"""A certificate says what was measured, in formats others read; the committed ones of real GPUs are valid."""

import base64
import datetime as dt
import json
import pathlib
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import load_pem_public_key

import result_files
from small_images import NOW, STACK_ID, certify, new_key
from stackcheck.certificate import keys, predicates, signing
from stackcheck.certificate.statement import (
    PROVENANCE,
    TEST_RESULT,
    VSA,
    Envelope,
    Statement,
    evidence,
    facts,
    newest,
    open_envelope,
    recency,
    sign,
    status,
    time_verified,
)
from stackcheck.cli import consumer
from stackcheck.errors import CertificateError, ConfigurationError, MachineUnfitError
from stackcheck.oci.layout import OciLayout
from stackcheck.policy import Waiver
from stackcheck.suite import expected, results, verdict
from stackcheck.suite.requirements import Requirements


@pytest.fixture
def key() -> ec.EllipticCurvePrivateKey:
    return new_key()


def predicates_of(envelopes: tuple[Envelope, ...]) -> dict[str, dict[str, Any]]:
    return {item.statement.predicate_type: item.statement.predicate for item in envelopes}


def test_the_summary_names_device_driver_inputs_checks_and_figures(image, key):
    host = result_files.host("amd", "MI300X", "MI300X", driver="6.12.12")
    for device in host["devices"]:
        device["arch"] = "gfx942"
    summary = predicates_of(certify(image, key, host=host))[VSA]
    assert summary["verificationResult"] == "PASSED"
    assert {"STACKCHECK_CERTIFIED", "STACKCHECK_GFX942", "STACKCHECK_MI300X"} < set(summary["verifiedLevels"])
    assert summary["timeVerified"] == "2026-03-04T05:06:07.000Z"
    said = summary["urn:stackcheck:certificate:v1"]
    assert (said["stackId"], said["configDigest"]) == (STACK_ID, image.config_digest)
    assert (said["host"]["driver"], said["host"]["kernel"], said["host"]["deviceCount"]) == (
        "6.12.12",
        "6.1",
        2,
    )
    assert set(said["inputs"]) == {"suites", "trainers", "thresholds", "matrix", "runner"}
    assert said["required"] == ["test_a.py::test_one[1]", "test_a.py::test_one[2]"]
    assert said["passed"] == ["test_a.py::test_one[1]", "test_a.py::test_one[2]"]
    assert [(item["name"], item["value"], item["unit"]) for item in said["metrics"]] == [
        ("busbw", 10.0, "GB/s")
    ]
    assert said["experimental"] is False


def test_the_test_result_names_the_python_that_ran_the_suites(image, key):
    said = predicates_of(certify(image, key))[TEST_RESULT]
    assert said["urn:stackcheck:run:v1"]["interpreter"] == result_files.INTERPRETER | {"libraries": {}}


def test_a_waived_check_is_a_warned_test_and_its_waiver_is_signed(image, key):
    given = result_files.waiver("test_a.py::test_one[2]")
    waiver = Waiver.model_validate(given)
    said = predicates_of(certify(image, key, outcome="failed", waivers=(waiver,)))
    assert said[TEST_RESULT]["result"] == "WARNED"
    assert said[TEST_RESULT]["warnedTests"] == ["test_a.py::test_one[2]"]
    assert said[TEST_RESULT]["failedTests"] == []
    assert said[VSA]["urn:stackcheck:certificate:v1"]["waivers"] == [given]


def test_a_failed_run_is_stated_as_failed(image, key):
    said = predicates_of(certify(image, key, outcome="failed"))
    assert (said[VSA]["verificationResult"], said[VSA]["verifiedLevels"]) == ("FAILED", ["FAILED"])
    assert said[TEST_RESULT]["failedTests"] == ["test_a.py::test_one[2]"]


def test_nothing_is_stated_about_an_image_that_ran_on_an_unfit_machine(image, key):
    with pytest.raises(MachineUnfitError):
        certify(image, key, outcome="invalid")


@pytest.mark.parametrize("part", ["payload", "payloadType", "signatures"])
def test_an_envelope_with_one_changed_part_does_not_open(image, key, part):
    document = json.loads(certify(image, key)[-1].body)
    payload = bytearray(base64.b64decode(document["payload"]))
    payload[payload.index(b"PASSED")] ^= 1
    signature = bytearray(base64.b64decode(document["signatures"][0]["sig"]))
    signature[-1] ^= 1
    changed = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": "application/json",
        "signatures": [{"keyid": "", "sig": base64.b64encode(signature).decode()}],
    }
    with pytest.raises(CertificateError):
        open_envelope(json.dumps(document | {part: changed[part]}).encode(), key.public_key())


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"payload": 1}', b"\xff", b"[" * 100_000])
def test_what_is_no_envelope_is_refused(key, body):
    with pytest.raises(CertificateError):
        open_envelope(body, key.public_key())


@pytest.mark.parametrize(
    "payload",
    [
        b"{}",
        b"[]",
        b'{"_type":"https://in-toto.io/Statement/v1","predicateType":"x","predicate":{},"subject":[{}]}',
    ],
)
def test_a_signed_payload_that_is_no_statement_is_refused(key, payload):
    body = sign(Statement(predicate_type="x", payload=payload), key).body
    with pytest.raises(CertificateError, match="malformed"):
        open_envelope(body, key.public_key())


def test_a_revocation_is_later_than_what_it_revokes_even_when_the_clock_is_behind(image, key):
    passed = certify(image, key)[-1].statement
    failed = predicates.revocation(passed, [passed], reason="NaN", now=NOW - dt.timedelta(days=1))
    assert time_verified(failed) > time_verified(passed)
    assert (status(failed), facts(failed)["reasons"]) == ("FAILED", ["NaN"])
    assert newest([failed, passed]) == failed
    assert evidence(failed) == {passed.digest}


def test_a_stored_statement_of_a_different_key_is_refused_with_its_file_and_the_next_command(
    image, key, tmp_path
):
    path = tmp_path / "some-stack" / "statements" / "0.dsse.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(certify(image, key)[0].body)
    other = tmp_path / "other.key"
    keys.load_or_create(other)
    with pytest.raises(CertificateError, match="not signed with the expected key") as refused:
        signing.load_signed(tmp_path / "some-stack", keys.load_private_key(other).public_key())
    assert refused.value.where == str(path)
    assert "stackcheck certify some-stack" in str(refused.value.next_step)


def test_at_the_same_moment_failed_counts(image, key):
    passed, failed = (certify(image, key, outcome=outcome)[-1].statement for outcome in ("passed", "failed"))
    assert newest([failed, passed]) == newest([passed, failed]) == failed
    assert sorted([passed, failed], key=recency) == sorted([failed, passed], key=recency) == [passed, failed]


def test_a_key_is_made_once_private_and_outside_the_checkout(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    first = keys.load_or_create()
    path = tmp_path / "stackcheck" / "stackcheck.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert keys.public_pem(keys.load_public()) == keys.public_pem(first.public_key())
    assert keys.load_or_create().private_numbers() == first.private_numbers()


def test_without_a_public_key_nothing_is_verified(tmp_path):
    with pytest.raises(CertificateError, match="no public key"):
        keys.load_public(tmp_path / "absent.pub")


def test_a_key_that_others_can_read_is_refused(tmp_path):
    path = tmp_path / "k.key"
    keys.load_or_create(path)
    path.chmod(0o644)
    with pytest.raises(ConfigurationError, match="read by others"):
        keys.load_or_create(path)


def pem(key: Any, password: bytes | None = None) -> bytes:
    from cryptography.hazmat.primitives import serialization as form

    encryption = form.BestAvailableEncryption(password) if password else form.NoEncryption()
    return bytes(key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, encryption))


@pytest.mark.parametrize(
    "content",
    [b"", b"no key", pem(ed25519.Ed25519PrivateKey.generate()), pem(ec.generate_private_key(ec.SECP384R1()))],
    ids=["empty", "text", "ed25519", "p384"],
)
def test_another_kind_of_key_is_refused(tmp_path, content):
    path = tmp_path / "k.key"
    path.touch(mode=0o600)
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match="no key that can be used"):
        keys.load_private_key(path)


def test_keys_side_by_side_keep_their_public_halves(tmp_path):
    names = {"alice.key": "alice.pub", "release.v1": "release.v1.pub", "release.v2": "release.v2.pub"}
    for name, public in names.items():
        pem = keys.public_pem(keys.load_or_create(tmp_path / name).public_key())
        assert (tmp_path / public).read_bytes() == pem


def test_a_public_key_that_finds_no_room_leaves_no_half_of_a_key(tmp_path, monkeypatch):
    opened = pathlib.Path.open

    def on_a_full_disk(path: Path, mode: str) -> Any:
        opened(path, mode).close()
        return opened(pathlib.Path("/dev/full"), "wb")

    monkeypatch.setattr(pathlib.Path, "open", on_a_full_disk)
    with pytest.raises(ConfigurationError, match="No space left"):
        keys.load_or_create(tmp_path / "bob.key")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    keys.load_or_create(tmp_path / "bob.key")
    assert keys.load_public(tmp_path / "bob.pub")


@pytest.mark.parametrize("name", ["bob.key", "bob"])
def test_a_new_key_never_overwrites_a_public_key(tmp_path, name):
    (tmp_path / "bob.pub").write_text("another's")
    with pytest.raises(ConfigurationError, match="in the way"):
        keys.load_or_create(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["bob.pub"]
    assert (tmp_path / "bob.pub").read_text() == "another's"


def test_a_signing_key_is_not_named_as_a_public_one(tmp_path):
    with pytest.raises(ConfigurationError, match="ends like that of a public key"):
        keys.load_or_create(tmp_path / "bob.pub")
    assert list(tmp_path.iterdir()) == []


def test_what_a_site_built_from_is_in_the_provenance_in_the_summary_and_in_verify(image, key):
    made = {"baseFrom": "the packages of a host", "wheelsFrom": "2 wheels made from an environment"}
    said = predicates_of(certify(image, key, parameters={"torch": "2.11.0", **made}))
    assert said[PROVENANCE]["buildDefinition"]["externalParameters"] == {"torch": "2.11.0", **made}
    told = said[VSA]["urn:stackcheck:certificate:v1"]
    assert told["madeFrom"] == made
    notes = consumer._notes(SimpleNamespace(facts=told))  # type: ignore[arg-type]
    assert notes[:2] == ["base from the packages of a host", "wheels from 2 wheels made from an environment"]
    assert "madeFrom" not in predicates_of(certify(image, key))[VSA]["urn:stackcheck:certificate:v1"]


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
def test_its_statements_are_signed_and_are_of_the_result_beside_them(held):
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


def test_the_gate_of_today_refuses_its_result_and_names_what_it_does_not_show():
    """It is of before the gate asked for attention as models call it, and for skips with a kind."""
    result = results.load_result(HELD / "result.json")
    assert result.image is not None
    ids = expected.check_ids(ROOT, vendor="nvidia", tier="standard", count=2)
    needed = Requirements(checks=ids, image_config_digest=result.image.config_digest)
    found = verdict.judge(result, needed)
    assert (found.status, len(found.passed), len(found.skipped)) == ("FAILED", 158, 14)
    assert "test_attention.py::test_attention_of_models[default-bf16]: no result" in found.reasons
