"""Garbage collection removes what nothing references, and never what a tag, digest or referrer reaches."""

import datetime as dt
import threading
from pathlib import Path

import pytest

import asked
from small_dist import DAY, KEY, release, verified
from small_images import NOW, STACK_ID, make_image, put, quiet
from stackcheck.certificate import attachments, revoke, verify
from stackcheck.certificate.statement import VSA, status
from stackcheck.oci.documents import OCI_INDEX, OCI_MANIFEST, Manifest, RegistryError, compact_json
from stackcheck.oci.layout import REF_NAME, OciLayout

pytestmark = pytest.mark.usefixtures("no_disk_flushes")

REFERRER = "application/vnd.example.note"


@pytest.fixture
def dist(tmp_path) -> Path:
    """Three publications of one stack, each with new statements; the second image was certified twice."""
    for number, name in enumerate(("first", "second", "second"), start=1):
        image = make_image(tmp_path / f"oci{number}", name.encode())
        release(image, tmp_path / "dist", now=NOW + number * dt.timedelta(hours=1))
    return tmp_path / "dist"


def blobs(dist: Path) -> set[str]:
    return {f"sha256:{path.name}" for path in (dist / "blobs" / "sha256").iterdir()}


def images_of(layout: OciLayout) -> list[str]:
    return [tag for tag in layout.tags() if tag.startswith(STACK_ID)]


def assert_all_verify(dist: Path) -> None:
    tags = images_of(OciLayout(dist))
    assert len(tags) == 3  # the floating one, and one for each image
    for tag in tags:
        asked.verified(f"oci:{dist}:{tag}", public_key=KEY.public_key(), now=NOW + DAY)


def litter(dist: Path) -> list[str]:
    """What a crashed publication and an earlier version left: a layer, and a manifest that no tag names."""
    layout = OciLayout(dist)
    layer = put(layout, "application/octet-stream", b"a layer of nothing" * 1000)
    config = put(layout, "application/octet-stream", b'{"config": "of nothing"}')
    document = {"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": config, "layers": [layer]}
    manifest = put(layout, OCI_MANIFEST, compact_json(document))
    return [layer["digest"], config["digest"], manifest["digest"]]


def test_garbage_goes_and_every_tag_still_verifies(dist):
    kept = blobs(dist)
    garbage = litter(dist)
    layout = OciLayout(dist)
    before = (dist / "index.json").read_bytes()
    assert set(layout.unreferenced()) == set(garbage)
    assert blobs(dist) == kept | set(garbage)
    found = layout.collect_garbage(quiet)
    assert set(found) == set(garbage)
    assert found[garbage[0]] == 18_000
    assert blobs(dist) == kept
    assert (dist / "index.json").read_bytes() == before
    assert_all_verify(dist)
    assert layout.collect_garbage(quiet) == {}


def test_an_image_stays_as_long_as_its_attestations_name_it(dist):
    layout = OciLayout(dist)
    gone = layout.read_manifest(next(tag for tag in images_of(layout) if tag != STACK_ID))
    config = gone.descriptors("config")[0].digest
    layout._write_entries([entry for entry in layout._entries() if entry.digest != gone.digest])
    assert layout.unreferenced() == {}
    hexes = gone.digest.removeprefix("sha256:")
    attached = (f"sha256-{hexes}", f"cert-{hexes[:12]}-")
    names = {entry.digest: entry.annotations.get(REF_NAME, "") for entry in layout._entries()}
    layout._write_entries([e for e in layout._entries() if not names[e.digest].startswith(attached)])
    assert {gone.digest, config} <= set(layout.unreferenced())


@pytest.mark.parametrize("listed", ["by nothing", "by a digest tag", "by an index in an index"])
def test_what_refers_to_a_kept_manifest_stays(tmp_path, listed):
    image = make_image(tmp_path / "dist")
    layout = OciLayout(image.layout)
    subject = layout.read_manifest("candidate")
    document = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "artifactType": REFERRER,
        "config": put(layout, REFERRER, b"{}"),
        "layers": [put(layout, REFERRER, b"a note")],
        "subject": subject.as_descriptor().as_json() if listed == "by nothing" else None,
    }
    if listed != "by nothing":
        del document["subject"]
    note = Manifest(media_type=OCI_MANIFEST, body=compact_json(document))
    layout.write_blob(note.as_descriptor(), lambda: (note.body,))
    if listed != "by nothing":
        assert note.digest in layout.unreferenced()
        entry = note.as_descriptor()
        for depth in range(2 if listed == "by an index in an index" else 1):
            members = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [entry.as_json()]}
            index = Manifest(
                media_type=OCI_INDEX, body=compact_json(members | {"annotations": {"d": str(depth)}})
            )
            layout.write_blob(index.as_descriptor(), lambda body=index.body: (body,))
            entry = index.as_descriptor()
        layout.write_manifest(index, attachments.fallback_tag(subject.digest))
    assert layout.collect_garbage(quiet) == {}
    layout.read_manifest(note.digest)


