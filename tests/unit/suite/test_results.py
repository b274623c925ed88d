"""A result file is read completely, or refused."""

import json
from pathlib import Path

import pytest

from result_files import CONFIG_DIGEST, check, metric, result
from stackcheck.suite import results

SCHEMA = Path(results.__file__).parent / "result.schema.json"
CHECK = check("test_a.py::test_b", metrics=[metric()])
TEXT = json.dumps(result(CHECK))
# What is wrong with a result -> a part of its text, and what stands there instead.
BROKEN = {
    "check-twice": (json.dumps(CHECK), f"{json.dumps(CHECK)}, {json.dumps(CHECK)}"),
    "doubled-key": ('"state":', '"state": "crashed", "state":'),
    "empty": (TEXT, ""),
    "finished-without-time": ('"finished": "2026-01-02T03:05:05Z"', '"finished": null'),
    "infinity": ('"value": 10.0', '"value": 1e999'),
    "nan": ('"value": 10.0', '"value": NaN'),
    "negative-seconds": ('"seconds": 0.5', '"seconds": -1'),
    "not-an-object": (TEXT, "[]"),
    "not-utf8": ("test_b", "\xff"),
    "number-as-bool": ('"value": 10.0', '"value": true'),
    "number-as-text": ('"value": 10.0', '"value": "10.0"'),
    "schema-2": ('"schema": 1', '"schema": 2'),
    "schema-as-text": ('"schema": 1', '"schema": "1"'),
    "short-digest": (CONFIG_DIGEST, "sha256:abc"),
    "time-without-zone": ("03:04:05Z", "03:04:05"),
    "unknown-key": ('{"schema"', '{"verdict": "PASSED", "schema"'),
    "unknown-outcome": ('"outcome": "passed"', '"outcome": "xpassed"'),
    "unknown-vendor": ('"vendor": "cpu"', '"vendor": "intel"'),
}


def write(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_a_finished_run_is_read_with_its_checks_and_metrics(tmp_path: Path) -> None:
    content = result(check("test_a.py::test_b[x]", metrics=[metric(value=7)]))
    run = results.load_result(write(tmp_path / "result.json", content))
    assert run.checks[0].metrics[0].value == 7
    assert run.started.utcoffset() is not None


def test_the_committed_schema_is_the_one_that_the_reader_enforces() -> None:
    assert json.loads(SCHEMA.read_text()) == results.json_schema()


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_file_is_refused_with_exit_code_6_and_its_place(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "result.json"
    assert BROKEN[broken][0] in TEXT
    path.write_text(TEXT.replace(*BROKEN[broken]), encoding="latin-1")
    with pytest.raises(results.ResultError) as error:
        results.load_result(path)
    assert error.value.exit_code == 6
    assert error.value.where == str(path)
    assert error.value.got


def test_a_file_over_the_size_limit_is_refused_before_it_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "SIZE_LIMIT_BYTES", 100)
    with pytest.raises(results.ResultError, match="too large"):
        results.load_result(write(tmp_path / "result.json", result()))


def test_a_bottomless_nesting_is_refused_and_does_not_end_the_process(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("[" * 200_000)
    with pytest.raises(results.ResultError):
        results.load_result(path)


@pytest.mark.parametrize("cut", range(0, 1000, 37))
def test_a_file_cut_at_any_byte_is_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "result.json"
    path.write_text(TEXT[: min(cut, len(TEXT) - 1)])
    with pytest.raises(results.ResultError):
        results.load_result(path)
