"""A driver newer than every list is tried and said to be so; one too old is refused. The state of NVLS."""

import json
from pathlib import Path

import pytest
import yaml

from result_files import CONFIG_DIGEST, check, host, metric, result
from stackcheck.suite import bounds, results
from stackcheck.suite.bounds import Bounds, DriverSupport
from stackcheck.suite.requirements import Requirements
from stackcheck.suite.verdict import judge
from vendors import Absence, Host, amd, drivers, multicast, nvidia

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("shown", "release", "module"),
    [
        ("6.12.12", None, (6, 12, 12)),
        ("6.12.12.60403-2194681.24.04", (6, 4, 3), (6, 12, 12)),
        ("6.14.14.30100200-2226257.24.04", (30, 10, 2), (6, 14, 14)),
        ("6.19.14.31400000", (31, 40, 0), (6, 19, 14)),  # ROCm/gpu-operator#609
        ("31400000", (31, 40, 0), None),  # ROCm/rocm-systems#11821 splits the number
        ("31.40.1", (31, 40, 1), None),
        ("30.30", (30, 30), None),
        ("6.4", (6, 4), None),
    ],
)
def test_both_numbers_of_a_driver_are_read(shown, release, module):
    found = drivers.parse(shown)
    assert found == drivers.AmdDriver(release, module)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "N/A", "85F6A8C2CC7AEEAF1C3BD41", "Linux version 6.12.57 (gcc)"])
def test_a_text_without_a_version_is_none(text):
    assert drivers.parse(text) is None


@pytest.mark.parametrize(
    ("driver", "rocm", "state", "words"),
    [
        ("6.16.13", "7.2.53211-e1a6bc5663", "listed", "driver 30.30 (amdgpu 6.16.13): listed for ROCm 7.2"),
        ("6.12.12", "6.3", "listed", "driver 6.4 (amdgpu 6.12.12)"),
        ("6.19.14.31400000", "7.14.0", "listed", "driver 31.40 (amdgpu 6.19.14.31400000)"),
        ("31.40.1", "7.14.1", "listed", "driver 31.40.1: listed for ROCm 7.14"),
        ("31.60.0", "7.2.4", "unlisted", "driver 31.60.0: not listed for ROCm 7.2, tested here"),
        ("31.60.0", "10.1", "unlisted", "not listed for ROCm 10.1"),
        ("6.99.1", "7.2", "unlisted", "driver 6.99.1: not listed"),
        ("6.19.14.31400000", "7.2.4", "unlisted", "not listed for ROCm 7.2"),  # newer than the runtime's list
        ("6.16.13", "7.14.0", "unlisted", "not listed for ROCm 7.14"),  # within the one year of AMD's rule
        ("6.12.12", "5.7", "unlisted", "not listed for ROCm 5.7"),  # a new driver under an old image
        ("6.18.8.31200000", "7.2", "unlisted", "driver 31.20 (amdgpu 6.18.8.31200000)"),
        ("6.7.0", "7.0", "refused", "supports ROCm 5.7 to 6.4, not 7.0"),
        ("6.12.12", "7.14.0", "refused", "supports ROCm 6.3 to 7.2, not 7.14"),
        ("6.10.9", "7.2", "refused", "not 7.2"),  # between 6.3 and 6.4
        ("5.18.13", "6.0", "refused", "older than every driver"),
    ],
)
def test_drivers_of_amd(driver, rocm, state, words):
    found = amd.driver_support(Host(vendor="amd", library="", driver=driver), rocm)
    assert (found.state, words in found.says) == (state, True), found


@pytest.mark.parametrize("driver", [Absence.NOT_AVAILABLE, "85F6A8C2CC7AEEAF1C3BD41"])
def test_the_kernels_own_amdgpu_is_not_listed_and_runs(driver):
    found = amd.driver_support(Host(vendor="amd", library="", driver=driver), "7.2.4")
    assert found.state == "unlisted"
    assert "the kernel's own amdgpu" in found.says


