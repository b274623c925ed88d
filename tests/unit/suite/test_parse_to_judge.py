"""What is read only to be judged gets the verdict of the whole file, whatever an image writes there."""

import copy
import functools
import json
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

import result_files
from stackcheck.suite import bounds, results, verdict
from stackcheck.suite.requirements import Requirements, facts_of

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
        for name in draw(st.sets(st.sampled_from(sorted(changes)), max_size=2)):
            check[name] = draw(changes[name])
        for metric in check["metrics"]:
            metric["value"] = draw(st.sampled_from([metric["value"]] * 3) | FIGURES)
    text = json.dumps(document, indent=draw(st.sampled_from([None, 1]))).encode()
    for old, new in draw(st.sampled_from([[], [], []]) | st.lists(WRITTEN, max_size=1)):
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
@settings(max_examples=400, deadline=None)
def test_the_verdict_is_that_of_the_whole_file(text: bytes) -> None:
    plain = answer(results.parse, text)
    assert answer(functools.partial(results.parse_to_judge, strict=True), text) == plain
    if not isinstance(plain, str):  # else no node hands it over as read
        assert answer(functools.partial(results.parse_to_judge, strict=False), text) == plain
