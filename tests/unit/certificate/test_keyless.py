"""Bundles of identities: what a made sigstore signed is accepted, and whatever is changed is refused."""

import base64
import copy
import datetime as dt
import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sigstore", reason="the extra `keyless` is not installed")

from collections.abc import Iterator

import small_sigstore
from small_checkout import call
from small_sigstore import IDENTITY, ISSUER, Sigstore, b64
from stackcheck.certificate import keyless, keys, statement
from stackcheck.certificate.keyless import Identities, TrustedIdentity
from stackcheck.errors import CertificateError, ConfigurationError
from stackcheck.proof import contribution

ROOT = Path(__file__).parents[3]
COMMITTED = ROOT / "docs" / "results" / "contributed"
(SOURCE,) = COMMITTED.glob(f"h100*{contribution.END}")
PAYLOAD = base64.b64decode(json.loads(SOURCE.read_bytes())["payload"])


@pytest.fixture(scope="module")
def sigstore() -> Sigstore:
    return Sigstore()


@pytest.fixture(autouse=True)
def _no_network(monkeypatch) -> None:
    """Whoever connects to another host fails."""
    real = socket.socket.connect

    def connect(self: socket.socket, address: Any) -> None:
        assert address[0] == "127.0.0.1", f"a connection to {address}"
        real(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect)


@pytest.fixture
def trusted(sigstore: Sigstore, tmp_path) -> Identities:
    (tmp_path / "trusted_root.json").write_text(json.dumps(sigstore.trusted_root()))
    named = (
        f"trusted_root: trusted_root.json\nidentities:\n  - {{identity: {IDENTITY}, issuer: '{ISSUER}'}}\n"
    )
    (tmp_path / contribution.IDENTITIES).write_text(named)
    return keyless.load_identities(tmp_path / contribution.IDENTITIES)


def opened(bundle: dict[str, Any], trusted: Identities) -> statement.Envelope:
    return keyless.open_bundle(json.dumps(bundle).encode(), trusted)


def refused(bundle: dict[str, Any], trusted: Identities) -> bool:
    try:
        opened(bundle, trusted)
    except CertificateError:
        return True
    return False


def test_a_bundle_of_the_identity_is_accepted_years_after_its_certificate(sigstore, trusted):
    for since in (None, dt.datetime.now(dt.UTC) - dt.timedelta(minutes=2)):
        found = opened(sigstore.bundle(PAYLOAD, since=since), trusted)
        assert found.statement.predicate_type == contribution.TYPE
        assert found.statement.payload == PAYLOAD
        assert found.signer == f"{IDENTITY} ({ISSUER})"


def trusting(sigstore: Sigstore, trusted: Identities, **changes: Any) -> Identities:
    trusted.root.write_text(json.dumps(sigstore.trusted_root() | changes))
    return trusted


def test_a_signed_timestamp_stands_for_the_time_of_the_log(trusted, tmp_path):
    clock, minute = Sigstore().with_clock(), dt.timedelta(minutes=1)
    trusting(clock, trusted)
    now = dt.datetime.now(dt.UTC)
    stamped = clock.stamped(clock.bundle(PAYLOAD, since=now - minute), tmp_path)
    assert opened(stamped, trusted).statement.payload == PAYLOAD
    for since in (now - 20 * minute, now + 5 * minute):
        late = clock.stamped(clock.bundle(PAYLOAD, since=since), tmp_path)
        assert refused(late, trusted), "at the time of the timestamp the certificate was not valid"
    another = clock.stamped(clock.bundle(PAYLOAD, since=now - minute), tmp_path)
    name = "timestampVerificationData"
    stamped["verificationMaterial"][name] = another["verificationMaterial"][name]
    assert refused(stamped, trusted), "a timestamp of another signature"
    strange = Sigstore().with_clock()
    strange.authority, strange.root, strange.certificates, strange.log = (
        *(clock.authority, clock.root),
        *(clock.certificates, clock.log),
    )
    own = strange.stamped(clock.bundle(PAYLOAD, since=now - minute), tmp_path)
    assert refused(own, trusting(clock, trusted, timestampAuthorities=[])), "nobody may sign timestamps"
    assert refused(own, trusting(clock, trusted)), "another signer of timestamps"