@pytest.mark.parametrize("damage", ["truncated", "missing", "no JSON"])
def test_a_damaged_manifest_stops_the_collection_before_it_removes(dist, damage):
    litter(dist)
    layout = OciLayout(dist)
    path = layout.blob_path(layout.read_manifest(STACK_ID).digest)
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] if damage == "truncated" else b"x")
    before = blobs(dist)
    with pytest.raises(RegistryError):
        layout.collect_garbage(quiet)
    assert blobs(dist) == before


def test_an_interrupted_collection_leaves_a_layout_that_verifies(dist, monkeypatch):
    garbage = litter(dist)
    layout = OciLayout(dist)
    path_type = type(dist)
    unlink, removed = path_type.unlink, []

    def interrupted(path: Path, *, missing_ok: bool = False) -> None:
        if path.parent.name == "sha256":
            if removed:
                raise KeyboardInterrupt
            removed.append(f"sha256:{path.name}")
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(path_type, "unlink", interrupted)
        with pytest.raises(KeyboardInterrupt):
            layout.collect_garbage(quiet)
    assert removed == [garbage[2]]  # the manifest first: none is left without its layers
    assert_all_verify(dist)
    assert set(layout.collect_garbage(quiet)) == set(garbage[:2])


def test_a_collection_waits_for_a_writer(dist):
    garbage, said, waiting = litter(dist), [], threading.Event()
    worker = threading.Thread(
        target=lambda: OciLayout(dist).collect_garbage(lambda text: (said.append(text), waiting.set())[0])
    )
    with OciLayout(dist).writing(quiet):
        worker.start()
        assert waiting.wait(timeout=30)
        assert set(garbage) <= blobs(dist)
    worker.join(timeout=30)
    assert "waiting for another writer" in said[0]
    assert not set(garbage) & blobs(dist)


def test_a_verifier_that_reads_while_a_publication_replaces_statements_reads_again(
    dist, tmp_path, monkeypatch
):
    """It reads the image, then a new publication removes the statements that it was about to read."""
    image = make_image(tmp_path / "again", b"second")
    check, once = verify._check_layout, []

    def slow(store: OciLayout, manifest: Manifest) -> None:
        if not once:
            once.append(1)
            carriers = attachments.manifests(store, manifest.digest)
            release(image, dist, now=NOW + dt.timedelta(hours=9))
            for carrier in carriers:
                store.read_manifest(carrier.digest)  # the replaced one is gone
        check(store, manifest)

    monkeypatch.setattr(verify, "_check_layout", slow)
    found = verified(dist)
    assert once == [1]
    assert found.verified_at == NOW + dt.timedelta(hours=9)


def test_a_lifted_revocation_is_still_known_after_a_collection(dist, tmp_path):
    """What `verify` needs of it is the mark: an old verdict that is attached again must not count."""
    layout = OciLayout(dist)
    digest = layout.read_manifest(STACK_ID).digest
    old = attachments.read_envelopes(layout, digest, KEY.public_key())
    told = {"key": KEY, "report": quiet}
    revoke.revoke(f"oci:{dist}@{digest}", reason="NaN", now=NOW + 4 * dt.timedelta(hours=1), **told)
    again = make_image(tmp_path / "again", b"second")
    assert again.manifest_digest == digest
    release(again, dist, now=NOW + 5 * dt.timedelta(hours=1))
    mark = layout.read_manifest(attachments.revoked_tag(digest))
    litter(dist)
    assert layout.collect_garbage(quiet)
    assert_all_verify(dist)
    assert OciLayout(dist).read_manifest(attachments.revoked_tag(digest)) == mark
    known = attachments.read_envelopes(layout, digest, KEY.public_key())
    assert [status(item.statement) for item in known if item.statement.predicate_type == VSA].count(
        "FAILED"
    ) == 1
    attachments.attach(layout, layout.read_manifest(digest), old, KEY.public_key())
    assert verified(dist, now=NOW + 6 * dt.timedelta(hours=1)).verified_at == NOW + 5 * dt.timedelta(hours=1)
