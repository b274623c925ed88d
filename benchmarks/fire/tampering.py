"""What was signed and then changed, and files of a layout with random changes: all must be refused.

In: a folder and a seed. Out: counts, reasons, and each case that was accepted or ended in a traceback.
"""

from __future__ import annotations

import base64
import contextlib
import json
import random
import shutil
import time
import traceback
from collections import Counter
from typing import TYPE_CHECKING, Any

from fire.publishers import KEY, PUBLIC, START

from small_images import STACK_ID, SmallImage, certify, make_image, new_key, quiet
from stackcheck.certificate import attachments, for_host, verify
from stackcheck.certificate.statement import VSA, Envelope, Statement, sign
from stackcheck.errors import CertificateError, StackcheckError
from stackcheck.oci.documents import compact_json
from stackcheck.oci.layout import OciLayout

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def paths(value: object, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of every member of a document."""
    if here:
        yield here
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from paths(item, (*here, key))


def changed(document: dict[str, Any], path: tuple[Any, ...], *, drop: bool) -> bytes:
    copy = json.loads(json.dumps(document))
    place = copy
    for key in path[:-1]:
        place = place[key]
    if drop:
        del place[path[-1]]
    else:
        place[path[-1]] = f"{place[path[-1]]}x" if isinstance(place[path[-1]], str) else 7
    return compact_json(copy)


def tampered(envelope: Envelope, other: Envelope, chooser: random.Random) -> Iterator[tuple[str, bytes]]:
    """Envelopes that must not count: name of the case, bytes."""
    signed = json.loads(envelope.body)
    payload = json.loads(base64.b64decode(signed["payload"]))

    def with_payload(body: bytes) -> bytes:
        return compact_json({**signed, "payload": base64.b64encode(body).decode()})

    for path in paths(payload):
        for drop in (False, True):
            what = "without" if drop else "changed"
            yield f"{what} {'/'.join(map(str, path))}", with_payload(changed(payload, path, drop=drop))
    text = base64.b64decode(signed["payload"])
    yield "a duplicate key", with_payload(text[:-1] + b',"_type":"x"}')
    yield "a blank at the end", with_payload(text + b" ")
    yield "unicode names", with_payload(text.replace(b"STACKCHECK", "STACKCHEC\u212a".encode()))
    for name, deep in (("deep", b"[" * 100_000), ("huge", b'"' + b"x" * 20_000_000 + b'"'), ("empty", b"")):
        yield f"{name} payload", with_payload(deep)
        yield f"{name} envelope", deep
    signature = base64.b64decode(signed["signatures"][0]["sig"])
    for bit in chooser.sample(range(len(signature) * 8), 24):
        broken = bytearray(signature)
        broken[bit // 8] ^= 1 << bit % 8
        sig = base64.b64encode(broken).decode()
        yield f"signature bit {bit}", compact_json({**signed, "signatures": [{"keyid": "", "sig": sig}]})
    for name, signatures in (
        ("no signature", []),
        ("null signatures", None),
        ("a signature of nothing", [{"sig": ""}]),
        ("of another statement", json.loads(other.body)["signatures"]),
        ("a list of lists", [[]]),
    ):
        yield name, compact_json({**signed, "signatures": signatures})
    for kind in ("application/json", "", None, "application/vnd.in-toto+json "):
        yield f"payload type {kind!r}", compact_json({**signed, "payloadType": kind})
    yield "the statement of another image", other.body
    yield "another key", certify_by_another(envelope)
    for junk in (b"null", b"[]", b"{}", b"\xff\xfe", b"{" * 50):
        yield f"junk {junk[:6]!r}", junk


def certify_by_another(envelope: Envelope) -> bytes:
    return sign(Statement(predicate_type=VSA, payload=envelope.statement.payload), new_key()).body


def tampering(folder: Path, seed: int) -> dict[str, object]:
    """Each case in both forms of a layout; all must be refused with exit 7 and a reason."""
    image, elsewhere = make_image(folder / "good", b"good"), make_image(folder / "bad", b"bad")
    good, other = certify(image, KEY, now=START), certify(elsewhere, KEY, now=START)
    wrong, cases, reasons = [], 0, Counter[str]()
    for name, body in tampered(good[-1], other[-1], random.Random(seed)):
        dist = folder / "dist"
        shutil.rmtree(dist, ignore_errors=True)
        plant(dist, image, [*(item.body for item in good[:-1]), body])
        cases += 1
        try:
            wanted = for_host.Wanted(device_model="CPU", driver=None)
            verify.verify(f"oci:{dist}:{STACK_ID}", wanted, public_key=PUBLIC, now=START)
        except CertificateError as error:
            reasons[error.what] += 1
            if error.exit_code != 7 or not error.what:
                wrong.append(f"{name}: {error}")
        except Exception:  # noqa: BLE001  # a traceback is a wrong outcome, and the campaign goes on
            wrong.append(f"{name}: {traceback.format_exc()}")
        else:
            wrong.append(f"{name}: accepted")
    return {"count": cases, "outcomes": dict(reasons), "wrong": wrong}


def plant(dist: Path, image: SmallImage, bodies: list[bytes]) -> None:
    """An image with attestations of these bytes, in both forms, as an honest store would hold them."""
    store, source = OciLayout(dist), OciLayout(image.layout)
    manifest = source.only_manifest()
    with store.writing(quiet):
        for blob in (*manifest.descriptors("config"), *manifest.descriptors("layers")):
            store.write_blob(blob, lambda digest=blob.digest: source.read_blob(digest))  # type: ignore[misc]
        holders = [
            Envelope(statement=Statement(predicate_type=VSA, payload=b"{}"), body=body) for body in bodies
        ]
        layers = [attachments.legacy_layer(store, item) for item in holders]
        legacy = attachments.legacy_manifest(store, layers)
        store.write_manifest(legacy, attachments.legacy_tag(manifest.digest))
        bundles = [bundle for item in holders if (bundle := a_bundle(store, manifest, item))]
        attachments.write_fallback(store, manifest.digest, bundles, set())
        for bundle in bundles:
            store.write_manifest(bundle, attachments.bundle_tag(manifest.digest, bundle.digest))
        store.write_manifest(manifest, STACK_ID)


def a_bundle(store: OciLayout, manifest: Any, envelope: Envelope) -> Any:
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return attachments.bundle(store, manifest, envelope, PUBLIC, START)
    return None


def fuzz(folder: Path, seed: int, number: int, cpu_s: float) -> dict[str, object]:
    """Random changes to files of a layout: refused, or the certified digest all the same; no traceback."""
    image, chooser = make_image(folder / "oci", b"fuzzed"), random.Random(f"{seed} fuzz {number}")
    dist = folder / "dist"
    plant(dist, image, [item.body for item in certify(image, KEY, now=START)])
    whole = {path: path.read_bytes() for path in sorted(dist.rglob("*")) if path.is_file()}
    pieces = (b"", b"\0", b"null", b"{}", b"[" * 2000, b'"', b"-1", b"1e999", b"sha256:", b"\xff", b"\\ud800")
    wrong, outcomes, begin = [], Counter[str](), time.process_time()
    while time.process_time() - begin < cpu_s:
        path = chooser.choice([*whole, dist / "index.json"])
        body = bytearray(whole[path])
        for _ in range(chooser.randint(1, 4)):
            at = chooser.randrange(len(body) + 1)
            piece = chooser.choice((*pieces, chooser.randbytes(4), bytes(body[: chooser.randrange(40)])))
            body[at : at + chooser.choice((0, 1, 8, 400))] = piece
        path.write_bytes(body)
        try:
            wanted = for_host.Wanted(device_model="CPU", driver=None)
            found = verify.verify(f"oci:{dist}:{STACK_ID}", wanted, public_key=PUBLIC, now=START)
            outcomes["the certified digest"] += 1
            if found.digest != image.manifest_digest or (
                path.parent.name == "sha256" and bytes(body) != whole[path]
            ):
                wrong.append(f"accepted with {path.name} changed")
        except StackcheckError as error:
            outcomes[f"refused, exit {error.exit_code}"] += 1
        except Exception:  # noqa: BLE001  # a traceback is a wrong outcome, and the campaign goes on
            wrong.append(traceback.format_exc())
        path.write_bytes(whole[path])
    return {"cpu_s": cpu_s, "count": outcomes.total(), "outcomes": dict(outcomes), "wrong": wrong[:20]}
