"""Record files: appended once, never rewritten, checked when read; the flow keeps every judged run."""

import gzip
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kept_runs import PASSED, body
from small_checkout import CPU_STACK, answer, call
from stackcheck.errors import FileError
from stackcheck.history import records
from stackcheck.history.history import open_history
from stackcheck.history.records import Records
from stackcheck.history.runs import HistoryError, Query

pytestmark = pytest.mark.usefixtures("own_home", "no_disk_flushes")


def record(number: int = 0) -> bytes:
    return records.record(body(number), PASSED, None, source="test")


@pytest.fixture(params=["folder", "memory"])
def store(request, tmp_path) -> Iterator[Records]:
    """A folder, and an object store that fsspec knows."""
    if request.param == "folder":
        yield Records(str(tmp_path / "records"))
        return
    import fsspec

    made = Records(f"memory://{tmp_path.name}/records")
    yield made
    memory = fsspec.filesystem("memory")
    if memory.exists(f"/{tmp_path.name}"):
        memory.rm(f"/{tmp_path.name}", recursive=True)


def test_a_record_is_read_as_it_was_written(store):
    data = record()
    digest = store.append(data)
    assert digest == "sha256:" + hashlib.sha256(records.packed_record(data)).hexdigest()
    assert store.read(digest) == data
    assert gzip.decompress(records.packed_record(data)) == data
    assert store.head(digest) == records.head_of(data)
    assert list(store) == [digest]
    assert records.result_of(data) == body()


def test_an_empty_store_has_no_records(store):
    assert list(store) == []


def test_the_same_record_is_kept_once(store):
    assert store.append(record()) == store.append(record())
    assert len(list(store)) == 1


def test_appending_leaves_every_other_file_alone(tmp_path):
    store = Records(str(tmp_path))
    digests = [store.append(record(number)) for number in range(5)]
    before = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in tmp_path.rglob("*.gz")}
    store.append(record(9))
    store.append(record(0))
    after = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in before}
    assert (after, len(before)) == (before, len(digests))


def packed_of_two(first: bytes, second: bytes) -> bytes:
    """The head of one record, and the result of another."""
    cut = first.index(records.RESULT), second.index(records.RESULT)
    return records.packed_record(first[: cut[0]] + second[cut[1] :])


@pytest.mark.parametrize(
    "damage", ["cut off", "another record", "not gzip", "more behind it", "another result", "one bit"]
)
def test_a_damaged_record_is_refused(tmp_path, damage):
    store = Records(str(tmp_path))
    digest = store.append(record())
    (path,) = tmp_path.rglob("*.gz")
    packed = path.read_bytes()
    path.write_bytes(
        {
            "cut off": packed[:-20],
            "another record": gzip.compress(record(1)),
            "not gzip": b"{}",
            "more behind it": packed + packed,
            "another result": packed_of_two(record(), record(1)),
            "one bit": packed[:-40] + bytes([packed[-40] ^ 1]) + packed[-39:],
        }[damage]
    )
    for read in (store.read, store.head):
        with pytest.raises(HistoryError, match="a record of the history is damaged") as caught:
            read(digest)
        assert digest in str(caught.value)


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "records").write_text("")
    with pytest.raises(FileError, match="cannot read or write"):
        Records(str(tmp_path / "records")).append(record())


def test_a_store_that_nobody_knows_is_refused():
    with pytest.raises(HistoryError, match="cannot open the store"):
        Records("nosuch://bucket/folder")


def test_the_abstract_of_another_version_is_made_anew(tmp_path, monkeypatch):
    data = record()
    store = Records(str(tmp_path))
    expected = records.read_kept(store, store.append(data)).points
    digest = store.append(data.replace(b'"points":{', b'"points":{"a check":[],', 1))
    assert records.read_kept(store, digest).measured["points"]["a check"] == []
    monkeypatch.setattr("stackcheck.history.metrics.VERSION", 99)
    assert [(point.check, point.value) for point in records.read_kept(store, digest).points] == [
        (point.check, point.value) for point in expected
    ]


def test_metrics_of_one_name_are_told_apart_by_their_conditions():
    names = [point.name for point in records.read_record(record(), "sha256:0").points]
    assert names == ["gemm_tflops[m=8192]", "gemm_tflops[m=4096]"]


GEMM = "test_kernels.py::test_gemm"


def kept(root: Path) -> list[Any]:
    return open_history(root).runs(Query())


def test_every_judged_run_is_kept(small_checkout, fake_engine, capsys):
    assert call(capsys, "test", CPU_STACK).code == 0
    fake_engine.answer = answer((GEMM, "failed"))
    assert call(capsys, "certify", CPU_STACK, "--force").code == 6
    runs = kept(small_checkout)
    assert [(run.stack, run.status, run.failed) for run in runs] == [
        (CPU_STACK, "FAILED", (GEMM,)),
        (CPU_STACK, "PASSED", ()),
    ]
    assert all(run.image and run.image.startswith("sha256:") for run in runs)


@pytest.mark.parametrize("outcome", ["passed", "failed"])
def test_a_history_that_cannot_be_written_changes_no_verdict(small_checkout, fake_engine, capsys, outcome):
    fake_engine.answer = answer((GEMM, outcome))
    (small_checkout / "build").mkdir()
    (small_checkout / "build" / "history").write_text("in the way")
    done = call(capsys, "test", CPU_STACK)
    assert done.code == {"passed": 0, "failed": 6}[outcome]
    assert "WARNING: this run is not in the history" in done.err
    assert "stackcheck history import" in done.err


def test_a_history_elsewhere_is_named_in_the_matrix(small_checkout, fake_engine, capsys, tmp_path):
    assert fake_engine is not None
    matrix = small_checkout / "matrix.yaml"
    place = f"history: {{records: {tmp_path}/far, index: 'sqlite:///{tmp_path}/far.sqlite'}}\n"
    matrix.write_text(matrix.read_text() + place)
    assert call(capsys, "test", CPU_STACK).code == 0
    assert len(list((tmp_path / "far").rglob("*.json.gz"))) == 1
    assert not (small_checkout / "build" / "history").exists()
