"""A signature says who wrote a statement, not that it is well formed: a wrong field is exit 7."""

import copy
import datetime as dt
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import result_files
from memory_registry import MemoryRegistry
from small_dist import KEY, verified
from small_images import NOW, SmallImage, certify
from stackcheck.certificate import attachments, find, for_host, policy, reader, renew, verify
from stackcheck.certificate import statement as statement_module
from stackcheck.certificate.statement import VSA, Envelope, Statement, facts, open_envelope, sign
from stackcheck.cli import consumer
from stackcheck.errors import CertificateError, StackcheckError
from stackcheck.nightly import decide, planning
from stackcheck.oci.documents import compact_json
from stackcheck.oci.layout import OciLayout
from stackcheck.oci.store import parse_reference
from stackcheck.report import published

pytestmark = pytest.mark.usefixtures("no_disk_flushes")
DAY = dt.timedelta(days=1)
FIELD = "urn:stackcheck:certificate:v1"
WRONG: tuple[Any, ...] = (None, 7, "text", [], {}, [None], {"a": None}, True)
# What verification, or what is shown after it, reads.
READ = (
    *(("verifier",), ("timeVerified",), ("inputAttestations",), ("verificationResult",), ("verifiedLevels",)),
    *(("inputAttestations", 0), ("inputAttestations", 0, "digest"), ("policy",), ("resourceUri",)),
    *((FIELD,), (FIELD, "host"), (FIELD, "host", "devices"), (FIELD, "host", "vendor"), (FIELD, "run")),
    *((FIELD, "run", "tier"), (FIELD, "run", "started"), (FIELD, "configDigest"), (FIELD, "experimental")),
    *((FIELD, "passed"), (FIELD, "warned"), (FIELD, "waivers"), (FIELD, "required"), (FIELD, "bounds")),
    *((FIELD, "archs"), (FIELD, "archs", "staticOnly"), (FIELD, "knownIssues"), (FIELD, "reasons")),
)


def changes() -> Iterator[tuple[tuple[object, ...], object]]:
    for path in READ:
        for value in WRONG:
            yield path, value


def summary_with(image: SmallImage, path: tuple[Any, ...], value: object) -> Envelope:
    (good,) = (item for item in certify(image, KEY) if item.statement.predicate_type == VSA)
    document = copy.deepcopy(good.statement.document)
    place = document["predicate"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return sign(Statement(predicate_type=VSA, payload=compact_json(document)), KEY)


def test_no_wrong_type_in_a_signed_summary_is_a_traceback(image):
    """Most are refused as malformed. An empty list or an unknown field may be right, and is read as one."""
    refused = [1 for path, value in changes() if is_refused(image, path, value)]
    assert len(refused) > 150


def is_refused(image: SmallImage, path: tuple[object, ...], value: object) -> bool:
    try:
        open_envelope(summary_with(image, path, value).body, KEY.public_key())
    except CertificateError as error:
        return "malformed" in error.what
    harmless = ([], {}, "text", True, *([{"a": None}] if path == (FIELD, "archs") else []))
    assert value in harmless, (path, value)
    return False


def full_summary(image: SmallImage) -> Statement:
    """A certificate with every part that a reader shows: of a pair, of a Python of no package, of waivers."""
    issue = {"id": "X", "symptom": "slow", "issue": "https://x/2"}
    host = result_files.host("nvidia", "H200", driver="580.1")
    *_, signed = certify(image, KEY, host=host, known_issues=(issue,), archs=("sm_90",))
    document = copy.deepcopy(signed.statement.document)
    found = document["predicate"][FIELD]
    name = found["warned"] = found["passed"][:1]
    until = (NOW + 9 * DAY).date().isoformat()
    found["waivers"] = [{"check": name[0], "reason": "known", "issue": "x", "by": "a", "until": until}]
    digest = f"sha256:{'1' * 64}"
    found["python"] = {"file": "/x", "sha256": digest, "package": None, "libraries": {"/y": digest}}
    found["madeFrom"] = {"baseFrom": "a host"}
    found["driver"] = {"state": "unlisted", "says": "no document lists it"}
    found["against"] = {
        "reference": "r",
        "digest": digest,
        "at": "2026-01-01T00:00:00Z",
        "driver": None,
        "runs": 3,
        "metrics": [{"check": "c", "name": "n", "loss": 0.1, "verdict": "noisy"}],
    }
    return Statement(predicate_type=VSA, payload=compact_json(document))


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every member of a document, at any depth."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*at, key)
        yield from places(inner, (*at, key))


def read_everywhere(image: SmallImage, statement: Statement) -> None:
    """What verify, find, run, renew, a night and the page do with a summary that was read."""
    moment = NOW + dt.timedelta(hours=1)
    verdicts = policy.valid_verdicts("r", [statement], moment, policy.MAX_AGE)
    store = OciLayout(image.layout)
    certified = verify.CertifiedImage(
        reference=f"oci:{image.layout}@{image.manifest_digest}",
        moment=moment,
        manifest=store.only_manifest(),
        statements=(statement,),
        verdicts=tuple(verdicts),
    )
    find._judged("t", certified, find.ImageQuery())
    host = facts(statement)["host"]
    verified_ = verify._verified(
        parse_reference(certified.reference), statement, for_host.Wanted(device_model="H200", driver="580.1")
    )
    consumer._facts(verified_, KEY.public_key(), policy.MAX_AGE)
    consumer._notes(verified_)
    renew.obsolete([statement], full_summary(image))
    decide.standing([host], result_files.host("nvidia", "H200", driver="580.1"))
    planning._is_for(host, SimpleNamespace(vendor="nvidia", devices=()))  # type: ignore[arg-type]
    list(published._of(statement, policy.MAX_AGE))
    certified.for_host(for_host.Wanted(device_model="H200", driver="580.1"))


def test_no_missing_or_wrong_member_of_a_signed_summary_is_a_traceback_in_any_reader(image):
    """Every member of a summary that has all parts is taken away, and replaced by each wrong value."""
    whole = full_summary(image)
    count = 0
    for place in places(whole.document["predicate"]):
        for value in (..., *WRONG):
            document = copy.deepcopy(whole.document)
            inside = document["predicate"]
            for key in place[:-1]:
                inside = inside[key]
            if value is ...:
                del inside[place[-1]]
            else:
                inside[place[-1]] = value
            count += 1
            statement = Statement(predicate_type=VSA, payload=compact_json(document))
            try:
                statement_module.parse(statement.payload)
                read_everywhere(image, statement)
            except StackcheckError:
                continue
            except Exception as error:
                raise AssertionError(f"{place} = {value!r}: {error!r}") from error
    assert count > 700


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((FIELD, "host", "devices"), None),
        (("timeVerified",), "2026-03-04"),
        (("verificationResult",), "passed"),
    ],
)
def test_a_malformed_summary_of_the_pinned_key_is_refused_and_not_passed_over(dist, image, path, value):
    """It may be the revocation."""
    store, bad = OciLayout(dist), summary_with(image, path, value)
    layer = attachments.legacy_layer(store, bad)
    tag = attachments.legacy_tag(image.manifest_digest)
    kept = store.read_manifest(tag).descriptors("layers")
    store.write_manifest(attachments.legacy_manifest(store, (*kept, layer)), tag)
    with pytest.raises(CertificateError, match="malformed") as caught:
        verified(dist)
    assert caught.value.exit_code == 7


