import os
from collections.abc import Callable
from pathlib import Path

import pytest

from stackcheck.engine import buildx
from stackcheck.engine.buildx import BuildLog
from stackcheck.errors import BuildError

FAILED = Path(__file__).parents[1] / "assets" / "buildlog" / "failed.txt"


def read(path: Path) -> tuple[BuildLog, list[str]]:
    lines: list[str] = []
    log = BuildLog(lines.append)
    for line in path.read_text().splitlines():
        log.feed(line + "\n")
    return log, lines


def test_progress_is_one_short_line_a_step():
    _, lines = read(FAILED)
    assert lines == [
        "[base 1/2] ADD rootfs.tar /",
        "[wheels 1/2] RUN pip install --require-hashes -r requirements.lock",
    ]


SEVERAL = """\
#2 [stage-base-0123 internal] load build definition from Dockerfile
#3 [stage-wheels-4567 context wheelhouse] load from client
#3 DONE 1.0s
#14 [stage-wheels-4567 base 1/2] ADD rootfs.tar /
#14 CACHED
#15 [stage-base-0123 base 2/2] RUN date
#15 ...
#14 [image-89 base 1/2] ADD rootfs.tar /
#14 CACHED
#15 [image-89 base 2/2] RUN date
#15 DONE 0.3s
#16 [image-89 final 1/1] COPY stack.json /opt/
#16 DONE 0.1s
#17 [image-89] exporting to oci image format
"""


def test_with_several_targets_each_step_counts_once_for_its_stage():
    lines: list[str] = []
    log = BuildLog(lines.append)
    for line in SEVERAL.splitlines():
        log.feed(line)
    assert log.stages() == {
        ("stage-wheels-4567", "base"): (0, 1),
        ("stage-base-0123", "base"): (1, 0),
        ("image-89", "final"): (1, 0),
    }
    assert lines == [
        "[base 1/2] ADD rootfs.tar /",
        "[base 2/2] RUN date",
        "[final 1/1] COPY stack.json /opt/",
    ]


def test_the_steps_of_a_lone_stage_are_reported_and_counted_too():
    lines: list[str] = []
    log = BuildLog(lines.append)
    for line in ("#5 [1/2] ADD rootfs.tar /", "#5 CACHED", "#6 [2/2] RUN date", "#6 0.1 ERROR"):
        log.feed(line)
    assert lines == ["[1/2] ADD rootfs.tar /", "[2/2] RUN date"]
    assert log.stages() == {("", ""): (1, 1)}


def test_the_step_that_failed_first_is_the_failure():
    log = BuildLog(lambda _line: None)
    for line in (
        "#5 [stage-a-1 a 1/1] RUN false",
        "#5 0.1 no such thing",
        "#5 ERROR: exit code: 1",
        "#6 [image-2 final 1/1] COPY --from=a / /",
        "#6 ERROR: a failed before",
    ):
        log.feed(line)
    assert (log.failure().stage, log.failure().last_lines) == ("a 1/1", ("no such thing",))


def test_a_failure_knows_its_stage_line_and_last_words():
    log, _ = read(FAILED)
    failure = log.failure()
    assert (failure.stage, failure.file, failure.line) == ("wheels 1/2", "Dockerfile", 38)
    assert failure.last_lines[-1].endswith("requirement torch==9.9.9")
    assert failure.message.startswith("failed to solve")


def test_a_full_disk_is_called_that(monkeypatch):
    monkeypatch.setattr(buildx.host_setup, "socket_answers", lambda: True)
    log = BuildLog(lambda _line: None)
    log.feed("ERROR: failed to solve: write /var/lib/docker/x: no space left on device\n")
    error = buildx._error(log, None, None)
    assert error.what == "the disk is full"
    assert "docker builder prune" in str(error)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("failed to resolve source metadata for registry.example.org/a", "registry cannot be reached"),
        ("E: Failed to fetch http://mirror.example.org/x", "distribution's archive"),
        ("ERROR: No matching distribution found for torch==2.13.0", "package indexes"),
    ],
)
def test_what_cannot_be_reached_is_named_with_what_to_configure(monkeypatch, said, meant):
    monkeypatch.setattr(buildx.host_setup, "socket_answers", lambda: True)
    log = BuildLog(lambda _line: None)
    log.feed(f"ERROR: {said}\n")
    error = buildx._error(log, None, None)
    assert error.exit_code == 5
    assert meant in error.what
    assert error.next_step


