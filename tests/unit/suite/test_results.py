"""A result file is read completely, or refused; what is read only to be judged gets the same verdict."""

import copy
import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.expression import Expression
from hypothesis import given, settings
from hypothesis import strategies as st

import result_files
from result_files import CONFIG_DIGEST, result
from stackcheck.errors import NothingSelectedError
from stackcheck.suite import bounds, results, some, verdict
from stackcheck.suite.requirements import Requirements, facts_of

SCHEMA = Path(results.__file__).parent / "result.schema.json"
CHECK = result_files.check("test_a.py::test_b", metrics=[result_files.metric()])
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


def test_a_finished_run_is_read_with_its_checks_and_metrics(tmp_path):
    content = result(result_files.check("test_a.py::test_b[x]", metrics=[result_files.metric(value=7)]))
    run = results.load_result(write(tmp_path / "result.json", content))
    assert run.checks[0].metrics[0].value == 7
    assert run.started.utcoffset() is not None


def test_the_committed_schema_is_the_one_that_the_reader_enforces():
    assert json.loads(SCHEMA.read_text()) == results.json_schema()


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_file_is_refused_with_exit_code_6_and_its_place(tmp_path, broken):
    path = tmp_path / "result.json"
    assert BROKEN[broken][0] in TEXT
    path.write_text(TEXT.replace(*BROKEN[broken]), encoding="latin-1")
    with pytest.raises(results.ResultError) as error:
        results.load_result(path)
    assert error.value.exit_code == 6
    assert error.value.where == str(path)
    assert error.value.got


def test_a_file_over_the_size_limit_is_refused_before_it_is_parsed(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "SIZE_LIMIT_BYTES", 100)
    with pytest.raises(results.ResultError, match="too large"):
        results.load_result(write(tmp_path / "result.json", result()))


def test_a_bottomless_nesting_is_refused_and_does_not_end_the_process(tmp_path):
    path = tmp_path / "result.json"
    path.write_text("[" * 200_000)
    with pytest.raises(results.ResultError):
        results.load_result(path)


@pytest.mark.parametrize("cut", range(0, 1000, 37))
def test_a_file_cut_at_any_byte_is_refused(tmp_path, cut):
    path = tmp_path / "result.json"
    path.write_text(TEXT[: min(cut, len(TEXT) - 1)])
    with pytest.raises(results.ResultError):
        results.load_result(path)


