"""Builds against a real daemon; a host without one is set up first, as a user's would be."""

import dataclasses
import io
import subprocess
import tarfile
import threading
import time
from collections.abc import Iterator

import pytest

from second_daemon import second_daemon
from small_stacks import ROOT, build_one, silent, small_stack
from stackcheck.engine import apt
from stackcheck.engine.client import Engine
from stackcheck.errors import BuildError, EngineError
from stackcheck.imaging import bootstrap, build, plans
from stackcheck.imaging.wheels import host_settings
from stackcheck.oci.image_layout import ImageLayout

pytestmark = pytest.mark.integration


def layer_bytes(image: build.Image) -> bytes:
    """Every file and name of every layer, with the manifest and the config; layers must be plain tars."""
    manifest = ImageLayout(image.layout).json(image.manifest_digest)
    text = [
        ImageLayout(image.layout).blob_path(digest).read_bytes()
        for digest in (image.manifest_digest, image.config_digest)
    ]
    for layer in manifest["layers"]:
        assert layer["mediaType"].endswith(".tar")
        text.append(ImageLayout(image.layout).blob_path(layer["digest"]).read_bytes())
    return b"\n".join(text)


@pytest.fixture
def planted_settings(tmp_path, monkeypatch) -> tuple[bytes, ...]:
    """A host whose pip configuration, certificates and wheels would be known again anywhere."""
    folder = tmp_path / "planted-folder-of-wheels"
    folder.mkdir()
    (folder / "planted-1.0-py3-none-any.whl").write_bytes(b"planted wheel, 5f1c")
    certificates = tmp_path / "planted-bundle.crt"
    certificates.write_text("planted certificate, serial 77ae\n")
    monkeypatch.setenv("PIP_INDEX_URL", "https://planted-user:planted-token@index.invalid/simple")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CERT", str(certificates))
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):  # pip takes these first
        monkeypatch.delenv(name, raising=False)
    archives = [line.encode() for line in host_settings.apt_sources("debian12").splitlines()]
    return (b"planted-user", b"planted-token", b"index.invalid", b"planted-folder", b"planted certificate",
            b"planted wheel", b"planted-bundle", *archives)  # fmt: skip


def test_settings_of_the_host_reach_the_build_and_no_layer_keeps_them(
    engine,  # its set-up has made the host ready
    empty_checkout,
    cpu_stack,
    planted_settings,
    monkeypatch,
):
    # Plain layers can be searched byte by byte; the config names the same unpacked layers either way.
    monkeypatch.setattr(plans, "COMPRESSION", "compression=uncompressed,force-compression=true")
    stack = small_stack(empty_checkout, "secrets", cpu_stack, lock="planted==1.0\n")
    image = build_one(stack, engine, empty_checkout)
    everything = layer_bytes(image)
    assert b"opt/stackcheck/stack.json" in everything
    assert [text for text in planted_settings if text in everything] == []
    engine.remove(image.reference)


def test_steps_done_again_give_the_same_image_and_unchanged_inputs_none_at_all(
    engine, empty_checkout, cpu_stack
):
    stack = small_stack(empty_checkout, "plain", cpu_stack)
    first = build_one(stack, engine, empty_checkout)
    stated = ImageLayout(first.layout).json(first.manifest_digest)["annotations"]
    assert stated["org.opencontainers.image.title"] == "plain"
    assert stated["org.opencontainers.image.created"].startswith("2026-01-01T")
    assert engine.inspect(first.reference).id in {first.manifest_digest, first.config_digest}
    kept = build_one(stack, engine, empty_checkout)
    assert (kept.reused, kept.manifest_digest) == (True, first.manifest_digest)
    again = build_one(stack, engine, empty_checkout, no_cache=True)
    assert (again.reused, again.manifest_digest) == (False, first.manifest_digest)
    assert (
        build.load_image(empty_checkout / "build" / stack.id / "image.json").config_digest
        == first.config_digest
    )
    engine.remove(first.reference)
    assert build_one(stack, engine, empty_checkout).reused  # the layout is loaded again
    assert engine.has(first.reference)
    engine.remove(first.reference)


