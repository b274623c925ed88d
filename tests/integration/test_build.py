"""Builds and containers against a real daemon; a host without one is set up first, as a user's would be."""

from __future__ import annotations

import dataclasses
import io
import subprocess
import tarfile
import threading
import time
from typing import TYPE_CHECKING

import pytest

from second_daemon import second_daemon
from small_stacks import (  # noqa: F401  # fixtures among them
    ROOT,
    base_of_a_shell,
    build_one,
    committed_cpu_stack,
    empty_checkout,
    real_engine,
    silent,
    small_stack,
)
from stackcheck import apt, archive, bootstrap, build, buildplan, export, resolve, wheels
from stackcheck.engine import Engine, Mount, RunSpec
from stackcheck.errors import BuildError, ChecksFailedError, EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def layer_bytes(image: build.Image) -> bytes:
    """Every file and name of every layer, with the manifest and the config; layers must be plain tars."""
    manifest = archive.read_json(image.layout, image.manifest_digest)
    text = [
        archive.blob(image.layout, digest).read_bytes()
        for digest in (image.manifest_digest, image.config_digest)
    ]
    for layer in manifest["layers"]:
        assert layer["mediaType"].endswith(".tar")
        text.append(archive.blob(image.layout, layer["digest"]).read_bytes())
    return b"\n".join(text)


@pytest.fixture
def planted_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[bytes, ...]:
    """A host whose pip configuration, certificates and wheels would be known again anywhere."""
    folder = tmp_path / "planted-folder-of-wheels"
    folder.mkdir()
    (folder / "planted-1.0-py3-none-any.whl").write_bytes(b"planted wheel, 5f1c")
    certificates = tmp_path / "planted-bundle.crt"
    certificates.write_text("planted certificate, serial 77ae\n")
    monkeypatch.setenv("PIP_INDEX_URL", "https://planted-user:planted-token@index.invalid/simple")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CERT", str(certificates))
    archives = [line.encode() for line in wheels.apt_sources("debian12").splitlines()]
    return (b"planted-user", b"planted-token", b"index.invalid", b"planted-folder", b"planted certificate",
            b"planted wheel", b"planted-bundle", *archives)  # fmt: skip