ROOT = Path(__file__).parents[3]
WHOLE = json.loads((ROOT / "docs" / "results" / "suites-h200-x1-standard.json").read_bytes())
GOOD = [
    check
    for check in WHOLE["checks"]
    if check["outcome"] in {"passed", "skipped"} and "numa" not in check["id"]
]
KEPT = {json.dumps([check["outcome"], len(check["metrics"]), check["skip"]]): check for check in GOOD}
BASE = WHOLE | {
    "checks": list(KEPT.values()),
    "selection": {"arguments": [], "collected": 0, "deselected": 0, "dropped": 0},
}
OUTCOMES = st.sampled_from(["passed", "failed", "skipped", "error", "invalid"])
KINDS = st.sampled_from(["throttled", "shared", "memory errors", "link", "nic", "no answer", "unheard of"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
SHOWN = st.just({"0": {"unfit": ["hardware thermal"]}})
READINGS = (
    SHOWN | st.dictionaries(st.sampled_from(["0", "start", "during", "nics", "missing"]), VALUES) | VALUES
)
FIGURES = st.floats(allow_nan=False, allow_infinity=False) | st.floats() | st.integers(-9, 9**400) | st.none()
WRITTEN = st.sampled_from(  # what no dictionary can hold
    [
        (b'"before":', b'"before": {}, "before":'),
        (b'"outcome":', b'"outcome": "passed", "outcome":'),
        *((b'"seconds": ', b'"seconds": ' + text) for text in (b"1e999, ", b"1e9", b"NaN", b"-", b"0")),
        (b'"after": {', b'"after": {"0": {"a": 1e999}, '),
        (b'"after": {', b'"after": {"0": ' + b'{"a":' * 300 + b"1" + b"}" * 300 + b", "),
        (b'"after": {', b'"after": {"\\ud800": "\\ud800", '),
        (b'"after": {', b'"after": {"\xff": 1, '),
        (b'"evidence": {', b'"evidence": {"more": 1, '),
    ]
)


@st.composite
def texts(draw: st.DrawFn) -> bytes:
    document = copy.deepcopy(BASE)
    for check in draw(st.lists(st.sampled_from(document["checks"]), max_size=2)):
        changes: dict[str, st.SearchStrategy[Any]] = {
            "outcome": OUTCOMES,
            "machine": st.lists(
                st.fixed_dictionaries({"kind": KINDS, "words": st.just("w"), "device": st.just(0)}),
                max_size=2,
            ),
            "evidence": st.fixed_dictionaries({}, optional={"before": SHOWN, "after": READINGS}) | VALUES,
        }
        if draw(st.booleans()):
            check.update(result_files.check(check["id"], "invalid", devices=[]))
        for name in sorted(draw(st.sets(st.sampled_from(sorted(changes)), max_size=2))):
            check[name] = draw(changes[name])
        for metric in check["metrics"]:
            metric["value"] = draw(st.sampled_from([metric["value"]] * 3) | FIGURES)
    text = json.dumps(document, indent=draw(st.sampled_from([None, 1]))).encode()
    for old, new in draw(st.just([]) | st.lists(WRITTEN, min_size=1, max_size=1)):
        text = text.replace(old, new, draw(st.sampled_from([1, -1])))
    return text[: draw(st.sampled_from([len(text)] * 9 + [len(text) // 2]))]


@functools.cache
def required() -> Requirements:
    """What is asked of the image of the file, with the one machine of it."""
    run = results.parse(json.dumps(BASE).encode())
    names = tuple(check.id for check in run.checks)
    facts = facts_of(run.host, None)
    return Requirements(checks=names, image_config_digest="no image", facts=facts, same_thresholds=False)


def judged(run: results.RunResult) -> tuple[verdict.Verdict, list[Any]]:
    """The verdict, and what is asked about bounds; every figure has one that it violates or meets."""
    asked = []

    def ask(_root: Path, question: Any) -> str:
        asked.append(question)
        count = len(question["figures"])
        bound = {"bound": -1e6, "direction": "min", "unit": "", "class": "derived"}
        answer = {"reached": [True] * count, "bounds": [bound] * count, "missing": [], "unmeasured": []}
        return json.dumps(answer)

    return verdict.judge(run, required(), bounds.look_up(run, ROOT, ask)), asked


def answer(parse: Any, text: bytes) -> object:
    try:
        run = parse(text, where="result.json")
    except results.ResultError as error:
        return str(error)
    told = run.model_dump(exclude={"checks": {"__all__": {"evidence"}}})
    return told, judged(run)


@given(texts())
@settings(max_examples=150, deadline=None)
def test_the_verdict_is_that_of_the_whole_file(text):
    plain = answer(results.parse, text)
    assert answer(functools.partial(results.parse_to_judge, strict=True), text) == plain
    if not isinstance(plain, str):  # else no node hands it over as read
        assert answer(functools.partial(results.parse_to_judge, strict=False), text) == plain


RESULT = ROOT / "docs/results/suites-h200-x2-standard.json"
IDS = sorted(json.loads((ROOT / "tests/acceptance/checks.json").read_text())["1"])


def chosen(text: str, check: str) -> bool:
    """Whether pytest would run a check: a word is looked for in the names of its file and of itself."""
    file, _, name = check.partition("::")
    return Expression.compile(text).evaluate(lambda word, **_: word.lower() in f"{file}\n{name}".lower())


@pytest.mark.parametrize("check", [*IDS[::7], "test_a.py::test_b[x=1, y]", "test_a.py::test_b[not or and]"])
def test_each_check_is_chosen_by_its_own_expression(check):
    assert chosen(some.expression([check]), check)


def test_checks_of_other_names_are_not_chosen():
    text = some.expression(["test_a.py::test_b[bf16]", "test_c.py::test_d"])
    others = ("test_a.py::test_b[fp16]", "test_a.py::test_d", "test_c.py::test_b[bf16]")
    assert not any(chosen(text, other) for other in others)


def kept(folder: Path, failing: str | None, age_s: int) -> None:
    """A result in which one check failed."""
    result = json.loads(RESULT.read_text())
    for check in result["checks"]:
        if check["id"] == failing:
            check |= {"outcome": "failed", "reason": "planted"}
    path = folder / "run" / "result.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(result))
    os.utime(path, (path.stat().st_mtime - age_s,) * 2)


def test_the_newest_run_says_what_failed_last(tmp_path):
    with pytest.raises(NothingSelectedError, match="nothing ran yet"):
        some.last_failed(tmp_path)
    passing = [each["id"] for each in json.loads(RESULT.read_text())["checks"] if each["outcome"] == "passed"]
    bad = {each["id"] for each in json.loads(RESULT.read_text())["checks"]} - set(passing)
    kept(tmp_path, passing[0], age_s=100)
    assert passing[0] in some.last_failed(tmp_path)
    kept(tmp_path / some.FOLDER, passing[1], age_s=0)
    assert passing[1] in some.last_failed(tmp_path)
    assert passing[0] not in set(some.last_failed(tmp_path)) - bad
