from __future__ import annotations

from pathlib import Path

import pytest

from stackcheck.engine import buildx
from stackcheck.engine.buildx import BuildLog

FAILED = Path(__file__).parents[1] / "assets" / "buildlog" / "failed.txt"


def read(path: Path) -> tuple[BuildLog, list[str]]:
    lines: list[str] = []
    log = BuildLog(lines.append)
    for line in path.read_text().splitlines():
        log.feed(line + "\n")
    return log, lines


def test_progress_is_one_short_line_a_step() -> None:
    _, lines = read(FAILED)
    assert lines == [
        "[base 1/2] ADD rootfs.tar /",
        "[wheels 1/2] RUN pip install --require-hashes -r requirements.lock",
    ]


def test_cached_steps_are_counted() -> None:
    log, _ = read(FAILED)
    assert (len(log.steps), len(log.cached & log.steps)) == (2, 1)


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


def test_with_several_targets_each_step_counts_once_for_its_stage() -> None:
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


def test_the_steps_of_a_lone_stage_are_reported_and_counted_too() -> None:
    lines: list[str] = []
    log = BuildLog(lines.append)
    for line in ("#5 [1/2] ADD rootfs.tar /", "#5 CACHED", "#6 [2/2] RUN date", "#6 0.1 ERROR"):
        log.feed(line)
    assert lines == ["[1/2] ADD rootfs.tar /", "[2/2] RUN date"]
    assert log.stages() == {("", ""): (1, 1)}


def test_the_step_that_failed_first_is_the_failure() -> None:
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


def test_a_failure_knows_its_stage_line_and_last_words() -> None:
    log, _ = read(FAILED)
    failure = log.failure()
    assert (failure.stage, failure.file, failure.line) == ("wheels 1/2", "Dockerfile", 38)
    assert failure.last_lines[-1].endswith("requirement torch==9.9.9")
    assert failure.message.startswith("failed to solve")


def test_an_error_before_any_step_is_not_lost() -> None:
    log = BuildLog(lambda _line: None)
    log.feed("ERROR: failed to find target image-1\n")
    assert log.failure().message == "failed to find target image-1"
    assert log.failure().stage is None


def test_a_full_disk_is_called_that(monkeypatch) -> None:
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
def test_what_cannot_be_reached_is_named_with_what_to_configure(
    monkeypatch: pytest.MonkeyPatch, said: str, meant: str
) -> None:
    monkeypatch.setattr(buildx.host_setup, "socket_answers", lambda: True)
    log = BuildLog(lambda _line: None)
    log.feed(f"ERROR: {said}\n")
    error = buildx._error(log, None, None)
    assert error.exit_code == 5
    assert meant in error.what
    assert error.next_step


def test_a_daemon_that_went_away_is_an_engine_error(monkeypatch) -> None:
    monkeypatch.setattr(buildx.host_setup, "socket_answers", lambda: False)
    log, _ = read(FAILED)
    assert buildx._error(log, None, None).exit_code == 4


def test_a_build_without_end_is_called_that() -> None:
    log, _ = read(FAILED)
    assert "at most 5 s" in str(buildx._error(log, None, 5.0))
