"""References are read one way only, and a layout never shows half a write or wrong bytes."""

import json
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from small_images import make_image, quiet
from stackcheck.certificate.attachments import bundle_tag, fallback_tag, legacy_tag
from stackcheck.errors import ConfigurationError, FileError
from stackcheck.oci.documents import (
    Descriptor,
    IntegrityError,
    Manifest,
    MissingError,
    RegistryError,
    descriptor,
    sha256,
)
from stackcheck.oci.layout import OciLayout
from stackcheck.oci.store import Reference, parse_reference, parse_target

DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("oci:dist", Reference(target="oci:dist")),
        ("oci:dist:x-1.2", Reference(target="oci:dist", tag="x-1.2")),
        ("oci:/a/b.c:x", Reference(target="oci:/a/b.c", tag="x")),
        (f"oci:dist@{DIGEST}", Reference(target="oci:dist", digest=DIGEST)),
        (f"oci:dist:x@{DIGEST}", Reference(target="oci:dist", tag="x", digest=DIGEST)),
        ("127.0.0.1:5000/a/b:x", Reference(target="127.0.0.1:5000/a/b", tag="x")),
        ("127.0.0.1:5000/a", Reference(target="127.0.0.1:5000/a")),
        ("[::1]:5000/a:x", Reference(target="[::1]:5000/a", tag="x")),
        ("registry.example.org/a:x", Reference(target="registry.example.org/a", tag="x")),
        ("localhost/a:x", Reference(target="localhost/a", tag="x")),
        (f"registry.example.org/a@{DIGEST}", Reference(target="registry.example.org/a", digest=DIGEST)),
    ],
)
def test_a_reference_is_read_and_spelled_back(text, expected):
    assert parse_reference(text) == expected
    assert str(expected) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "oci:", "x", "x:y", "host/x", "registry.example.org/", "registry.example.org/UPPER:x"),
        *("registry.example.org/a:-x", "registry.example.org/a b:x", "oci:dist@sha256:12", "oci:dist@md5:x"),
        *("https://registry.example.org/a:x", "registry.example.org/../a:x", "registry.example.org/a:x?y=1"),
        "registry.example.org/a:" + "x" * 129,
    ],
)
def test_what_is_no_reference_is_refused(text):
    with pytest.raises(ConfigurationError):
        parse_reference(text)


@pytest.mark.parametrize(
    "text", ["oci:dist:rocm7", "registry.example.org/a:x", f"oci:dist@{DIGEST}", "a/b", ""]
)
def test_a_place_to_publish_to_has_no_tag_and_no_digest(text):
    with pytest.raises(ConfigurationError):
        parse_target(text)


@pytest.mark.parametrize(
    "text",
    [
        "https://name:secret@registry.example.org/a",
        "https://name:se/cret@registry.example.org/a",
        "https://name:s@cret@registry.example.org/a",
        f"https://name:s@cret@registry.example.org/a@{DIGEST}",
        "name:secret@registry.example.org/a",
        "name:secret@registry.example.org:5000",
        f"name:secret@registry.example.org/a@{DIGEST}",
        "name:se\ncret@registry.example.org/a",
    ],
)
def test_an_address_in_place_of_a_reference_shows_no_password(text):
    with pytest.raises(ConfigurationError) as refused:
        parse_target(text)
    assert "cret" not in str(refused.value)
    assert "cret" not in str(refused.value.got)
    assert str(refused.value.got).startswith("…@registry.example.org")


@pytest.mark.parametrize("port", ["0", "65536", "99999", "123456", "٣"])
def test_a_port_that_no_host_has_is_refused(port):
    for text in (f"localhost:{port}/a:x", f"registry.example.org:{port}/a", f"[::1]:{port}/a"):
        with pytest.raises(ConfigurationError, match="not a reference"):
            parse_reference(text)


@given(st.text(max_size=40))
def test_any_text_is_a_reference_or_a_clear_refusal(text):
    try:
        found = parse_reference(text)
    except ConfigurationError:
        return
    assert parse_reference(str(found)) == found


def test_a_reference_without_tag_or_digest_names_no_image():
    with pytest.raises(ConfigurationError):
        _ = parse_reference("oci:dist").name