def test_a_daemon_that_went_away_is_an_engine_error(monkeypatch):
    monkeypatch.setattr(buildx.host_setup, "socket_answers", lambda: False)
    log, _ = read(FAILED)
    assert buildx._error(log, None, None).exit_code == 4


def test_a_build_without_end_is_called_that():
    log, _ = read(FAILED)
    assert "at most 5 s" in str(buildx._error(log, None, 5.0))


STEP = "#4 [wheels 1/1] RUN pip download torch\n"
TOO_LATE = "ERROR: target image-1: failed to solve: DeadlineExceeded: context deadline exceeded\n"
EXPORT = "#5 exporting to client directory\n#5 DONE 4.3s\n"
FIRST_RUN = f"{STEP}#4 0.9 saved torch\n#4 DONE 0.9s\n{EXPORT}{TOO_LATE}"
OWN = ("load build context", "load build definition from Dockerfile", "load .dockerignore")
FROM_CACHE = f"{STEP}#4 CACHED\n{EXPORT}"


@pytest.fixture
def builder(tmp_path, monkeypatch) -> Callable[..., Path]:
    """A docker client whose n-th run prints the n-th text, and fails where there is an error in it."""

    def say(*texts: str) -> Path:
        for number, text in enumerate(texts):
            (tmp_path / f"said-{number}").write_text(text)
        program = tmp_path / "docker"
        program.write_text(
            f"#!/bin/sh\ncd {tmp_path}\ncat > definition\nn=$(ls | grep -c ran)\ntouch ran-$n\ncat said-$n\n"
            "! grep -q ERROR said-$n\n"
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        monkeypatch.setattr(buildx.host_setup, "socket_answers", lambda: True)
        return tmp_path

    return say


@pytest.mark.parametrize("step", ["", *OWN])
def test_a_build_that_only_the_builders_own_time_limit_ended_runs_again(builder, step):
    failed = f"#6 [image-1 internal] {step}\n#6 ERROR: context deadline exceeded\n" if step else ""
    first = FIRST_RUN.replace(TOO_LATE, failed + TOO_LATE)
    folder = builder(first, FROM_CACHE)
    lines: list[str] = []
    done = buildx.bake({}, ["image-1"], report=lines.append, log=folder / "build.log")
    assert (done.steps, done.cached, done.stages) == (1, 0, {("", "wheels"): (1, 0)})
    assert sum("too busy" in line for line in lines) == 1
    assert (folder / "build.log").read_text() == first + FROM_CACHE


def test_a_builder_that_stays_too_busy_fails_after_three_runs(builder):
    folder = builder(*[FIRST_RUN] * 4)
    with pytest.raises(BuildError, match="too busy") as caught:
        buildx.bake({}, ["image-1"], report=str)
    assert caught.value.next_step
    assert len(list(folder.glob("ran-*"))) == 3


@pytest.mark.parametrize(
    "said",
    [
        f"{STEP}#4 ERROR: process did not complete successfully: exit code: 1\n{TOO_LATE}",
        "ERROR: failed to solve: DeadlineExceeded: python: failed to do request: context deadline exceeded\n",
    ],
    ids=["a step failed", "a registry was too slow"],
)
def test_what_failed_for_another_reason_runs_once(builder, said):
    folder = builder(said, FROM_CACHE)
    with pytest.raises(BuildError) as caught:
        buildx.bake({}, ["image-1"], report=str)
    assert "too busy" not in str(caught.value)
    assert len(list(folder.glob("ran-*"))) == 1


def test_a_newer_buildx_may_read_secrets_and_write_layouts_outside_of_its_folder(tmp_path, monkeypatch):
    """As buildx 0.20 and newer: it refuses both, unless its check is switched off."""
    docker = tmp_path / "docker"
    docker.write_text('#!/bin/sh\ncat > /dev/null\n[ "$BUILDX_BAKE_ENTITLEMENTS_FS" = 0 ]\n')
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert buildx.bake({}, ["image"], report=print).steps == 0
