"""Is a node fit: figures against its own last gates, the parts that it names, what a scheduler gets."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import result_files
from small_checkout import CHECKS
from stackcheck.cli import gate as verb
from stackcheck.errors import ConfigurationError, MachineUnfitError
from stackcheck.fleet import fitness, own_past
from stackcheck.history import regressions
from stackcheck.history.history import History
from stackcheck.history.runs import Query
from stackcheck.suite import results
from stackcheck.suite.verdict import Verdict

PASSED = {
    "status": "PASSED",
    **{name: [] for name in ("reasons", "passed", "failed", "skipped", "invalid", "warned", "required")},
}


PAST = (50.0, 50.2, 49.9, 50.0, 50.1, 49.8, 50.0)
H100S = result_files.host("nvidia", "H100", "H100", driver="580.1")


def body(number: int, value: float, **changes: Any) -> bytes:
    """A gate of an idle node, with one figure of device 1."""
    figure = result_files.metric(
        "h2d_device_gb_per_s", value, direction=None, bound=None, conditions={"device": 1}, verdict="recorded"
    )
    made = result_files.check(CHECKS[0], metrics=[figure])
    told = {
        "tier": "gate",
        "image": None,
        "stack_id": None,
        "host": H100S,
        "run_id": f"{number:016x}",
    } | changes
    return json.dumps(result_files.result(made, **told)).encode()


def history(folder: Path, *values: float, status: str = "PASSED", **changes: Any) -> History:
    made = History(str(folder / "records"), f"sqlite:///{folder / 'index.sqlite'}")
    for number, value in enumerate(values):
        made.append(body(number, value, **changes), PASSED | {"status": status}, None, source="gate")
    return made


def compared(folder: Path, value: float, *values: float, **changes: Any) -> own_past.NodePast:
    return own_past.compare(results.parse(body(99, value)), history(folder, *values, **changes))


def test_the_first_gates_of_a_node_compare_nothing_and_say_so(tmp_path):
    found = compared(tmp_path, 1.0, *(50.0,) * 6)
    assert (found.gates, found.figures, found.slower) == (6, 0, ())
    assert "6 earlier gates of this node: 7 are needed" in found.words


@pytest.mark.parametrize(
    "changes",
    [
        {"status": "UNFIT"},
        {"tier": "smoke"},
        {"host": H100S | {"driver": "other"}},
        {"stack_id": "another"},
        {"host": H100S | {"devices": [{**H100S["devices"][0], "id": "d9"}]}},
    ],
    ids=str,
)
def test_only_fit_gates_of_this_node_image_and_driver_count(tmp_path, changes):
    assert compared(tmp_path, 40.0, *PAST, **changes).gates == 0


def test_the_speed_of_a_processor_refuses_no_node(tmp_path):
    """Other work took its cores on a busy machine: a third of the usual rate, twice in a row."""
    cpu = {"host": result_files.host()}
    made = history(tmp_path, *PAST, **cpu)
    found = own_past.compare(results.parse(body(99, 15.0, **cpu)), made)
    assert (found.gates, found.figures, found.slower) == (7, 0, ())


@given(past=st.lists(st.floats(1.0, 1e6), min_size=7, max_size=20), value=st.floats(0.0, 2e6))
def test_a_figure_is_refused_exactly_if_it_lost_more_than_the_nodes_spread_explains(past, value):
    metric = results.Metric.model_validate(result_files.metric(value=value) | {"repeats": ()})
    found = own_past._held(metric, past)
    limit = max(regressions.FLOOR, regressions.BASELINE_FACTOR * regressions.spread(past))
    if limit >= 1:
        assert found == "noisy"
    else:
        lost = regressions.loss(sorted(past)[len(past) // 2], value, "min")
        assert isinstance(found, own_past.Part) <= (value < max(past))
        if len(past) % 2:
            assert isinstance(found, own_past.Part) == (lost > limit)


FIT = Verdict(status="PASSED", **dict.fromkeys(set(PASSED) - {"status"}, ()))


def gates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *values: float, limit_s: float, seconds: float = 30
) -> tuple[list[fitness.Fitness], list[str]]:
    """Gates of a node with a past until the values are used up: each run of the suites takes one."""
    state, clock, rest, lines = tmp_path / "state", [0.0], list(values), list[str]()
    state.mkdir()
    history(state, *PAST)

    def measured(*_: object) -> tuple[bytes, Verdict]:
        clock[0] += seconds
        started = f"2026-03-01T00:{len(values) - len(rest):02d}:00Z"
        finished = started.replace("03-01", "03-02")
        return body(50 + len(rest), rest.pop(0), started=started, finished=finished), FIT

    monkeypatch.setattr("stackcheck.fleet.fitness.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(fitness.NodeGate, "_measured", measured)
    gate, made = looking(tmp_path, limit_s=limit_s, report=lines.append), []
    while rest:
        made.append(gate.look(None, lambda: pytest.fail("no engine is needed")))
    return made, lines


def test_a_slow_figure_is_measured_again_where_the_time_suffices(tmp_path, monkeypatch):
    (found,), _ = gates(tmp_path, monkeypatch, 40.0, 50.0, limit_s=60)
    assert found.state == "fit"


def test_without_the_time_one_slow_run_drains_nobody_and_a_second_gate_does(tmp_path, monkeypatch):
    """As Slurm's health program, which has 55 s, and comes again."""
    (first, second), lines = gates(tmp_path, monkeypatch, 40.0, 41.0, limit_s=50)
    assert (first.state, first.drains) == ("unfit", False)
    assert "measured once: no time for a second run within 50 s" in first.words
    assert lines[0] == "slower than before, not measured again: 30 s of 50 s are gone"
    assert (second.state, second.drains) == ("unfit", True)
    assert "GPU 1: h2d_device_gb_per_s 41" in second.words