@pytest.mark.parametrize(
    "document",
    [
        None,
        {},
        {"mediaType": "x", "digest": "sha256:../../etc/passwd", "size": 1},
        {"mediaType": "x", "digest": DIGEST, "size": "1"},
        {"mediaType": "x", "digest": DIGEST, "size": 1, "annotations": []},
        {"mediaType": "x", "digest": DIGEST, "size": 1, "annotations": [1]},
    ],
)
def test_a_malformed_descriptor_is_refused(document):
    if document == {"mediaType": "x", "digest": DIGEST, "size": 1, "annotations": []}:
        assert descriptor(document, "x").annotations == {}
        return
    with pytest.raises(RegistryError):
        descriptor(document, "x")


def test_no_digest_can_name_a_file_outside_the_layout(tmp_path):
    with pytest.raises(RegistryError, match="not a digest"):
        OciLayout(tmp_path).has_blob("sha256:../../../../etc/passwd")


def test_two_tags_can_name_one_manifest_and_go_one_by_one(tmp_path):
    image = make_image(tmp_path)
    layout = OciLayout(tmp_path)
    layout.write_manifest(layout.read_manifest("candidate"), "second")
    layout.delete_tag("candidate")
    assert layout.tags() == ("second",)
    layout.delete_tag("second")
    assert layout.tags() == ()
    assert layout.read_manifest(image.manifest_digest).digest == image.manifest_digest


def test_a_write_that_dies_leaves_no_file_behind(tmp_path):
    def dying() -> Iterator[bytes]:
        yield b"ri"
        raise KeyboardInterrupt

    layout = OciLayout(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        layout.write_blob(Descriptor(media_type="x", digest=sha256(b"right"), size=5), dying)
    assert list((tmp_path / "blobs" / "sha256").iterdir()) == []


def test_a_full_disk_is_a_clear_error(tmp_path):
    import os

    def full() -> Iterator[bytes]:
        raise OSError(28, os.strerror(28))
        yield b""

    with pytest.raises(FileError) as error:
        OciLayout(tmp_path).write_blob(Descriptor(media_type="x", digest=DIGEST, size=5), full)
    assert error.value.exit_code == 10
    assert "No space left" in str(error.value)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"manifests": 1}', '{"manifests": [{}]}'])
def test_a_broken_index_is_a_clear_error(tmp_path, content):
    make_image(tmp_path)
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(RegistryError):
        OciLayout(tmp_path).read_manifest("candidate")


@pytest.mark.parametrize("change", [{"size": 1}, {"mediaType": "application/vnd.oci.image.index.v1+json"}])
def test_an_index_that_lies_about_its_manifest_is_refused(tmp_path, change):
    make_image(tmp_path)
    document = json.loads((tmp_path / "index.json").read_text())
    document["manifests"][0] |= change
    (tmp_path / "index.json").write_text(json.dumps(document))
    with pytest.raises(IntegrityError):
        OciLayout(tmp_path).read_manifest("candidate")


def test_a_missing_tag_shows_the_newest_images_and_none_of_what_is_attached_to_them(tmp_path):
    image = make_image(tmp_path)
    layout = OciLayout(tmp_path)
    manifest = layout.read_manifest(image.manifest_digest)
    attached = (
        legacy_tag(manifest.digest),
        fallback_tag(manifest.digest),
        bundle_tag(manifest.digest, DIGEST),
    )
    for tag in ("first", *attached, *(f"image-20260304-{n}" for n in (1, 2, 3)), "image", *attached):
        layout.write_manifest(manifest, tag)
    with pytest.raises(MissingError) as caught:
        layout.read_manifest("other")
    assert caught.value.expected == "image, image-20260304-3, image-20260304-2, image-20260304-1"
    for tag in set(layout.tags()) - {*attached}:
        layout.delete_tag(tag)
    with pytest.raises(MissingError, match="next: stackcheck images"):
        layout.read_manifest("other")


def test_a_second_writer_waits_and_says_for_what(tmp_path):
    make_image(tmp_path)
    said: list[str] = []
    order: list[str] = []
    waiting = threading.Event()

    def second() -> None:
        with OciLayout(tmp_path).writing(lambda text: (said.append(text), waiting.set())[0]):
            order.append("second")

    with OciLayout(tmp_path).writing(quiet):
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(60)
        order.append("first")
    thread.join(60)
    assert order == ["first", "second"]
    assert "waiting for another writer" in said[0]
    assert ".lock" in said[0]


def test_a_layout_with_two_images_is_not_one_image(tmp_path):
    make_image(tmp_path, b"first")
    layout = OciLayout(tmp_path)
    layout.write_manifest(Manifest(media_type="x", body=b"{}"), "second")
    with pytest.raises(RegistryError, match="exactly one image"):
        layout.only_manifest()
