"""What a store offers, however large or slow, costs a verification bounded work. Work is counted."""

import itertools
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import asked
from memory_registry import MemoryRegistry
from small_dist import KEY, verified
from small_images import NOW, STACK_ID, SmallImage, certify, make_image, new_key, put, quiet
from small_registry import Answer, repository, serving
from stackcheck.certificate import attachments, publish, reader, storage_forms, verify
from stackcheck.errors import CertificateError
from stackcheck.oci import documents, layout
from stackcheck.oci.distribution import Repository
from stackcheck.oci.documents import OCI_MANIFEST, Descriptor, Manifest, RegistryError, compact_json, sha256
from stackcheck.oci.layout import OciLayout
from stackcheck.oci.patience import GRACE_S, SLOWEST_BYTES_PER_S, Patience

pytestmark = pytest.mark.usefixtures("no_disk_flushes")


@pytest.fixture
def hashed() -> Iterator[list[int]]:
    """The sizes of all that was hashed as a document."""
    sizes: list[int] = []

    def counting(body: bytes) -> str:
        sizes.append(len(body))
        return original(body)

    original = documents.sha256
    with mock.patch.object(documents, "sha256", counting):
        yield sizes


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """The names of the files of the layout that were opened."""
    names: list[str] = []

    def counting(path: Path) -> Any:
        names.append(path.name)
        return original(path)

    original = layout.open_regular
    with mock.patch.object(layout, "open_regular", counting):
        yield names


def test_a_manifest_of_thousands_of_layers_is_hashed_once(hashed):
    layers = [Descriptor(media_type="x", digest=sha256(b"same"), size=4).as_json()] * 23_000
    manifest = Manifest(media_type=OCI_MANIFEST, body=compact_json({"layers": layers}))
    hashed.clear()
    assert len(verify.image_blobs(manifest)) == 1
    assert len(manifest.descriptors("layers")) == 23_000
    assert hashed == [len(manifest.body)]


def test_a_blob_that_many_layers_name_is_read_no_more_often_than_one_that_one_names(dist, image, opened):
    once = attached_layers(dist, image, 1, opened)
    assert attached_layers(dist, image, 400, opened) == once


def attached_layers(dist: Path, image: SmallImage, count: int, opened: list[str]) -> int:
    """How often the blob is opened by a verification, if so many layers of `.att` name it."""
    store = OciLayout(dist)
    kept = store.read_manifest(attachments.legacy_tag(image.manifest_digest)).document
    blob = put(store, storage_forms.DSSE_LAYER, b'{"payload": "' + b"x" * 1000 + b'"}')
    others = [item for item in kept["layers"] if item["digest"] != blob["digest"]]
    body = compact_json({**kept, "layers": [*others, *[blob] * count]})
    store.write_manifest(
        Manifest(media_type=OCI_MANIFEST, body=body), attachments.legacy_tag(image.manifest_digest)
    )
    opened.clear()
    assert verified(dist)
    return opened.count(blob["digest"].removeprefix("sha256:"))


def test_an_index_is_parsed_once_however_many_bundles_are_looked_up(dist, image):
    store = OciLayout(dist)
    with store.writing(quiet):
        bundles = [foreign_bundle(store, image, number) for number in range(50)]
        attachments.write_fallback(store, image.manifest_digest, bundles, set())
    with mock.patch.object(layout, "parse_index", side_effect=layout.parse_index) as parsing:
        assert verified(dist)
    assert parsing.call_count == 1


def foreign_bundle(store: OciLayout, image: SmallImage, number: int) -> Manifest:
    layer = put(store, storage_forms.BUNDLE, b"%d" % number)
    subject = store.read_manifest(image.manifest_digest).as_descriptor().as_json()
    document = {"config": layer, "layers": [layer], "subject": subject, "annotations": {}}
    manifest = Manifest(media_type=OCI_MANIFEST, body=compact_json(document))
    store.write_blob(manifest.as_descriptor(), lambda: (manifest.body,))
    return manifest


@pytest.mark.parametrize("cap", ["MOST_MANIFESTS", "MOST_LAYERS", "MOST_BYTES"])
def test_more_attestations_than_years_of_renewals_give_are_refused(dist, image, monkeypatch, cap):
    store = OciLayout(dist)
    with store.writing(quiet):
        bundles = [foreign_bundle(store, image, number) for number in range(20)]
        attachments.write_fallback(store, image.manifest_digest, bundles, set())
    assert verified(dist)
    module = attachments if cap == "MOST_MANIFESTS" else reader
    monkeypatch.setattr(module, cap, 20)
    with pytest.raises(CertificateError, match="too many attestations"):
        verified(dist)
    monkeypatch.setattr(module, cap, 5)
    with pytest.raises(RegistryError, match="too many attestations"):
        attachments.attach(store, store.read_manifest(STACK_ID), certify(image, KEY), KEY.public_key())


