"""The program that the engine starts on each node; only the container engine is fake."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import small_fleet
from small_checkout import CPU_STACK, FakeEngine, call
from stackcheck.errors import ConfigurationError
from stackcheck.fleet import node, run, stored
from stackcheck.fleet.engines import JobState
from stackcheck.fleet.follow import Followed
from stackcheck.fleet.job import Job, NodeState, read_state
from stackcheck.history.history import History
from stackcheck.oci.documents import sha256
from stackcheck.suite.subject import Subject

pytestmark = pytest.mark.usefixtures("own_home", "no_disk_flushes", "same_signals")


@pytest.fixture
def same_signals() -> Iterator[None]:
    """A node handles signals its own way, for the rest of its life."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def planned(small_checkout: Path, fake_engine: FakeEngine, monkeypatch, capsys) -> tuple[Job, Subject]:
    """A job of one node, which is rank 0 of a Slurm step."""
    assert call(capsys, "build", CPU_STACK).code == 0
    monkeypatch.setattr(node, "connect", lambda _job: fake_engine)
    step = {"SLURM_NODEID": "0", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "gpu7", "SLURMD_NODENAME": "gpu7"}
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    return small_fleet.make_job(small_checkout, 1)


def state_of(job: Job, attempt: int = 0) -> NodeState:
    found = read_state(job.attempt(attempt) / "0")
    assert found is not None
    return found


def test_a_healthy_node_leaves_what_the_judge_accepts(planned, fake_engine, monkeypatch):
    job, subject = planned
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    fake_engine.names.clear()  # this node has no image yet
    assert node.main([str(job.folder)]) == 0
    handed = sha256((job.attempt(2) / "0" / "result.json").read_bytes())
    assert state_of(job, 2) == NodeState(rank=0, node="gpu7", state="ended", result=handed)
    assert job.reference in fake_engine.names, "it was loaded from the checkout"
    followed = Followed(
        state=JobState(phase="ended", word="COMPLETED", attempt=2), nodes={0: state_of(job, 2)}
    )
    done = run.judged(job, "1", subject, followed, history=None)
    assert [(each.name, each.status) for each in done.nodes] == [("gpu7", "PASSED")], done.nodes[0].reasons
    words = (job.attempt(2) / "0" / "progress.log").read_text()
    assert f"image verified: {job.reference} is {job.config_digest}" in words


def test_an_element_of_an_array_has_the_rank_of_its_task(planned, monkeypatch):
    job, _ = small_fleet.make_job(planned[0].checkout, 9, array=True)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "8")
    assert node.main([str(job.folder)]) == 0
    told = read_state(job.attempt(0) / "8")
    assert told is not None
    assert (told.rank, told.state) == (8, "ended")


@pytest.mark.parametrize("kind", ["memory://results", "file://{}/store"])
def test_a_node_stores_its_result_where_the_job_says_and_the_judge_reads_it_there(planned, tmp_path, kind):
    url = kind.format(tmp_path)
    job, subject = small_fleet.make_job(planned[0].checkout, 1, results=url)
    assert node.main([str(job.folder)]) == 0
    folder = job.attempt(0) / "0"
    left = sorted(path.name for path in folder.iterdir())
    assert left == ["progress.log", "state.json"], "small files alone are on the shared disk"
    followed = Followed(state=JobState(phase="ended", word="COMPLETED"), nodes={0: state_of(job)})
    history = History(f"{url}-kept", f"sqlite:///{tmp_path / 'index.sqlite'}")
    done = run.judged(job, "1", subject, followed, history=history)
    assert [each.status for each in done.nodes] == ["PASSED"], done.nodes[0].reasons
    assert [each.status for each in run.again(job.checkout, job.id, None).nodes] == ["PASSED"]
    files, root = fsspec.url_to_fs(f"{url}/{job.id}/attempt-0/0")
    assert {"host.json", "result.json", "run.json"} <= {
        path.rpartition("/")[2] for path in files.ls(root, detail=False)
    }
    files.pipe_file(f"{root}/result.json", files.cat_file(f"{root}/result.json") + b" ")
    (node_found,) = run.judged(job, "1", subject, followed, history=None).nodes
    assert node_found.status == "FAILED"
    assert "not the one that the node's own program read" in node_found.reasons[0]
    files.rm(f"{root}/result.json")
    (node_found,) = run.judged(job, "1", subject, followed, history=None).nodes
    assert node_found.status == "FAILED"
    assert "the result file cannot be read" in node_found.reasons[0]
    assert f"{url}/{job.id}/attempt-0/0/result.json" in node_found.reasons[0]


def test_what_no_store_takes_is_no_verdict(planned, tmp_path, monkeypatch):
    (tmp_path / "store").write_text("a file where the folder should be")
    job, subject = small_fleet.make_job(planned[0].checkout, 1, results=f"file://{tmp_path}/store")
    assert node.main([str(job.folder)]) != 0
    assert state_of(job).state == "failed"
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", _full)
    job, subject = small_fleet.make_job(planned[0].checkout, 1, results="memory://full")
    assert node.main([str(job.folder)]) != 0
    assert "no space" in str(state_of(job).error)
    followed = Followed(state=JobState(phase="ended", word="COMPLETED"), nodes={0: state_of(job)})
    assert run.judged(job, "1", subject, followed, history=None).status == "FAILED"


