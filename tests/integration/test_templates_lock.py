"""`stackcheck lock` against a real registry: digests of bases, and a build that starts from one."""

import dataclasses
import json
import uuid
from pathlib import Path

import pytest

from small_images import make_image, quiet
from stackcheck.engine import buildx, host_setup
from stackcheck.matrix import resolve
from stackcheck.matrix.stack import Base, Stack
from stackcheck.oci.layout import OciLayout
from stackcheck.oci.stores import open_store
from stackcheck.recipe import lock, render

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
CPU = resolve.load_stacks(ROOT, ("cpu-*",))[0]


def push(folder: Path, name: str, content: bytes) -> str:
    """Put a small image under a name and tag; its digest."""
    image = make_image(folder, content)
    layout = OciLayout(folder)
    target, _, tag = name.rpartition(":")
    store = open_store(target)
    manifest = layout.read_manifest(image.manifest_digest)
    with store.writing(quiet):
        for kind in ("config", "layers"):
            for blob in manifest.descriptors(kind):
                store.write_blob(blob, lambda digest=blob.digest: layout.read_blob(digest))
        store.write_manifest(manifest, tag)
    return image.manifest_digest


def on(reference: str, digest: str | None = None) -> Stack:
    """The stack `cpu` on a base of a registry."""
    base = Base(kind="registry", reference=reference, digest=digest)
    return dataclasses.replace(
        CPU, id="on-a-registry", base=base, requirements=("iniconfig==2.3.1",), torch=None
    )


def test_a_base_is_pinned_by_the_digest_that_its_registry_tells_and_again_when_the_tag_moves(
    tmp_path, registry
):
    name = f"{registry}/bases/{uuid.uuid4().hex}:1"
    first = push(tmp_path / "first", name, b"first")
    (tmp_path / "on-a-registry").mkdir()
    assert lock.lock(on(name), tmp_path).missing == ()
    pins = json.loads((tmp_path / "on-a-registry" / "pins.json").read_text())
    assert pins["bases"] == {name: first}
    assert f"FROM {name}@{first} AS base" in render.render(on(name, first), ROOT / "images")["Dockerfile"]
    second = push(tmp_path / "second", name, b"second")
    assert second != first
    lock.lock(on(name, first), tmp_path)
    assert json.loads((tmp_path / "on-a-registry" / "pins.json").read_text())["bases"] == {name: second}


def test_the_builder_takes_the_pinned_base_also_when_the_tag_has_moved(tmp_path, registry):
    host_setup.ensure_engine(quiet)
    name = f"{registry}/bases/{uuid.uuid4().hex}:1"
    first = push(tmp_path / "first", name, b"first")
    push(tmp_path / "second", name, b"second")
    folder = tmp_path / "context"
    folder.mkdir()
    (folder / "Dockerfile").write_text(f"FROM {name}@{first}\n")
    out = tmp_path / "out"
    target = {"context": str(folder), "output": [f"type=local,dest={out}"]}
    buildx.bake({"target": {"pinned": target}}, ["pinned"], report=quiet)
    assert (out / "etc" / "content").read_bytes() == b"first"