def test_a_slow_run_that_the_next_gate_does_not_repeat_is_forgotten(tmp_path, monkeypatch):
    found, _ = gates(tmp_path, monkeypatch, 40.0, 50.0, 40.0, limit_s=50)
    assert [(one.state, one.drains) for one in found] == [("unfit", False), ("fit", False), ("unfit", False)]


def test_a_node_keeps_its_newest_gates_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(fitness, "KEPT", 8)
    gates(tmp_path, monkeypatch, *(50.0,) * 12, limit_s=60)
    kept = history(tmp_path / "state")
    runs = kept.runs(Query())
    assert len(runs) == 8
    assert {run.started.month for run in runs} == {3}, "the oldest went"
    assert set(kept.records) == {run.record for run in runs}
    assert len(kept.points(Query())) == 8
    assert kept.rebuild() == []
    assert kept.runs(Query()) == runs


def test_links_and_ports_are_named_with_their_addresses():
    addresses = ["0000:1b:00.0", "0000:43:00.0"]
    assert fitness._part("link", "devices 0-1: pcie, 1 active", None, addresses).name == (
        "link 0-1 at 0000:1b:00.0 and 0000:43:00.0"
    )
    assert fitness._part("throttled", "device 1 throttles", 1, addresses).name == "GPU 1 at 0000:43:00.0"
    port = fitness._part("nic", "mlx5_0/1 at 0000:05:00.0: state DOWN", None, addresses)
    assert (port.name, port.evidence) == ("mlx5_0/1 at 0000:05:00.0", "state DOWN")


def looking(tmp_path: Path, **changes: Any) -> fitness.NodeGate:
    given_ = {"vendor": None, "python": "/nowhere/python", "limit_s": 5.0, "report": lambda _line: None}
    return fitness.NodeGate(**({"root": tmp_path, "state": tmp_path / "state"} | given_ | changes))


def test_a_node_without_a_gpu_says_so_and_does_not_pass(tmp_path, monkeypatch):
    monkeypatch.setattr("stackcheck.vendors.detect", lambda: "cpu")
    with pytest.raises(MachineUnfitError, match="this node has no GPU"):
        looking(tmp_path).look(None, lambda: pytest.fail("no engine is needed"))
    with pytest.raises(MachineUnfitError, match="this node has no GPU of nvidia"):
        looking(tmp_path, vendor="nvidia").look(None, lambda: pytest.fail("no engine is needed"))


def test_a_python_without_torch_is_the_operators_error(tmp_path):
    with pytest.raises(ConfigurationError, match="a Python with torch and pytest"):
        looking(tmp_path, vendor="cpu").look(None, lambda: pytest.fail("no engine is needed"))


@pytest.mark.parametrize("words", ["x" * 300, "a\nb"])
def test_a_plug_in_of_node_problem_detector_prints_one_short_line(words, capsys):
    assert verb._npd(1, " ".join(words.split())) == 1
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert len(out) <= 81
