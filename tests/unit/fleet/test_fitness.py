"""Is a node fit: figures against its own last gates, the parts that it names, what a scheduler gets."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

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
from stackcheck.suite import results

if TYPE_CHECKING:
    from pathlib import Path

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


def test_the_first_gates_of_a_node_compare_nothing_and_say_so(tmp_path: Path) -> None:
    found = compared(tmp_path, 1.0, *(50.0,) * 6)
    assert (found.gates, found.figures, found.slower) == (6, 0, ())
    assert "6 earlier gates of this node: 7 are needed" in found.words


def test_a_figure_below_the_nodes_own_past_names_the_device(tmp_path: Path) -> None:
    (part,) = compared(tmp_path, 40.0, *PAST).slower
    assert (part.kind, part.name) == ("slower", "GPU 1")
    assert "h2d_device_gb_per_s 40 GB/s, the median of 7 gates here is 50" in part.evidence


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
def test_only_fit_gates_of_this_node_image_and_driver_count(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert compared(tmp_path, 40.0, *PAST, **changes).gates == 0


def test_the_speed_of_a_processor_refuses_no_node(tmp_path: Path) -> None:
    """Other work took its cores on a busy machine: a third of the usual rate, twice in a row."""
    cpu = {"host": result_files.host()}
    made = history(tmp_path, *PAST, **cpu)
    found = own_past.compare(results.parse(body(99, 15.0, **cpu)), made)
    assert (found.gates, found.figures, found.slower) == (7, 0, ())


@given(
    past=st.lists(st.floats(1.0, 1e6), min_size=7, max_size=20),
    value=st.floats(0.0, 2e6),
)
def test_a_figure_is_refused_exactly_if_it_lost_more_than_the_nodes_spread_explains(
    past: list[float], value: float
) -> None:
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


def test_links_and_ports_are_named_with_their_addresses() -> None:
    addresses = ["0000:1b:00.0", "0000:43:00.0"]
    assert fitness._part("link", "devices 0-1: pcie, 1 active", None, addresses).name == (
        "link 0-1 at 0000:1b:00.0 and 0000:43:00.0"
    )
    assert fitness._part("throttled", "device 1 throttles", 1, addresses).name == "GPU 1 at 0000:43:00.0"
    port = fitness._part("nic", "mlx5_0/1 at 0000:05:00.0: state DOWN", None, addresses)
    assert (port.name, port.evidence) == ("mlx5_0/1 at 0000:05:00.0", "state DOWN")


def test_a_device_that_is_only_in_use_drains_no_node(tmp_path: Path) -> None:
    def of(kind: str) -> fitness.Fitness:
        part = own_past.Part(kind=kind, name="GPU 0", evidence="words")
        return fitness.Fitness(
            state="unfit",
            image=None,
            result=results.parse(body(1, 1.0)),
            compared=own_past.NodePast(0, 0, 0),
            parts=(part,),
            reasons=("words",),
            seconds=1.0,
        )

    assert not of("shared").drains
    assert of("link").drains
    assert tmp_path


def looking(tmp_path: Path, **changes: Any) -> fitness.NodeGate:
    given_ = {"vendor": None, "python": "/nowhere/python", "limit_s": 5.0, "report": lambda _line: None}
    return fitness.NodeGate(**({"root": tmp_path, "state": tmp_path / "state"} | given_ | changes))


def test_a_node_without_a_gpu_says_so_and_does_not_pass(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("stackcheck.vendors.detect", lambda: "cpu")
    with pytest.raises(MachineUnfitError, match="this node has no GPU"):
        looking(tmp_path).look(None, lambda: pytest.fail("no engine is needed"))
    with pytest.raises(MachineUnfitError, match="this node has no GPU of nvidia"):
        looking(tmp_path, vendor="nvidia").look(None, lambda: pytest.fail("no engine is needed"))


def test_a_python_without_torch_is_the_operators_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="a Python with torch and pytest"):
        looking(tmp_path, vendor="cpu").look(None, lambda: pytest.fail("no engine is needed"))


@pytest.mark.parametrize("words", ["x" * 300, "a\nb"])
def test_a_plug_in_of_node_problem_detector_prints_one_short_line(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verb._npd(1, " ".join(words.split())) == 1
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert len(out) <= 81
