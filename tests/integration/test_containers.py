"""Containers of a real daemon have the rights, mounts and time that they were given, and no more."""

import dataclasses
import signal
import subprocess
import uuid
from collections.abc import Callable

import pytest

import shell_image
from stackcheck.engine import image_files, output
from stackcheck.engine.client import Engine, Mount, RunSpec
from stackcheck.errors import ChecksFailedError, EngineError
from stackcheck.imaging import build

pytestmark = pytest.mark.integration


def run(engine: Engine, image: build.Image, script: str, **options: object) -> tuple[int, list[str]]:
    lines: list[str] = []
    spec = RunSpec(image=image.reference, command=("/bin/bash", "-c", script), on_line=lines.append)
    code = engine.run(dataclasses.replace(spec, **options))
    return code, lines


def test_a_container_has_no_rights_by_default(engine, small_image):
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


def test_mounts_environment_and_user_are_what_was_asked_for(engine, small_image, tmp_path):
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


def test_a_container_cannot_take_all_processes_memory_or_disk_of_the_host(engine, small_image):
    info = engine._info
    script = (
        "cat /sys/fs/cgroup/pids.max /sys/fs/cgroup/pids/pids.max 2>/dev/null;"
        "cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null;"
        "df -B1 --output=size /tmp | tail -1"
    )
    code, lines = run(engine, small_image, script, pids=512)
    assert code == 0, lines
    assert info["PidsLimit"], "this daemon limits no processes: the test says nothing"
    assert info["MemoryLimit"], "this daemon limits no memory: the test says nothing"
    pids, memory, tmpfs = map(int, lines)
    assert pids == 512
    assert memory < info["MemTotal"]
    assert tmpfs <= info["MemTotal"] // 2 + 4096


def test_more_processes_than_allowed_do_not_start(engine, small_image):
    code, lines = run(engine, small_image, "for i in {1..64}; do sleep 20 & done; echo never", pids=32)
    assert code != 0 or "never" not in lines, lines
    assert any("fork" in line for line in lines), lines


def test_what_a_container_writes_into_its_output_folder_has_a_quota(engine, small_image, tmp_path):
    (tmp_path / "out").mkdir(mode=0o777)
    (tmp_path / "out").chmod(0o777)
    mounts = (Mount(source=tmp_path / "out", target="/out", read_only=False),)
    filling = "printf '%3000000s' x > /out/a; sleep 3600"
    with pytest.raises(ChecksFailedError, match="wrote too much") as caught:
        run(engine, small_image, filling, mounts=mounts, quota_bytes=1_000_000)
    assert str(tmp_path / "out") in str(caught.value)
    assert containers_of(small_image) == []


@pytest.mark.parametrize("script", ["while :; do echo y; done", "while :; do printf '%100000s' x; done"])
def test_a_container_that_prints_without_an_end_is_killed_and_leaves_no_log(
    engine, small_image, monkeypatch, script
):
    monkeypatch.setattr(output, "OUTPUT_BYTES", 3_000_000)
    with pytest.raises(ChecksFailedError, match="printed too much"):
        run(engine, small_image, script)
    assert containers_of(small_image) == []


def test_the_volumes_of_an_image_are_read_only_and_gone_afterwards(engine, tmp_path):
    reference = f"stackcheck-test/volumes:{uuid.uuid4().hex[:12]}"
    settings = {"Volumes": {"/data": {}}}
    files = {"/data/kept": b"of the image"}
    shell_image.make_layout(tmp_path / "oci", programs=("bash", "cat"), files=files, settings=settings)
    engine.load(tmp_path / "oci", reference)
    before = unused_volumes()
    lines: list[str] = []
    command = ("bash", "-c", "cat /data/kept; echo; { echo x > /data/written; } 2>&- || echo refused")
    try:
        code = engine.run(RunSpec(image=reference, command=command, on_line=lines.append))
    finally:
        engine.remove(reference)
    assert (code, lines) == (0, ["of the image", "refused"])
    assert unused_volumes() - before == set()


def unused_volumes() -> set[str]:
    """The volumes that no container has; other containers may run beside this test."""
    command = ["docker", "volume", "ls", "--quiet", "--filter", "dangling=true"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_output_streams_while_the_container_runs(engine, small_image, tmp_path):
    """The container ends only because its first line is read before its end."""
    (tmp_path / "out").mkdir()
    code, _ = run(
        engine,
        small_image,
        "echo early; until [ -e /out/read ]; do sleep 0.1; done; exit 7",
        mounts=(Mount(source=tmp_path / "out", target="/out"),),
        on_line=lambda _line: (tmp_path / "out" / "read").touch(),
        timeout_s=500,
    )
    assert code == 7


def test_a_container_over_its_time_is_killed_and_removed(engine, small_image):
    with pytest.raises(ChecksFailedError, match="did not end in time"):
        run(engine, small_image, "trap '' TERM; sleep 3600 & wait", timeout_s=2)
    assert containers_of(small_image) == []


@pytest.mark.usefixtures("heard_signals")
def test_a_run_that_is_interrupted_again_while_it_ends_leaves_no_container(engine, small_image, monkeypatch):
    came: list[str] = []
    api = engine._client.api
    create, remove = api.create_container_from_config, api.remove_container

    def interrupted(request: Callable[..., object]) -> Callable[..., object]:
        def send(*given: object, **more: object) -> object:
            came.append(request.__name__)
            signal.raise_signal(signal.SIGINT)
            return request(*given, **more)

        return send

    monkeypatch.setattr(api, "remove_container", interrupted(remove))
    with pytest.raises(KeyboardInterrupt):
        run(
            engine,
            small_image,
            "echo hello; sleep 3600",
            on_line=lambda _: signal.raise_signal(signal.SIGINT),
        )
    monkeypatch.setattr(api, "create_container_from_config", interrupted(create))
    with pytest.raises(KeyboardInterrupt):
        run(engine, small_image, "echo hello; sleep 3600")
    assert came == ["remove_container", "create_container_from_config", "remove_container"]
    assert containers_of(small_image) == []


def containers_of(image: build.Image) -> list[str]:
    command = ["docker", "ps", "--all", "--quiet", "--filter", f"ancestor={image.reference}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_files_of_an_image_are_read_without_running_it(engine, small_image, monkeypatch):
    before = containers_of(small_image)
    with engine.files(small_image.reference) as files:
        folder, link = files.entry("/etc"), files.entry("/bin/sh")
        assert folder
        assert folder.is_folder
        assert link
        assert link.target
        program = files.entry(link.target)
        assert program
        assert (program.target, program.is_folder, program.executable) == ("", False, True)
        body = files.read("/bin/sh")
        assert body == files.read(link.target)
        assert body
        assert body.startswith(b"\x7fELF")
        assert "made-in-the-build" in dict(files.folder("/etc"))
        for path in ("/nowhere", f"{link.target}/below-a-file", "/etc/made-in-the-build/x"):
            assert files.entry(path) is None
            assert files.read(path) is None
            assert list(files.folder(path)) == []
        assert files.read("/etc") is None
        monkeypatch.setattr(image_files, "LONGEST_BYTES", len(body) - 1)
        with pytest.raises(EngineError, match="too large"):
            files.read("/bin/sh")
    assert containers_of(small_image) == before


def test_an_image_that_is_not_there_is_named(engine):
    with pytest.raises(EngineError) as caught:
        engine.run(RunSpec(image="stackcheck/none:none", command=("true",)))
    assert caught.value.exit_code == 4
    assert "stackcheck/none" in str(caught.value)
    with pytest.raises(EngineError, match="no such image"), engine.files("stackcheck/none:none"):
        pass