def test_a_blob_that_an_image_names_twice_is_copied_once(tmp_path):
    image = make_image(tmp_path / "oci")
    source, key = OciLayout(image.layout), new_key()
    document = source.only_manifest().document
    body = compact_json({**document, "layers": document["layers"] * 500})
    manifest = Manifest(media_type=OCI_MANIFEST, body=body)
    many = type(image)(image.layout, manifest.digest, image.config_digest)
    store: Any = MemoryRegistry()
    with mock.patch.object(store, "has_blob", side_effect=store.has_blob) as looking:
        publish.copy_and_tag(
            *(source, manifest, certify(many, key), store),
            tag=STACK_ID,
            public_key=key.public_key(),
            report=quiet,
        )
    assert looking.call_count < 60


# -- slow registries: the clock is a fake, which says that every read took so many seconds


def clock(step_s: float) -> Any:
    return itertools.count(0.0, step_s).__next__


def dripping(_request: BaseHTTPRequestHandler) -> Answer:
    return 200, {"Content-Type": "x"}, (b"{" for _ in range(100_000))


def test_a_registry_that_sends_a_byte_at_a_time_is_given_up():
    patience = Patience(clock=clock(1.0))
    with serving(dripping) as (host, seen):
        with pytest.raises(RegistryError, match="does not answer") as caught:
            repository(host, patience=patience).read_manifest("x")
        assert len(seen) == 1
    assert "bytes in" in str(caught.value)


def test_a_blob_that_drips_is_given_up_too():
    patience = Patience(clock=clock(1.0))
    with serving(dripping) as (host, _), pytest.raises(RegistryError, match="does not answer"):
        list(repository(host, patience=patience).read_blob(sha256(b"x")))


def test_headers_that_drip_are_given_up():
    """The status line counts as well: it is read from the same connection."""
    patience = Patience(clock=clock(GRACE_S + 1))
    with serving(lambda _: (200, {}, b"{}")) as (host, _), pytest.raises(RegistryError, match="not answer"):
        repository(host, patience=patience).tags()


def test_a_slow_registry_that_keeps_the_rate_is_waited_for():
    body = b"x" * (SLOWEST_BYTES_PER_S * 200)
    patience = Patience(clock=clock(0.2))  # some 16 KiB in each read, at most
    with serving(lambda _: (200, {}, body)) as (host, _):
        assert b"".join(repository(host, patience=patience).read_blob(sha256(body))) == body


def test_all_requests_of_a_verification_share_one_end(image):
    patience = Patience(verify.TOTAL_S, clock=clock(1.0))
    with serving(lambda _: (200, {"Content-Type": OCI_MANIFEST}, b"{}")) as (host, seen):
        store = repository(host, patience=patience)
        with pytest.raises(RegistryError, match="does not answer") as caught:
            read_without_end(store)
        assert len(seen) < verify.TOTAL_S
    assert "no end within 300 s" in str(caught.value)
    assert image


def read_without_end(store: Repository) -> None:
    while True:
        store.read_manifest("x")


def test_verify_sets_that_end(monkeypatch):
    told: list[object] = []

    def opening(_target: str, **options: object) -> Any:
        told.append(options["total_s"])
        raise RegistryError("planted")

    monkeypatch.setattr(verify, "open_store", opening)
    with pytest.raises(CertificateError, match="planted"):
        asked.verified("127.0.0.1:1/a:b", public_key=KEY.public_key(), now=NOW)
    assert told == [verify.TOTAL_S]


def test_a_busy_registry_is_asked_again_when_it_said_so(monkeypatch):
    waited: list[float] = []
    monkeypatch.setattr("stackcheck.oci.transport.time.sleep", waited.append)
    answers = iter([(429, {"Retry-After": "7"}), (429, {"Retry-After": "86400"}), (200, {})])

    def busy(_request: BaseHTTPRequestHandler) -> Answer:
        status, headers = next(answers)
        return status, headers, b"{}"

    with serving(busy) as (host, _):
        repository(host).read_manifest("x")
    assert waited == [7.0, 30.0]
