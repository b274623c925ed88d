import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from stackcheck.errors import ConfigurationError, EngineError
from stackcheck.oci.documents import DOCKER_INDEX, OCI_INDEX, OCI_MANIFEST, IntegrityError, sha256
from stackcheck.oci.image_layout import OCI_CONFIG, ImageLayout, unpack


def tar_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in files.items():
            header = tarfile.TarInfo(name)
            header.size = len(data)
            tar.addfile(header, io.BytesIO(data))
    return buffer.getvalue()


CONFIG = b'{"rootfs": {"type": "layers", "diff_ids": []}}'
SAVED_ID = f"sha256:{hashlib.sha256(CONFIG).hexdigest()}"


def unpacked(saved: bytes, layout: Path) -> str:
    return unpack([saved], layout, architecture="amd64", image_id=SAVED_ID)


@pytest.fixture
def saved() -> bytes:
    """What the classic store's `docker save` writes."""
    manifest = [{"Config": "c.json", "RepoTags": ["a/b:1"], "Layers": ["l1/layer.tar", "l2/layer.tar"]}]
    files = {"manifest.json": json.dumps(manifest).encode(), "c.json": CONFIG}
    return tar_of({**files, "l1/layer.tar": b"first layer", "l2/layer.tar": b"second layer"})


def test_a_classic_archive_becomes_a_layout_with_the_same_config(saved, tmp_path):
    digest = unpacked(saved, tmp_path / "oci")
    assert ImageLayout(tmp_path / "oci").image().digest == digest
    manifest = ImageLayout(tmp_path / "oci").json(digest)
    assert manifest["config"]["digest"] == SAVED_ID
    assert [
        ImageLayout(tmp_path / "oci").blob_path(layer["digest"]).read_bytes() for layer in manifest["layers"]
    ] == [b"first layer", b"second layer"]
    assert {path.name for path in (tmp_path / "oci").iterdir()} == {"blobs", "oci-layout", "index.json"}


def test_an_engine_that_saves_another_image_than_the_named_one_is_refused(saved, tmp_path):
    """A tag that moves between the look and the save, and an engine that answers for another id."""
    for other in (sha256(b"another"), SAVED_ID[:-1] + "x", "a/b:1", ""):
        with pytest.raises(EngineError, match="another image"):
            unpack([saved], tmp_path / "oci", architecture="amd64", image_id=other)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", [OCI_INDEX, DOCKER_INDEX])
def test_the_id_may_be_of_the_manifest_or_of_an_index_above_it_and_of_no_other_blob(kind, tmp_path):
    """containerd's store names an image by what its tag names."""
    blobs = {}

    def put(body: bytes) -> str:
        blobs[f"blobs/sha256/{sha256(body)[7:]}"] = body
        return sha256(body)

    def listing(kind: str, digest: str) -> bytes:
        return json.dumps({"manifests": [{"mediaType": kind, "digest": digest, "size": 1}]}).encode()

    config = put(CONFIG)
    pointer = {"mediaType": OCI_CONFIG, "digest": config, "size": len(CONFIG)}
    document = {"mediaType": OCI_MANIFEST, "config": pointer, "layers": []}
    manifest = put(json.dumps(document).encode())
    inner = put(listing(OCI_MANIFEST, manifest))
    outer = put(listing(OCI_INDEX, inner))
    saved = tar_of({"index.json": listing(kind, outer), **blobs, "blobs/sha256/" + "0" * 64: b"x"})
    for good in (config, manifest, inner, outer):
        found = unpack([saved], tmp_path / "oci", architecture="amd64", image_id=good)
        assert found == manifest
    with pytest.raises(EngineError, match="another image"):
        unpack([saved], tmp_path / "oci", architecture="amd64", image_id="sha256:" + "0" * 64)


def test_an_archive_cut_short_leaves_the_old_layout(saved, tmp_path):
    digest = unpacked(saved, tmp_path / "oci")
    with pytest.raises((tarfile.TarError, OSError)):
        unpack([saved[:700]], tmp_path / "oci", architecture="amd64", image_id=SAVED_ID)
    assert ImageLayout(tmp_path / "oci").image().digest == digest
    assert [path.name for path in tmp_path.iterdir()] == ["oci"]