@pytest.mark.parametrize("part", ["tlogs", "certificateAuthorities"])
def test_a_log_or_authority_counts_for_its_time_alone(part, sigstore, trusted):
    at = dt.datetime.now(dt.UTC) - small_sigstore.YEAR / 2
    bundle, day = sigstore.bundle(PAYLOAD, since=at), dt.timedelta(days=1)
    for begin, end, good in (
        (-day, None, True),
        (-day, day, True),
        (-2 * day, -day, False),
        (day, None, False),
    ):
        period = {"start": (at + begin).isoformat()} | ({"end": (at + end).isoformat()} if end else {})
        ((one,),) = (sigstore.trusted_root()[part],)
        limited = (
            one | {"validFor": period}
            if "validFor" in one
            else one | {"publicKey": one["publicKey"] | {"validFor": period}}
        )
        trusting(sigstore, trusted, **{part: [limited]})
        assert refused(bundle, trusted) != good, (begin, end)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each member of a document, inner ones too."""
    members = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for name, one in members:
        yield (*path, name)
        yield from leaves(one, (*path, name))


def at(document: Any, path: tuple[Any, ...]) -> Any:
    for name in path:
        document = document[name]
    return document


def other(value: Any, where: int) -> Any:
    """A value of the same kind: the next number, base64 with one bit changed, text with one letter more."""
    if value.isdecimal():
        return str(int(value) + 1)
    try:
        data = bytearray(base64.b64decode(value, validate=True))
    except ValueError:
        return value[:where] + "x" + value[where:]
    data[where % len(data)] ^= 1
    return b64(bytes(data))


def test_no_member_can_be_taken_away_or_changed(sigstore, trusted):
    bundle = sigstore.bundle(PAYLOAD)
    tried = 0
    for path in leaves(bundle):
        without = copy.deepcopy(bundle)
        del at(without, path[:-1])[path[-1]]
        changed = [without]
        value = at(bundle, path)
        for where in (0, 7, 40, 63) if isinstance(value, str) else ():
            changed.append(copy.deepcopy(bundle))
            at(changed[-1], path[:-1])[path[-1]] = other(value, where)
        for one in changed:
            tried += 1
            assert refused(one, trusted), f"accepted with another or no {'.'.join(map(str, path))}"
    assert tried > 80


HOSTILE: dict[str, dict[str, Any]] = {
    "another identity": {"identity": "somebody@example.org"},
    "the identity as a part": {"identity": f"x{IDENTITY}"},
    "another issuer": {"issuer": "https://accounts.example.com"},
    "logged after the certificate ended": {"later": dt.timedelta(minutes=11)},
    "logged before it began": {"later": -dt.timedelta(minutes=1)},
    "a certificate in no log": {"logged": False},
    "a payload of another type": {"kind": "text/plain"},
}


@pytest.mark.parametrize("given", HOSTILE.values(), ids=HOSTILE)
def test_what_is_signed_by_somebody_else_or_at_another_time_is_refused(given, sigstore, trusted):
    with pytest.raises(CertificateError, match="a keyless signature is not accepted"):
        opened(sigstore.bundle(PAYLOAD, **given), trusted)


@pytest.mark.parametrize("part", ["authority", "certificates", "log"])
def test_a_service_that_the_root_does_not_name_is_refused(part, sigstore, trusted):
    strange = Sigstore()
    for name in ("authority", "certificates", "log", "root"):
        if name != part and (name, part) != ("root", "authority"):
            setattr(strange, name, getattr(sigstore, name))
    with pytest.raises(CertificateError):
        opened(strange.bundle(PAYLOAD), trusted)


def test_parts_of_another_artefact_are_refused(sigstore, trusted):
    """Each part is genuine, and about something else that the same identity signed."""
    bundle, second = (sigstore.bundle(payload) for payload in (PAYLOAD, PAYLOAD.replace(b"H100", b"H200")))
    for path in (
        ("dsseEnvelope",),
        ("dsseEnvelope", "payload"),
        ("dsseEnvelope", "signatures"),
        ("verificationMaterial", "certificate"),
        ("verificationMaterial", "tlogEntries"),
        ("verificationMaterial", "tlogEntries", 0, "inclusionProof"),
        ("verificationMaterial", "tlogEntries", 0, "inclusionPromise"),
        ("verificationMaterial", "tlogEntries", 0, "canonicalizedBody"),
    ):
        mixed = copy.deepcopy(bundle)
        at(mixed, path[:-1])[path[-1]] = at(second, path)
        assert refused(mixed, trusted), path
    text = json.dumps(bundle)
    doubled = text[:-1] + ', "dsseEnvelope": ' + json.dumps(second["dsseEnvelope"]) + "}"
    with pytest.raises(CertificateError, match="duplicate key"):
        keyless.open_bundle(doubled.encode(), trusted)
    both = json.loads(text)
    both["dsseEnvelope"]["signatures"] *= 2
    with pytest.raises(CertificateError):
        opened(both, trusted)


def test_other_forms_are_no_keyless_bundle(sigstore, trusted, tmp_path):
    bundle = sigstore.bundle(PAYLOAD)
    for kind in ("application/vnd.dev.sigstore.bundle+json;version=0.1", "application/json", None, 7):
        with pytest.raises(CertificateError):
            opened(bundle | {"mediaType": kind}, trusted)
    key = keys.load_or_create(tmp_path / "own.key")
    envelope = statement.sign(
        statement.Statement(predicate_type=contribution.TYPE, payload=PAYLOAD), key
    ).body
    with_key = {"publicKey": {"hint": statement.hint(key.public_key())}}
    of_key = {
        "mediaType": keyless.BUNDLE,
        "verificationMaterial": with_key,
        "dsseEnvelope": json.loads(envelope),
    }
    with pytest.raises(CertificateError):
        opened(of_key, trusted)
    for text in (b"", b"[]", b"{", b'{"mediaType": 1}', b"[" * 100_000, b"\xff"):
        with pytest.raises(CertificateError):
            keyless.open_bundle(text, trusted)


def test_a_second_identity_is_found_and_every_issuer_is_of_its_identity(sigstore, trusted):
    second = TrustedIdentity(identity="second@example.org", issuer="https://second.example.org")
    both = replace(trusted, trusted=(*trusted.trusted, second))
    found = opened(sigstore.bundle(PAYLOAD, identity=second.identity, issuer=second.issuer), both)
    assert found.signer == "second@example.org (https://second.example.org)"
    with pytest.raises(CertificateError):
        opened(sigstore.bundle(PAYLOAD, identity=second.identity), both)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("trusted_root: trusted_root.json", "trusted_root: ../trusted_root.json", "trusted_root"),
        ("trusted_root: trusted_root.json", "trusted_root: none.json", "there is no trusted root"),
        ("identities:", "names:", "identities"),
        (f"identity: {IDENTITY}", "identity: ''", "identity"),
        (f", issuer: '{ISSUER}'", "", "issuer"),
    ],
)
def test_a_wrong_file_of_identities_is_refused(old, new, says, trusted, tmp_path):
    assert trusted.trusted
    path = tmp_path / contribution.IDENTITIES
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(ConfigurationError, match=says):
        keyless.load_identities(path)


def test_a_wrong_or_writable_trusted_root_is_refused(sigstore, trusted, tmp_path):
    bundle = sigstore.bundle(PAYLOAD)
    whole = json.loads(trusted.root.read_text())
    for part in ("tlogs", "ctlogs", "certificateAuthorities", "mediaType"):
        trusted.root.write_text(json.dumps({name: one for name, one in whole.items() if name != part}))
        with pytest.raises(ConfigurationError, match="trusted root cannot be used"):
            opened(bundle, trusted)
    for part in ("tlogs", "ctlogs", "certificateAuthorities"):
        trusted.root.write_text(json.dumps(whole | {part: []}))
        with pytest.raises((ConfigurationError, CertificateError)):
            opened(bundle, trusted)
    trusted.root.chmod(0o666)
    with pytest.raises(ConfigurationError, match="other users can replace"):
        keyless.load_identities(tmp_path / contribution.IDENTITIES)


@pytest.mark.usefixtures("suites_asked_here")
def test_a_contributor_signs_as_an_identity_and_a_repository_accepts_it(
    sigstore, trusted, tmp_path, monkeypatch, capsys
):
    """The whole way: a token, the services of a site, a bundle, and the check of a folder of both kinds."""
    assert trusted.root.parent == tmp_path
    monkeypatch.setenv("GITLAB_CI", "true")
    monkeypatch.setenv("SIGSTORE_ID_TOKEN", small_sigstore.token())
    result = ROOT / "docs" / "results" / "suites-h200-x1-speed.json"
    contribute = ("contribute", "--root", str(ROOT))
    with sigstore.services() as config:
        (tmp_path / "site.json").write_text(json.dumps(config))
        done = call(
            capsys, *contribute, str(result), "--to", str(tmp_path), "--keyless", str(tmp_path / "site.json")
        )
    assert done.code == 0, done.err
    done = call(capsys, *contribute, "--check", str(tmp_path), "--key", str(tmp_path))
    assert done.code == 0, done.err
    assert f"{IDENTITY} ({ISSUER})" in done.out
    other = call(capsys, *contribute, "--check", str(COMMITTED), "--key", str(tmp_path))
    assert (other.code, "contributors.pub in the folder" in other.err) == (7, True), other.err
    (tmp_path / contribution.KEYS).write_bytes((COMMITTED / contribution.KEYS).read_bytes())
    (tmp_path / SOURCE.name).write_bytes(SOURCE.read_bytes())
    both = call(capsys, *contribute, "--check", str(tmp_path), "--key", str(tmp_path))
    assert (both.code, both.out.count("H100 x1"), both.out.count("H200 x1")) == (0, 1, 1), both.err
    done = call(capsys, *contribute, "--check", str(tmp_path), "--key", str(tmp_path / contribution.KEYS))
    assert (done.code, "contributors.yaml in the folder" in done.err) == (7, True), done.err
    down = call(capsys, *contribute, str(result), "--keyless", str(tmp_path / "site.json"))
    assert (down.code, "cannot be signed without a key" in down.err) == (2, True), down.err


def test_a_genuine_bundle_of_another_statement_is_no_contribution(sigstore, trusted, tmp_path):
    path = tmp_path / SOURCE.name
    who = contribution.Contributors(identities=trusted)
    path.write_text(json.dumps(sigstore.bundle(PAYLOAD)))
    assert contribution.read(path, ROOT, who).told.model == "H100"
    other_type = PAYLOAD.replace(contribution.TYPE.encode(), b"https://cyclonedx.org/bom")
    for payload in (other_type, b"{}", b"no statement"):
        path.write_text(json.dumps(sigstore.bundle(payload)))
        with pytest.raises(CertificateError):
            contribution.read(path, ROOT, who)


def test_a_configuration_that_is_not_there_is_named(tmp_path):
    absent = str(tmp_path / "nowhere.json")
    with pytest.raises(ConfigurationError, match="--keyless names a file that does not exist") as caught:
        keyless.sign(statement.Statement(predicate_type=contribution.TYPE, payload=PAYLOAD), absent)
    assert absent in str(caught.value)
