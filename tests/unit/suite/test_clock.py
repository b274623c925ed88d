"""A child cannot say a speed that this host's own clock or counters contradict."""

import itertools
import json
import time
import types
from pathlib import Path
from typing import Any

import pytest

import result_files
from stackcheck import vendors
from stackcheck.suite import bounds, figures, results
from stackcheck.suite.results import RunResult
from stackcheck.vendors import HostDevice, amd, nvidia, seen
from stackcheck.vendors.seen import Seen

pytestmark = pytest.mark.usefixtures("suites_asked_here")
ROOT = Path(__file__).resolve().parents[3]
DEVICE = "0123456789abcdef"


def metric(name: str, value: float, unit: str = figures.TFLOPS, **conditions: str) -> dict[str, Any]:
    return result_files.metric(name, value, unit=unit, verdict="recorded", conditions=conditions)


def run(vendor: str, *metrics: dict[str, Any]) -> RunResult:
    witness = [metric(figures.CLOCKED, 400.0), metric(figures.CLAIMED_S, 1.0, "s")]
    check = result_files.check("test_x.py::test_x", metrics=[*witness, *metrics], devices=[DEVICE])
    document = result_files.result(check, host=result_files.host(vendor))
    return results.parse(json.dumps(document).encode(), where="result.json")


@pytest.mark.parametrize(
    ("value", "dtype", "said"),
    [(799.0, "bf16", 0), (801.0, "bf16", 1), (1599.0, "fp8", 0), (1601.0, "fp8", 1)],
)
def test_no_figure_is_more_than_the_clock_allows(value, dtype, said):
    found = list(figures.clock_problems(run("nvidia", metric("gemm_tflops", value, dtype=dtype)), None, {}))
    assert len(found) == said, found
    assert not list(figures.clock_problems(run("cpu", metric("gemm_tflops", value)), None, {})), (
        "no bound, no claim"
    )


@pytest.mark.parametrize(
    ("name", "limit", "conditions"),
    [
        ("copy_gb_per_s", 3350.0, {"bytes": 4 << 30, "kind": "device"}),
        ("h2d_gb_per_s", 63.0, {"bytes": 256 << 20}),
        ("gemm_tflops", 989.0, {"dtype": "bf16", "m": 8192, "n": 8192, "k": 8192, "layout": "NT"}),
    ],
)
def test_no_figure_is_more_than_the_hardware_of_the_model_can_do(name, limit, conditions):
    """The limits are looked up on this host, in devices.json; a made up one in the result is not read."""
    for value, said in ((0.95 * limit, 0), (1.24 * limit, 0), (1.26 * limit, 1), (90 * limit, 1)):
        unit = figures.TFLOPS if name.endswith("tflops") else "GB/s"
        told = metric(name, value, unit, **conditions) | {"ceiling": 1e9}
        check = result_files.check("test_x.py::test_x", metrics=[told])
        document = result_files.result(check, host=result_files.host("nvidia", "H100"))
        made = results.parse(json.dumps(document).encode(), where="result.json")
        known = bounds.look_up(made, ROOT)
        assert list(known.ceilings.values()) == [pytest.approx(limit, rel=1e-3)]
        assert len(list(figures.clock_problems(made, None, known.ceilings))) == said


def test_no_recorded_healthy_run_is_beyond_its_hardware():
    judged = 0
    for path in sorted((ROOT / "docs" / "results").rglob("*.json")):
        document = json.loads(path.read_bytes())
        if isinstance(document, dict) and "checks" in document and "host" in document:
            made = results.parse(path.read_bytes(), where=str(path))
            known = bounds.look_up(made, ROOT)
            assert not list(figures.clock_problems(made, None, known.ceilings)), path
            judged += len(known.ceilings)
    assert judged > 100


@pytest.mark.parametrize(("busy_s", "said"), [(0.0, 1), (0.4, 1), (0.6, 0), (90.0, 0), (None, 0)])
def test_a_device_worked_at_least_as_long_as_the_child_says(busy_s, said):
    seen = Seen(busy_s={DEVICE: busy_s})
    assert len(list(figures.clock_problems(run("nvidia"), seen, {}))) == said
    words = figures.clock_words(run("nvidia"), seen)
    assert ("not read" in words) == (busy_s is None), words


def host(vendor: vendors.Vendor, *names: str) -> Any:
    devices = tuple(HostDevice(model="X", arch="", id=name, memory_bytes=0) for name in names)
    return types.SimpleNamespace(vendor=vendor, devices=devices)


def test_counters_are_read_while_the_image_runs(monkeypatch):
    monkeypatch.setattr(seen, "PERIOD_S", 0.01)
    monkeypatch.setattr(nvidia, "busy", lambda: {"a": 0.5, "b": None, "other": 1.0})
    with seen.watched(host("nvidia", "a", "b")) as found:
        time.sleep(0.3)
    assert found.keys() == {"a", "b"}
    assert found["b"] is None
    assert found["a"]
    assert 0 < found["a"] <= 1


def test_a_counter_that_fails_is_not_read_and_ends_no_run(monkeypatch):
    def fails() -> dict[str, float | None]:
        raise RuntimeError("the driver hangs")

    monkeypatch.setattr(seen, "PERIOD_S", 0.01)
    monkeypatch.setattr(amd, "busy", fails)
    with seen.watched(host("amd", "a")) as found:
        time.sleep(0.1)
    assert found == {"a": None}


@pytest.mark.parametrize("lost", [1, 3, 10, 1000])
def test_a_counter_that_is_lost_for_a_while_refuses_nobody(lost, monkeypatch):
    """The device is always busy, and its driver does not answer `lost` times after each answer."""
    answers = itertools.cycle([{"a": 1.0}, *({"a": None} if number % 2 else {} for number in range(lost))])
    monkeypatch.setattr(seen, "PERIOD_S", 0.005)
    monkeypatch.setattr(nvidia, "busy", lambda: next(answers))
    with seen.watched(host("nvidia", "a")) as found:
        time.sleep(0.4)
    assert found["a"]
    assert found["a"] > figures.LEAST_BUSY * 0.4


def test_amd_says_how_busy_a_device_is_in_sysfs(tmp_path, monkeypatch):
    monkeypatch.setattr(amd, "_gpus", lambda: [{"unique_id": 7}])
    monkeypatch.setattr(amd, "_card", lambda _node: tmp_path)
    assert list(amd.busy().values()) == [None]
    (tmp_path / "gpu_busy_percent").write_text("37\n")
    assert list(amd.busy().values()) == [0.37]


def test_nvidia_says_it_through_nvml(monkeypatch):
    def rates(handle: str) -> Any:
        if handle == "old":
            raise nvidia.pynvml.NVMLError(nvidia.pynvml.NVML_ERROR_NOT_SUPPORTED)
        return types.SimpleNamespace(gpu=37)

    monkeypatch.setattr(nvidia.pynvml, "nvmlDeviceGetUtilizationRates", rates)
    assert (nvidia._busy("new"), nvidia._busy("old")) == (0.37, None)