def test_a_path_out_of_the_archive_is_refused(tmp_path):
    with pytest.raises(tarfile.TarError):
        unpack([tar_of({"../escaped": b"x"})], tmp_path / "oci", architecture="amd64", image_id=SAVED_ID)
    assert not (tmp_path / "escaped").exists()


def test_an_export_is_whole_or_not_there(saved, tmp_path):
    digest = unpacked(saved, tmp_path / "oci")
    out = tmp_path / "out" / "image.tar"
    ImageLayout(tmp_path / "oci").export("stackcheck/x:1", out)
    assert unpack([out.read_bytes()], tmp_path / "again", architecture="amd64", image_id=SAVED_ID) == digest
    layer = ImageLayout(tmp_path / "oci").json(digest)["layers"][0]["digest"]
    path = ImageLayout(tmp_path / "oci").blob_path(layer)
    path.write_bytes(b"First layer")
    other = tmp_path / "out" / "other.tar"
    with pytest.raises(IntegrityError):
        ImageLayout(tmp_path / "oci").export("stackcheck/x:1", other)
    path.unlink()
    with pytest.raises(IntegrityError, match="incomplete"):
        ImageLayout(tmp_path / "oci").export("stackcheck/x:1", other)
    assert [item.name for item in out.parent.iterdir()] == ["image.tar"]


def test_a_blob_that_goes_while_the_tar_is_written_is_an_error_and_no_short_tar(saved, tmp_path):
    digest = unpacked(saved, tmp_path / "oci")
    layer = ImageLayout(tmp_path / "oci").json(digest)["layers"][1]["digest"]
    ImageLayout(tmp_path / "oci").blob_path(layer).unlink()
    stored = ImageLayout(tmp_path / "oci")
    with pytest.raises(IntegrityError, match="incomplete"), stored.stream("a/b:1") as source:
        source.read()


def test_a_manifest_repeats_the_labels_and_the_date_of_its_config(tmp_path):
    config = {
        "created": "2026-01-01T00:00:00Z",
        "config": {
            "Labels": {
                "org.opencontainers.image.title": "a, b",
                "org.opencontainers.image.ref.name": "tag",
                "other": "x",
            }
        },
        "rootfs": {"type": "layers", "diff_ids": []},
    }
    listed = [{"Config": "c.json", "RepoTags": ["a/b:1"], "Layers": ["l/layer.tar"]}]
    files = {"manifest.json": json.dumps(listed).encode(), "c.json": json.dumps(config).encode()}
    layout = tmp_path / "oci"
    saved, name = tar_of({**files, "l/layer.tar": b"layer"}), sha256(files["c.json"])
    before = unpack([saved], layout, architecture="amd64", image_id=name)
    plain = ImageLayout(layout).json(before)
    for _ in range(2):  # the second time changes nothing
        ImageLayout(layout).annotate()
        digest = ImageLayout(layout).image().digest
        stated = ImageLayout(layout).json(digest)
        assert stated.pop("annotations") == {
            "org.opencontainers.image.title": "a, b",
            "org.opencontainers.image.created": "2026-01-01T00:00:00Z",
        }
        assert stated == plain
        named = {blob.digest.removeprefix("sha256:") for blob in ImageLayout(layout).blobs()}
        assert {path.name for path in layout.glob("blobs/sha256/*")} == named


@pytest.mark.parametrize("kind", ["manifest", "config", "layer"])
def test_no_blob_is_used_that_is_not_what_its_digest_names(kind, saved, tmp_path):
    """One changed byte, of equal length: before, the file's name was believed."""
    unpacked(saved, tmp_path / "oci")
    stored = ImageLayout(tmp_path / "oci")
    manifest, config, layer, _ = stored.blobs()
    path = stored.blob_path({"manifest": manifest, "config": config, "layer": layer}[kind].digest)
    path.write_bytes(path.read_bytes().replace(b"r", b"s", 1))
    with pytest.raises((ConfigurationError, IntegrityError)), stored.stream("a/b:1") as source:
        source.read()
    if kind != "layer":
        with pytest.raises(ConfigurationError, match="damaged"):
            stored.config()
