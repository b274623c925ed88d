"""The files of an image as the engine would show them: replaced, removed, linked; or a refusal."""

import hashlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import layered
from layered import FOLDER, HARD, LINK, Layer, Member
from stackcheck.oci import filesystem
from stackcheck.oci.documents import IntegrityError, RegistryError
from stackcheck.oci.filesystem import Hashing

ALL = Hashing(sums=("sha256",), body=True)


def read(folder: Path, *layers: Layer | bytes, packed: str = "") -> filesystem.Tree:
    return filesystem.read(folder, layered.make(folder, *layers, packed=packed), lambda _path: ALL)


@pytest.mark.parametrize("packed", ["", "gzip", "zstd"])
def test_a_file_of_the_last_layer_counts(tmp_path, packed):
    tree = read(tmp_path, {"a/x": b"old", "a/y": b"same"}, {"a/x": b"new"}, packed=packed)
    assert tree.bodies == {"/a/x": b"new", "/a/y": b"same"}
    assert [tree.entries[name].layer for name in ("/a/x", "/a/y")] == [1, 0]
    assert tree.entries["/a/x"].sums == (("sha256", hashlib.sha256(b"new").hexdigest()),)


@pytest.mark.parametrize(
    ("second", "left"),
    [
        ({"a/.wh.x": b""}, {"/a/y"}),
        ({".wh.a": b""}, set()),
        ({"a/.wh..wh..opq": b"", "a/z": b"z"}, {"/a/z"}),
        ({"a/z": b"z", "a/.wh..wh..opq": b""}, {"/a/z"}),
        ({"a": b"a file now"}, {"/a"}),
        ({"a": Member(kind=FOLDER)}, {"/a/x", "/a/y"}),
    ],
)
def test_a_later_layer_removes(tmp_path, second, left):
    tree = read(tmp_path, {"a/x": b"x", "a/y": b"y"}, second)
    assert {name for name, entry in tree.entries.items() if entry.kind == "file"} == left
    assert set(tree.bodies) == left


def test_a_hard_link_is_the_file_that_it_names(tmp_path):
    tree = read(tmp_path, {"x": Member(body=b"same", mode=0o4755)}, {"y": Member(kind=HARD, target="x")})
    assert tree.bodies["/y"] == b"same"
    assert tree.entries["/y"].privileged
    assert tree.entries["/y"].layer == 1


def test_a_capability_counts_as_setuid(tmp_path):
    member = Member(body=b"x", headers={filesystem.CAPABILITY: "cap_setuid"})
    assert read(tmp_path, {"x": member}).entries["/x"].privileged


def damaged_header() -> bytes:
    """A tar whose second header has a wrong sum: Python ends there, and others may read on."""
    body = bytearray(layered.tar_of({"a": b"", "b": b"", "c": b""}))
    body[512 + 148] ^= 1
    return bytes(body)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        ({"a/../../x": b""}, "leads out"),
        ({"x": b"", ".wh.x": b""}, "has and removes"),
        ({"x": Member(kind=HARD, target="y")}, "not there"),
        ({"a": "b", "b": "a", "a/x": b""}, "too many links"),
        (damaged_header(), "damaged header"),
        (layered.tar_of({"x": b"12345678" * 200})[:1000], "unexpected end"),
    ],
)
def test_a_layer_of_two_meanings_is_refused(tmp_path, layer, reason):
    with pytest.raises(RegistryError, match="cannot be read") as caught:
        read(tmp_path, layer)
    assert reason in str(caught.value)


def test_a_changed_blob_is_refused(tmp_path):
    digest = layered.make(tmp_path, {"a": b"x" * 5000})
    blob = max(tmp_path.glob("blobs/sha256/*"), key=lambda path: path.stat().st_size)
    blob.write_bytes(blob.read_bytes().replace(b"xxxx", b"yyyy"))
    with pytest.raises(IntegrityError):
        filesystem.read(tmp_path, digest, lambda _path: ALL)


def test_a_damaged_compressed_layer_is_refused(tmp_path):
    body = layered.pack(layered.tar_of({"a": bytes(range(256)) * 50}), "gzip")
    with pytest.raises(RegistryError):
        read(tmp_path, body[:-40])


NAMES = st.sampled_from(["a", "b", "a/b", "a/c", "b/a", "b/c/a"])
MEMBERS = st.one_of(
    st.binary(max_size=3), st.just(Member(kind=FOLDER)), st.sampled_from([Member(kind=LINK, target="a")])
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layers=st.lists(st.dictionaries(NAMES, MEMBERS, max_size=4), min_size=1, max_size=3))
def test_every_path_lies_in_folders_alone(tmp_path_factory, layers):
    """Whatever layers write, no file is below a file or a link, and each path is its own real path."""
    try:
        tree = read(tmp_path_factory.mktemp("image"), *layers)
    except RegistryError:
        return
    for path in tree.entries:
        assert tree.real(path, last=False) == path
        parents = [path[:end] for end, letter in enumerate(path) if letter == "/" and end]
        assert all(tree.entries[parent].kind == "folder" for parent in parents)
    assert set(tree.bodies) == {name for name, entry in tree.entries.items() if entry.kind == "file"}
