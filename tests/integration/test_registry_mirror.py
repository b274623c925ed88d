"""A pull-through cache between nodes and a registry: real registries, real clients, counted bytes."""

import os
import subprocess
import time
from pathlib import Path

import pytest

import loopback
import referrers_proxy
import registry_process
from small_images import make_image, quiet
from stackcheck.oci.distribution import Repository
from stackcheck.oci.layout import OciLayout

pytestmark = pytest.mark.integration
NODES = 4
SIZE = 8 << 20


class Counting(referrers_proxy.Handler):
    """What passes by, in bytes of bodies."""

    sent: list[int]

    def reply(self, status: int, headers: dict[str, str], body: bytes, length: str | int) -> None:
        self.sent.append(len(body) if self.command != "HEAD" else 0)
        super().reply(status, headers, body, length)


def uploaded(folder: Path, host: str) -> tuple[str, int]:
    """An image in a registry: its digest, and the bytes of its blobs."""
    image = make_image(folder, content=os.urandom(SIZE))
    layout, target = OciLayout(folder), Repository(host, "team/stacks")
    manifest = layout.read_manifest(image.manifest_digest)
    found = (*manifest.descriptors("config"), *manifest.descriptors("layers"))
    with target.writing(quiet):
        for blob in found:
            target.write_blob(blob, lambda digest=blob.digest: layout.read_blob(digest))
        target.write_manifest(manifest, "one")
    return image.manifest_digest, sum(blob.size for blob in found)


def pulled(host: str, digest: str) -> int:
    """What a node reads; each blob is checked against its digest on the way."""
    source = Repository(host, "team/stacks")
    manifest = source.read_manifest(digest)
    blobs = (*manifest.descriptors("config"), *manifest.descriptors("layers"))
    return sum(len(chunk) for blob in blobs for chunk in source.read_blob(blob.digest))


def arrive(folder: Path, size: int) -> None:
    """Wait until the mirror has its own copy of every blob."""
    end = time.monotonic() + 60
    while sum(file.stat().st_size for file in folder.rglob("blobs/**/data")) < size:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_mirror_asks_the_registry_once_for_all_nodes(registry_program, tmp_path):
    with registry_process.running(registry_program, tmp_path / "upstream") as port:
        digest, size = uploaded(tmp_path / "layout", f"127.0.0.1:{port}")
        sent: list[int] = []
        with loopback.serving(Counting, upstream=f"127.0.0.1:{port}", listed={}, sent=sent) as counted:
            assert [pulled(counted, digest) for _ in range(NODES)] == [size] * NODES
            direct = sum(sent)
            sent.clear()
            settings = {"proxy": {"remoteurl": f"http://{counted}"}}
            with registry_process.running(registry_program, tmp_path / "mirror", settings=settings) as mirror:
                here = f"127.0.0.1:{mirror}"
                assert pulled(here, digest) == size
                arrive(tmp_path / "mirror" / "data", size)
                warmed = sum(sent)  # the first read goes through, and the registry fetches its copy itself
                assert [pulled(here, digest) for _ in range(NODES)] == [size] * NODES
                name = f"{here}/team/stacks@{digest}"
                subprocess.run(["docker", "pull", "--quiet", name], check=True, capture_output=True)
                subprocess.run(["docker", "rmi", name], check=True, capture_output=True)
                later = sum(sent) - warmed
    assert direct >= NODES * size
    assert warmed < 2.1 * size
    assert later < 0.01 * size, "nothing but small documents, once the mirror has the image"