def test_settings_of_the_host_reach_the_build_and_no_layer_keeps_them(
    engine: Engine,
    checkout: Path,
    cpu_stack: resolve.Stack,
    planted_settings: tuple[bytes, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Plain layers can be searched byte by byte; the config names the same unpacked layers either way.
    monkeypatch.setattr(buildplan, "COMPRESSION", "compression=uncompressed,force-compression=true")
    stack = small_stack(checkout, "secrets", cpu_stack, lock="planted==1.0\n")
    image = build_one(stack, engine, checkout)
    everything = layer_bytes(image)
    assert b"opt/stackcheck/stack.json" in everything
    assert [text for text in planted_settings if text in everything] == []
    engine.remove(image.reference)


def test_steps_done_again_give_the_same_image_and_unchanged_inputs_none_at_all(
    engine: Engine, checkout: Path, cpu_stack: resolve.Stack
) -> None:
    stack = small_stack(checkout, "plain", cpu_stack)
    first = build_one(stack, engine, checkout)
    stated = archive.read_json(first.layout, first.manifest_digest)["annotations"]
    assert stated["org.opencontainers.image.title"] == "plain"
    assert stated["org.opencontainers.image.created"].startswith("2026-01-01T")
    assert engine.inspect(first.reference).id in {first.manifest_digest, first.config_digest}
    kept = build_one(stack, engine, checkout)
    assert (kept.reused, kept.manifest_digest) == (True, first.manifest_digest)
    again = build_one(stack, engine, checkout, no_cache=True)
    assert (again.reused, again.manifest_digest) == (False, first.manifest_digest)
    assert build.load_image(checkout / "build" / stack.id / "image.json").config_digest == first.config_digest
    engine.remove(first.reference)
    assert build_one(stack, engine, checkout).reused  # the layout is loaded again
    assert engine.has(first.reference)
    engine.remove(first.reference)


def test_an_image_over_its_budget_is_refused_with_its_layers_and_the_one_that_passes_it(
    engine: Engine, checkout: Path, cpu_stack: resolve.Stack, small_base: Path
) -> None:
    (base,) = small_base.glob("*.tar")
    stack = small_stack(checkout, "heavy", cpu_stack)  # 20 MB on top of the base
    stack = dataclasses.replace(stack, size_budget_bytes=base.stat().st_size + (5 << 20))
    try:
        with pytest.raises(BuildError) as caught:
            build_one(stack, engine, checkout)
        said = caught.value.got or ""
        (marked,) = (line for line in said.splitlines() if "passes the budget" in line)
        assert "20.0 MB" in marked
        assert "/ballast" in marked
        assert caught.value.exit_code == 5
        assert not (checkout / "build" / stack.id / "image.json").exists()
    finally:
        subprocess.run(
            ["sh", "-c", f"docker images --quiet stackcheck/{stack.id} | xargs -r docker rmi --force"],
            check=False,
            capture_output=True,
        )


def test_a_failing_step_is_named_with_its_stage_line_and_last_words(
    engine: Engine, checkout: Path, cpu_stack: resolve.Stack
) -> None:
    stack = small_stack(checkout, "failing", cpu_stack)
    with pytest.raises(BuildError) as caught:
        build_one(stack, engine, checkout)
    assert caught.value.where == "Dockerfile:6, stage wheels 1/1"
    assert "the disk of Babel" in (caught.value.got or "")
    assert not (checkout / "build" / stack.id / "image.json").exists()


@pytest.fixture(scope="module")
def small_image(
    engine: Engine, cpu_stack: resolve.Stack, small_base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[build.Image]:
    folder = tmp_path_factory.mktemp("small-image")
    (folder / "build").mkdir()
    (folder / "build" / "bases").symlink_to(small_base)
    stack = small_stack(folder, "plain", cpu_stack)
    image = build_one(stack, engine, folder)
    yield image
    engine.remove(image.reference)


def run(engine: Engine, image: build.Image, script: str, **options: object) -> tuple[int, list[str]]:
    lines: list[str] = []
    spec = RunSpec(image=image.reference, command=("/bin/bash", "-c", script), on_line=lines.append)
    code = engine.run(dataclasses.replace(spec, **options))
    return code, lines


def test_a_container_has_no_rights_by_default(engine: Engine, small_image: build.Image) -> None:
    script = (
        "id -u; grep CapEff /proc/self/status; grep NoNewPrivs /proc/self/status;"
        "touch /written 2>&1 | grep -o 'Read-only file system'; ls /sys/class/net;"
        "cp /bin/true /tmp/x && /tmp/x && exit 7"
    )
    code, lines = run(engine, small_image, script)
    assert code == 7, lines
    assert lines[0] == "1000"
    assert lines[1].split() == ["CapEff:", "0000000000000000"]
    assert lines[2].split() == ["NoNewPrivs:", "1"]
    assert lines[3:] == ["Read-only file system", "lo"]


def test_mounts_environment_and_user_are_what_was_asked_for(
    engine: Engine, small_image: build.Image, tmp_path: Path
) -> None:
    (tmp_path / "told").write_text("words")
    (tmp_path / "out").mkdir(mode=0o777)
    (tmp_path / "out").chmod(0o777)
    mounts = (
        Mount(source=tmp_path / "told", target="/told"),
        Mount(source=tmp_path / "out", target="/out", read_only=False),
    )
    script = "cat /told > /out/heard; echo $PLANET; id -u; id -G; df -B1 --output=size /dev/shm | tail -1"
    code, lines = run(
        engine,
        small_image,
        script,
        mounts=mounts,
        env={"PLANET": "Mars"},
        user="1234:1234",
        group_add=(44,),
        shm_size_bytes=1 << 27,
    )
    assert code == 0
    assert (tmp_path / "out" / "heard").read_text() == "words"
    assert [line.strip() for line in lines] == ["Mars", "1234", "1234 44", str(1 << 27)]


def test_output_streams_while_the_container_runs(engine: Engine, small_image: build.Image) -> None:
    seen: list[float] = []
    start = time.monotonic()
    run(
        engine,
        small_image,
        "echo early; sleep 2",
        on_line=lambda _line: seen.append(time.monotonic() - start),
    )
    assert time.monotonic() - start - seen[0] > 1.5


def test_a_container_over_its_time_is_killed_and_removed(engine: Engine, small_image: build.Image) -> None:
    start = time.monotonic()
    with pytest.raises(ChecksFailedError, match="did not end in time"):
        run(engine, small_image, "trap '' TERM; sleep 100 & wait", timeout_s=2)
    assert time.monotonic() - start < 20
    assert containers_of(small_image) == []


def test_an_interrupted_run_leaves_no_container(engine: Engine, small_image: build.Image) -> None:
    def interrupt(_line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(engine, small_image, "echo hello; sleep 100", on_line=interrupt)
    assert containers_of(small_image) == []


def containers_of(image: build.Image) -> list[str]:
    command = ["docker", "ps", "--all", "--quiet", "--filter", f"ancestor={image.reference}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_an_image_that_is_not_there_is_named(engine: Engine) -> None:
    with pytest.raises(EngineError) as caught:
        engine.run(RunSpec(image="stackcheck/none:none", command=("true",)))
    assert caught.value.exit_code == 4
    assert "stackcheck/none" in str(caught.value)


def test_an_exported_image_loads_with_plain_docker(
    engine: Engine, small_image: build.Image, tmp_path: Path
) -> None:
    export.export(small_image.layout, small_image.reference, tmp_path / "image.tar")
    with tarfile.open(tmp_path / "image.tar") as tar:
        assert {"oci-layout", "index.json", "manifest.json"} <= set(tar.getnames())
    before = engine.inspect(small_image.reference).id
    engine.remove(small_image.reference)
    subprocess.run(
        ["docker", "load", "--input", str(tmp_path / "image.tar")], check=True, capture_output=True
    )
    assert engine.inspect(small_image.reference).id == before


def test_any_image_of_the_engine_can_be_adopted(
    engine: Engine, small_image: build.Image, tmp_path: Path
) -> None:
    adopted = build.adopt(small_image.reference, engine, folder=tmp_path, report=silent)
    assert adopted.stack_id is None
    assert adopted.config_digest == small_image.config_digest
    assert adopted.manifest_digest == small_image.manifest_digest


def test_a_base_made_again_has_the_same_bytes_and_nothing_of_the_host(
    engine: Engine,  # noqa: ARG001  # its set-up has made the host ready
    cpu_stack: resolve.Stack,
    tmp_path: Path,
) -> None:
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
    classic_daemon: subprocess.Popen[bytes], checkout: Path, cpu_stack: resolve.Stack
) -> None:
    engine = Engine.connect()
    assert not engine.containerd_store
    lines: list[str] = []
    stack = small_stack(checkout, "plain", cpu_stack)
    (image,) = build.build((stack,), engine, root=checkout, report=lines.append)
    assert any("classic image store" in line for line in lines)
    assert engine.inspect(image.reference).id == image.config_digest
    slow = small_stack(checkout, "slow", dataclasses.replace(cpu_stack, id="slow"))
    seen = threading.Event()

    def stop_when_sleeping() -> None:
        assert seen.wait(60)
        time.sleep(1)
        classic_daemon.terminate()

    stopper = threading.Thread(target=stop_when_sleeping)
    stopper.start()
    with pytest.raises((EngineError, BuildError)) as caught:
        build.build((slow,), engine, root=checkout, report=lambda line: seen.set() if "RUN" in line else None)
    stopper.join()
    assert "engine stopped in the middle of a build" in str(caught.value)
    assert caught.value.exit_code == 4
    assert not list((checkout / "build" / slow.id).glob("oci*"))[1:]