@pytest.mark.parametrize(
    ("driver", "cuda", "serves", "state", "words"),
    [
        ("580.95.05", "13.0", "13.0", "listed", "listed for CUDA 13.0"),
        ("535.104.05", "12.8", "12.2", "listed", "listed for CUDA 12.8"),  # minor-version compatibility
        ("580.95.05", "11.8", "13.0", "listed", "CUDA 11.8"),
        ("535.104.05", "13.0", "13.0", "listed", "by a forward-compatibility package"),
        ("535.104.05", "13.1", "13.0", "listed", "by a forward-compatibility package"),
        ("535.104.05", "13.0", "12.2", "refused", "older than 580, as CUDA 13.0 needs"),
        ("535.104.05", "13.0", None, "refused", "older than 580"),
        ("525.60.11", "12.8", "12.0", "listed", "forward-compatibility"),
        ("525.60.11", "12.8", None, "refused", "older than 525.60.13"),
        ("700.10", "13.0", "15.0", "unlisted", "driver 700.10: not listed for CUDA 13.0, tested here"),
        ("620.10", "14.0", "14.0", "unlisted", "not listed for CUDA 14.0"),
        ("610.43.02", "14.0", "13.3", "refused", "(CUDA up to 13.3): it does not serve CUDA 14.0"),
        (None, "13.0", None, "refused", "cannot read the driver's version"),
    ],
)
def test_drivers_of_nvidia(driver, cuda, serves, state, words):
    absent = Absence.NOT_AVAILABLE
    seen = Host(vendor="nvidia", library="", driver=driver or absent, driver_runtime=serves or absent)
    found = nvidia.driver_support(seen, cuda)
    assert (found.state, words in found.says) == (state, True), found


def test_drivers_are_in_order_and_agree_with_the_compatibility_rules():
    """images/compat.yaml lists the same windows by ROCm release, for `explain`."""
    rules = yaml.safe_load((ROOT / "images/compat.yaml").read_text(encoding="utf-8"))["tables"]
    (rule,) = (rule for rule in rules if rule["id"] == "R10-amdgpu")
    rows = drivers.releases()
    for row in rows:
        named = rule["rows"].get(row["release"])
        if row["runtimes"] and named is not None:
            listed = named["require"] if isinstance(named, dict) else named
            assert row["runtimes"][1] == listed[-1], row["release"]
            assert row["closed"] != isinstance(named, dict) or not row["closed"]
    modules = [tuple(map(int, row["module"].split("."))) for row in rows if row["module"]]
    assert modules == sorted(modules)
    assert all(row["source"] for row in rows)


def told(driver: str, runtime: str) -> results.RunResult:
    """A run on an MI300X whose check of the driver passed."""
    shown = metric(
        "driver_listed",
        0.0,
        unit="",
        verdict="recorded",
        direction=None,
        bound=None,
        conditions={"runtime": runtime},
    )
    run = result(check("test_a.py::test_one", metrics=[shown]), host=host("amd", "MI300X", driver=driver))
    return results.parse(json.dumps(run).encode())


def test_the_verdict_has_what_the_documents_say_by_this_checkout():
    found = bounds.look_up(told("31.60.0", "7.2.53211"), ROOT)
    assert found.driver == DriverSupport(
        state="unlisted", says="driver 31.60.0: not listed for ROCm 7.2, tested here"
    )
    run = told("31.60.0", "7.2.53211")
    needed = Requirements(checks=tuple(item.id for item in run.checks), image_config_digest=CONFIG_DIGEST)
    verdict = judge(run, needed, Bounds(driver=found.driver))
    assert (verdict.status, verdict.driver["state"]) == ("PASSED", "unlisted")


def test_an_image_cannot_let_a_driver_pass_that_this_checkout_refuses():
    run = told("6.7.0", "7.2.53211")
    needed = Requirements(checks=tuple(item.id for item in run.checks), image_config_digest=CONFIG_DIGEST)
    verdict = judge(run, needed, Bounds(driver=bounds.look_up(run, ROOT).driver))
    assert verdict.status == "FAILED"
    assert "supports ROCm 5.7 to 6.4" in verdict.reasons[0]


AVAILABLE = "NCCL INFO NVLS multicast support is available on dev 0"
MISSING = "NCCL INFO NVLS multicast support is not available on dev 0"


@pytest.mark.parametrize(
    ("host", "switch", "log", "state"),
    [
        (("nvidia", 4), "0", None, "off"),
        (("nvidia", 4), "0", AVAILABLE, "off"),
        (("nvidia", 4), None, None, "on"),
        (("nvidia", 4), "1", AVAILABLE, "on"),
        (("nvidia", 4), None, MISSING, "unavailable"),
        (("nvidia", 4), None, "", "unavailable"),
        (("nvidia", 4), None, f"{AVAILABLE}\n{MISSING}", "unavailable"),
        (("nvidia", 1), "0", None, "unavailable"),
        (("amd", 8), None, AVAILABLE, "unavailable"),
        (("cpu", 2), "0", None, "unavailable"),
    ],
)
def test_state_of_multicast(host, switch, log, state, monkeypatch):
    if switch is None:
        monkeypatch.delenv(multicast.SWITCH, raising=False)
    else:
        monkeypatch.setenv(multicast.SWITCH, switch)
    assert multicast.state(*host, log) == state