def test_a_result_that_was_not_stored_is_said_on_the_node(planned, monkeypatch):
    job, subject = small_fleet.make_job(planned[0].checkout, 1, results="memory://late")
    kept = MemoryFileSystem.pipe_file

    def only_the_host(self: MemoryFileSystem, path: str, *given: Any, **named: Any) -> None:
        (kept if path.endswith("host.json") else _full)(self, path, *given, **named)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", only_the_host)
    assert node.main([str(job.folder)]) == 0
    assert "result.json was not stored" in (job.attempt(0) / "0" / "progress.log").read_text()
    followed = Followed(state=JobState(phase="ended", word="COMPLETED"), nodes={0: state_of(job)})
    assert run.judged(job, "1", subject, followed, history=None).status == "FAILED"


def _full(*_: object, **__: object) -> None:
    raise OSError("no space")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("results", "a URL that fsspec knows"),
        ("nosuch://bucket/x", "nosuch"),
        ("s3://me:word@bucket/x", "a URL with a password"),
        ("gs://bucket", "gcs"),
    ],
)
def test_a_store_that_no_node_could_use_is_refused_before_the_job(url, words):
    with pytest.raises(ConfigurationError, match=words):
        stored.require_store(url)


def test_a_node_with_another_image_or_other_suites_does_not_run_them(planned, fake_engine, monkeypatch):
    job, _ = planned
    with monkeypatch.context() as patch:
        patch.setattr(fake_engine, "load", lambda *_asked: None)
        patch.setitem(fake_engine.ids, job.reference, "sha256:" + "e" * 64)
        assert node.main([str(job.folder)]) == 4
        assert "another image under this name" in str(state_of(job).error)
    (job.checkout / "trainers" / "train.py").write_text("# trains otherwise\n")
    assert node.main([str(job.folder)]) == 6
    assert "the trainers of the checkout changed" in str(state_of(job).error)
    job.model_copy(update={"config_digest": "sha256:" + "f" * 64}).save()
    assert node.main([str(job.folder)]) == 6
    assert "not the one of this job" in str(state_of(job).error)
    assert fake_engine.runs == []


@pytest.mark.parametrize(
    ("happens", "code", "words"),
    [
        (lambda _spec: time.sleep(60), 6, "did not end in time"),
        (lambda _spec: os.kill(os.getpid(), signal.SIGTERM), node.STOPPED, "the engine stopped this node"),
        (lambda _spec: 137, 6, "killed or ended early"),
    ],
    ids=("hangs", "stopped", "killed"),
)
def test_whatever_happens_a_node_says_its_last_word(
    *, happens, code, words, planned, fake_engine, monkeypatch
):
    job, _ = planned
    if code == 6 and "time" in words:
        job.model_copy(update={"limit_s": 3}).save()
    monkeypatch.setattr(fake_engine, "run", happens)
    assert node.main([str(job.folder)]) == code
    found = state_of(job)
    assert (found.state, found.code) == ("stopped" if code == node.STOPPED else "failed", code)
    assert words in str(found.error)


@pytest.mark.parametrize(
    ("text", "strict"),
    [
        (b'{"checks": []}', True),
        (b'{"checks": [], "checks": []}', False),
        (b'{"checks": [NaN]}', False),
        (b'{"checks": [1e999]}', False),
        (b'{"checks": ["\xff"]}', False),
        (b"[" * 100_000, False),
        (b"", False),
    ],
    ids=["strict", "key twice", "NaN", "infinite", "not UTF-8", "deep", "empty"],
)
def test_only_what_is_strict_json_when_it_is_handed_over_is_not_read_again(
    text, strict, planned, monkeypatch
):
    job, _ = planned

    def measured(*_a: object, out: Path, **_k: object) -> None:
        (out / node.RESULT).parent.mkdir(parents=True, exist_ok=True)
        (out / node.RESULT).write_bytes(text)

    monkeypatch.setattr(node, "measure", measured)
    assert node.main([str(job.folder)]) == 0
    assert state_of(job).result == (sha256(text) if strict else None)


def test_a_second_signal_does_not_cut_the_way_out(planned, fake_engine, monkeypatch):
    """Slurm sends SIGTERM twice when the time of a job is over."""
    job, _ = planned
    told: list[Path] = []

    def handed_over(_job: Job, _out: Path, folder: Path, _report: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        told.append(folder)

    monkeypatch.setattr(node, "_hand_over", handed_over)
    monkeypatch.setattr(fake_engine, "run", lambda _spec: os.kill(os.getpid(), signal.SIGTERM))
    assert node.main([str(job.folder)]) == node.STOPPED
    assert told == [job.attempt(0) / "0"]
    assert state_of(job).state == "stopped"