def test_duplicate_keys_in_a_signed_statement_are_refused(image):
    (good,) = (item for item in certify(image, KEY) if item.statement.predicate_type == VSA)
    twice = good.statement.payload[:-1] + b',"predicateType":"' + VSA.encode() + b'"}'
    assert json.loads(twice)
    with pytest.raises(CertificateError, match="malformed"):
        open_envelope(sign(Statement(predicate_type=VSA, payload=twice), KEY).body, KEY.public_key())


def test_a_passed_summary_without_the_level_of_a_certificate_is_refused(image):
    for levels in (["SLSA_BUILD_LEVEL_3"], ["STACKCHECK_CERTIFIED", "STACKCHECK_TIER_SOAK"]):
        with pytest.raises(CertificateError, match="malformed") as caught:
            open_envelope(summary_with(image, ("verifiedLevels",), levels).body, KEY.public_key())
        assert "verifiedLevels" in str(caught.value)


def test_the_packages_of_a_revoked_image_are_shown_with_a_word_of_warning(dist, image):
    from small_images import quiet
    from stackcheck.certificate.revoke import revoke

    told: list[str] = []
    reference = f"oci:{dist}@{image.manifest_digest}"
    verify.attached_sbom(reference, public_key=KEY.public_key(), warn=told.append)
    assert told == []
    revoke(reference, reason="NaN", key=KEY, now=NOW + DAY, report=quiet)
    assert verify.attached_sbom(reference, public_key=KEY.public_key(), warn=told.append)
    assert len(told) == 1
    assert "NaN" in told[0]


def test_a_changed_certificate_is_called_changed_and_not_one_of_another_key(dist, image):
    store: Any = MemoryRegistry()
    source = OciLayout(dist)
    subject = source.read_manifest(image.manifest_digest)
    attachments.attach(store, subject, certify(image, KEY), KEY.public_key())
    store.manifests[subject.digest] = subject
    del store.names[attachments.legacy_tag(subject.digest)]
    for item in attachments.bundles_of(store, subject.digest):
        (layer,) = item.descriptors("layers")
        body = store.blobs[layer.digest].replace(b'"sig":"M', b'"sig":"N')
        store.blobs[layer.digest] = body
    from stackcheck.certificate import verify

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "read_small_blob", lambda store, layer: store.blobs[layer.digest])
        with pytest.raises(CertificateError, match="changed after they were signed"):
            verify._statements(store, subject.digest, KEY.public_key())