def test_an_image_over_its_budget_is_refused_with_its_layers_and_the_one_that_passes_it(
    engine, empty_checkout, cpu_stack, small_base
):
    (base,) = small_base.glob("*.tar")
    stack = small_stack(empty_checkout, "heavy", cpu_stack)  # 20 MB on top of the base
    stack = dataclasses.replace(stack, size_budget_bytes=base.stat().st_size + (5 << 20))
    try:
        with pytest.raises(BuildError) as caught:
            build_one(stack, engine, empty_checkout)
        said = caught.value.got or ""
        (marked,) = (line for line in said.splitlines() if "exceeds the budget" in line)
        assert "20.0 MB" in marked
        assert "/ballast" in marked
        assert caught.value.exit_code == 5
        assert not (empty_checkout / "build" / stack.id / "image.json").exists()
    finally:
        subprocess.run(
            ["sh", "-c", f"docker images --quiet stackcheck/{stack.id} | xargs -r docker rmi --force"],
            check=False,
            capture_output=True,
        )


def test_a_failing_step_is_named_with_its_stage_line_and_last_words(engine, empty_checkout, cpu_stack):
    stack = small_stack(empty_checkout, "failing", cpu_stack)
    with pytest.raises(BuildError) as caught:
        build_one(stack, engine, empty_checkout)
    assert caught.value.where == "Dockerfile:6, stage wheels 1/1"
    assert "the disk of Babel" in (caught.value.got or "")
    assert not (empty_checkout / "build" / stack.id / "image.json").exists()


def test_any_image_of_the_engine_can_be_adopted(engine, small_image, tmp_path):
    adopted = build.adopt(small_image.reference, engine, folder=tmp_path, report=silent)
    assert adopted.stack_id is None
    assert adopted.config_digest == small_image.config_digest
    assert adopted.manifest_digest == small_image.manifest_digest


@pytest.mark.slow
def test_a_base_made_again_has_the_same_bytes_and_nothing_of_the_host(
    engine,  # noqa: ARG001  # its set-up has made the host ready
    cpu_stack,
    tmp_path,
):
    assert cpu_stack.base.suite
    packages = cpu_stack.base.packages
    first = bootstrap.bootstrap(cpu_stack.base.suite, packages, ROOT / "build" / "bases", report=silent)
    second = bootstrap.bootstrap(cpu_stack.base.suite, packages, tmp_path / "bases", report=silent)
    assert (second.reused, second.digest) == (False, first.digest)
    data = second.path.read_bytes()
    # The address alone is in the packages' own examples; no line of a source may be there.
    lines = [f"URIs: {uri}" for source in apt.sources() for uri in source.uris]
    lines += [
        f"deb {uri} {suite}" for source in apt.sources() for uri in source.uris for suite in source.suites
    ]
    assert [line for line in lines if line.encode() in data] == []
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert not [name for name in tar.getnames() if name.startswith("./etc/apt/sources.list")][1:]
        latest = max(member.mtime for member in tar.getmembers())
    assert latest <= bootstrap.SOURCE_DATE_EPOCH


@pytest.fixture
def classic_daemon(engine: Engine) -> Iterator[subprocess.Popen[bytes]]:  # noqa: ARG001
    """A second daemon with the classic image store and no network, which a test may stop."""
    with second_daemon(containerd_store=False) as process:
        yield process


def test_the_classic_image_store_is_used_and_said_and_a_stopped_daemon_is_named(
    classic_daemon, empty_checkout, cpu_stack
):
    engine = Engine.connect()
    assert not engine.containerd_store
    lines: list[str] = []
    stack = small_stack(empty_checkout, "plain", cpu_stack)
    (image,) = build.build((stack,), engine, root=empty_checkout, report=lines.append)
    assert any("classic image store" in line for line in lines)
    assert engine.inspect(image.reference).id == image.config_digest
    slow = small_stack(empty_checkout, "slow", dataclasses.replace(cpu_stack, id="slow"))
    seen = threading.Event()

    def stop_when_sleeping() -> None:
        assert seen.wait(300)
        time.sleep(1)
        classic_daemon.terminate()

    stopper = threading.Thread(target=stop_when_sleeping)
    stopper.start()
    with pytest.raises((EngineError, BuildError)) as caught:
        build.build(
            (slow,), engine, root=empty_checkout, report=lambda line: seen.set() if "RUN" in line else None
        )
    stopper.join()
    assert "engine stopped in the middle of a build" in str(caught.value)
    assert caught.value.exit_code == 4
    assert not list((empty_checkout / "build" / slow.id).glob("oci*"))[1:]
