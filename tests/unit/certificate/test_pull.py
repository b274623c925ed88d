"""The engine gets exactly the verified image, and a command in it sees only what was mounted."""

from pathlib import Path
from typing import Any

import pytest

from small_dist import verified
from small_images import STACK_ID, SmallImage, quiet
from stackcheck.certificate import job, pull
from stackcheck.errors import CertificateError, EngineError
from stackcheck.oci.layout import OciLayout

pytestmark = pytest.mark.usefixtures("no_disk_flushes")


class FakeEngine:
    """The three calls of the engine that a pull needs, over a set of names."""

    def __init__(self, image_id: str) -> None:
        self.image_id = image_id
        self.loaded: list[str] = []
        self.runs: list[Any] = []

    def has(self, reference: str) -> bool:
        return reference in self.loaded

    def inspect(self, reference: str) -> Any:
        assert reference in self.loaded
        return type("Info", (), {"id": self.image_id})

    def load(self, layout: Path, reference: str) -> None:
        assert OciLayout(layout).only_manifest()
        self.loaded.append(reference)

    def run_here(self, spec: Any, *, stop_timeout_s: float) -> int:
        assert stop_timeout_s == 60
        self.runs.append(spec)
        return 3


def test_a_pull_gives_the_engine_exactly_the_verified_image_and_only_once(
    dist: Path, image: SmallImage
) -> None:
    engine: Any = FakeEngine(image.manifest_digest)
    name = pull.pull(verified(dist), engine, report=quiet)
    assert name == f"stackcheck/{STACK_ID}:{image.config_digest[7:19]}"
    assert pull.pull(verified(dist), engine, report=quiet) == name
    assert engine.loaded == [name]


def test_an_engine_that_made_another_image_of_it_is_an_error(dist: Path) -> None:
    engine: Any = FakeEngine("sha256:" + "9" * 64)
    with pytest.raises(EngineError, match="not the one that was verified"):
        pull.pull(verified(dist), engine, report=quiet)


def test_a_change_after_verification_does_not_reach_the_engine(dist: Path, image: SmallImage) -> None:
    found = verified(dist)
    layer = OciLayout(dist).read_manifest(image.manifest_digest).descriptors("layers")[0]
    OciLayout(dist).blob_path(layer.digest).write_bytes(b"x" * layer.size)
    engine: Any = FakeEngine(image.manifest_digest)
    with pytest.raises(CertificateError):
        pull.pull(found, engine, report=quiet)
    assert engine.loaded == []


def test_a_run_sees_the_given_folder_and_nothing_else(tmp_path: Path) -> None:
    from stackcheck.vendors import ContainerNeeds

    engine: Any = FakeEngine("x")
    needs = ContainerNeeds(remark="none", ulimits=(("memlock", -1),), groups=(44,), devices=("/dev/x",))
    code = job.run("x", engine, ("a", "b"), needs=needs, folder=tmp_path)
    spec = engine.runs[0]
    assert code == 3
    assert [(mount.source, mount.target) for mount in spec.mounts] == [(tmp_path, "/workspace")]
    assert (spec.command, spec.workdir, spec.network, spec.read_only) == (
        ("a", "b"),
        "/workspace",
        "none",
        True,
    )
    assert spec.cap_drop == ("ALL",)
    # As in certification: the suites' container is made of the same needs by the same function.
    assert (spec.ulimits, spec.group_add, spec.devices) == ({"memlock": -1}, (44,), ("/dev/x",))
