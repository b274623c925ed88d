"""Thresholds by measurement: real results of H200s in, proposals out, and what is no baseline refused."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stackcheck.cli.baseline import app
from stackcheck.errors import ChecksFailedError, ConfigurationError, MachineUnfitError
from stackcheck.proof import baseline, thresholds
from stackcheck.suite import results

pytestmark = pytest.mark.usefixtures("suites_asked_here")
ROOT = Path(__file__).resolve().parents[3]
SPEED = ROOT / "docs/results/suites-h200-x1-speed.json"
LINKS = ROOT / "docs/results/suites-h200-x4.json"
FACTORS = (0.99, 1.0, 1.01)


def documents(path: Path = SPEED, factors: tuple[float, ...] = FACTORS) -> list[dict]:
    """One real run as several: every figure scaled, each run with an id of its own.

    The results were recorded before checks had a `cause`, so it is filled in as the suites would write it.
    """
    found = []
    for number, factor in enumerate(factors):
        document = json.loads(path.read_text(encoding="utf-8"))
        document["run_id"] = f"{number:032x}"
        for metric in metrics(document):
            metric["value"] *= factor
        for check in document["checks"]:
            unbounded = any(metric["verdict"] == "no_threshold" for metric in check["metrics"])
            check["cause"] = "no_threshold" if check["outcome"] == "failed" and unbounded else None
        found.append(document)
    return found


def without_bounds(document: dict, name: str) -> dict:
    """The same run as it would have ended without a bound for one metric."""
    for check in document["checks"]:
        bound = [metric for metric in check["metrics"] if metric["name"] == name]
        for metric in bound:
            metric |= {"bound": None, "ceiling": None, "source": None, "verdict": "no_threshold"}
        if bound:
            check |= {
                "outcome": "failed",
                "cause": "no_threshold",
                "reason": f"{len(bound)} figures wait for a bound, in whatever words the suites choose",
            }
    return document


def metrics(document: dict) -> list[dict]:
    return [metric for check in document["checks"] for metric in check["metrics"]]


def propose(found: list[dict], root: Path = ROOT) -> baseline.Baseline:
    runs = [results.parse(json.dumps(document).encode()) for document in found]
    return baseline.propose(runs, root=root)


def only(found: baseline.Baseline, name: str) -> baseline.Proposal:
    (proposal,) = [proposal for proposal in found.proposals if proposal.entry.metric == name]
    return proposal


def test_bound_is_the_median_minus_five_per_cent_when_runs_agree():
    proposal = only(propose(documents()), "copy_gb_per_s")
    assert proposal.median == pytest.approx(4264.976)
    assert proposal.entry.bound == 4051.0  # 0.95 x, cut to four digits
    assert proposal.entry.tolerance == "median minus 5.0%, the smallest margin of a baseline"


def test_bound_leaves_three_robust_spreads_when_runs_do_not_agree():
    proposal = only(propose(documents(factors=(0.96, 1.0, 1.04))), "copy_gb_per_s")
    assert proposal.spread == pytest.approx(0.04 * 1.4826)
    assert proposal.entry.bound == pytest.approx(4264.976 * (1 - 3 * 0.04 * 1.4826), rel=1e-3)
    assert "three robust spreads" in proposal.entry.tolerance


def test_one_wild_run_of_five_hardly_moves_the_bound():
    steady = only(propose(documents(factors=(0.999, 1.0, 1.0, 1.0, 1.001))), "copy_gb_per_s")
    wild = only(propose(documents(factors=(0.999, 1.0, 1.0, 1.001, 0.5))), "copy_gb_per_s")
    assert wild.entry.bound == pytest.approx(steady.entry.bound, rel=0.001)


def test_bound_of_a_latency_lies_above_its_median():
    entry = only(propose(documents(LINKS)), "all_reduce_latency_us").entry
    assert entry.direction == "max"
    assert entry.bound >= 10.7919 * 1.05


def test_figures_that_failed_only_for_want_of_a_bound_get_one():
    found = propose([without_bounds(document, "all_gather_busbw") for document in documents(LINKS)])
    gathered = [p for p in found.proposals if p.entry.metric == "all_gather_busbw"]
    assert {p.entry.conditions["bytes"] for p in gathered} == {
        2**k for k in (24, 26, 28, 30)
    }  # smaller ones are latencies
    assert all(p.entry.conditions["nvls"] == "off" for p in gathered)
    assert all("environment" not in p.entry.conditions for p in gathered)


def test_source_says_host_class_date_n_median_spread_and_stack():
    source = only(propose(documents()), "copy_gb_per_s").entry.source
    for part in (
        "2026-11-21",
        "1 x H200 of 1 host",
        "700 W",
        "driver 580.159.04",
        "torch 2.11.0",
        "n = 3 runs of 5",
    ):
        assert part in source
    for part in ("median 4265 GB/s", "robust spread 1.48%", "sha256:9dd320b5cee9", "ceiling of devices.json"):
        assert part in source


def test_proposal_names_the_bound_that_holds_now():
    proposal = only(propose(documents()), "copy_gb_per_s")
    assert (proposal.now.bound, proposal.change) == (4050.0, "tighter")


def test_every_proposal_passes_the_suites_own_lint():
    for path in (SPEED, LINKS):
        entries = [proposal.entry for proposal in propose(documents(path)).proposals]
        assert entries
        thresholds.require_clean(ROOT, "H200", entries, path)


def test_figure_that_only_the_suites_of_the_runs_judged_is_left_out_with_words():
    """Small collectives were once judged by their rate, and are now by their time inside a graph."""
    baseline = propose(documents(LINKS))
    small = [line for line in baseline.left_out if "all_reduce_busbw" in line and "bytes=65536" in line]
    assert len(small) == 1
    assert "compare it with no bound" in small[0]


def test_figure_above_what_the_hardware_can_do_is_refused_by_the_lint():
    entries = [p.entry for p in propose(documents(factors=(1.98, 2.0, 2.02))).proposals]
    with pytest.raises(ConfigurationError, match="the lint of thresholds refuses") as refused:
        thresholds.require_clean(ROOT, "H200", entries, SPEED)
    assert "of its ceiling" in refused.value.got


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d["host"].update(driver="570.26"), "differ in driver"),
        (lambda d: d["host"]["devices"][0].update(power_cap_w=500.0), "differ in devices"),
        (lambda d: d["host"]["devices"].append(d["host"]["devices"][0]), "differ in devices"),
        (lambda d: d["host"].update(nvls="on"), "differ in NVLS"),
        (lambda d: d["host"].update(partition="enabled"), "differ in partition"),
        (lambda d: d["software"].update(torch="2.12.0"), "differ in software"),
        (lambda d: d["environment"].update(NCCL_ALGO="TREE"), "differ in environment"),
        (lambda d: d["inputs"].update(suites="sha256:" + "0" * 64), "differ in suites"),
        (lambda d: d.update(tier="soak"), "differ in tier"),
        (lambda d: d.update(stack_id="other"), "differ in stack"),
    ],
)  # fmt: skip
def test_runs_that_differ_in_more_than_chance_are_refused(change, says):
    found = documents()
    change(found[2])
    with pytest.raises(ConfigurationError, match=says):
        propose(found)


def test_firmware_kernel_and_identity_of_the_host_may_differ():
    found = documents()
    found[2]["host"]["devices"][0].update(id="another", firmware="96.00.B1")
    found[2]["host"]["kernel"] = "6.19"
    assert "1 x H200 of 2 hosts" in only(propose(found), "copy_gb_per_s").entry.source


def only_unbounded(document: dict) -> dict:
    """A check of the real run that failed for missing bounds alone."""
    (check,) = [c for c in document["checks"] if c["id"].endswith("test_gemm_speed[fp16]")]
    assert (check["outcome"], check["cause"]) == ("failed", "no_threshold")
    return check


def ended(outcome: str, reason: str):
    return lambda d: d["checks"][0].update(outcome=outcome, reason=reason, cause=None)


def judged(verdict: str):
    return lambda d: [metric.update(verdict=verdict) for metric in only_unbounded(d)["metrics"]]


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (ended("failed", "gemm_tflops 400 < 760"), ChecksFailedError, "a run with a failed check"),
        (ended("invalid", "device 0 throttled: thermal"), MachineUnfitError, "device 0 throttled: thermal"),
        # A missing bound excuses no other failure of its check, whatever the cause says.
        (lambda d: only_unbounded(d).update(cause=None), ChecksFailedError, "a run with a failed check"),
        (lambda d: only_unbounded(d).update(outcome="error"), ChecksFailedError, "a run with a failed check"),
        (judged("fail"), ChecksFailedError, "a run with a failed check"),
        (judged("recorded"), ChecksFailedError, "a run with a failed check"),
        (lambda d: only_unbounded(d).pop("cause"), ChecksFailedError, "a run with a failed check"),
        (lambda d: d.update(state="running", finished=None), ChecksFailedError, "did not finish"),
    ],
)
@pytest.mark.parametrize("number", [0, 1])
def test_a_run_that_proves_nothing_is_refused(change, error, says, number):
    found = documents()
    change(found[number])
    with pytest.raises(error, match=says):
        propose(found)


def test_cpu_run_has_no_thresholds():
    found = documents()
    for document in found:
        document["host"].update(vendor="cpu", devices=[])
    with pytest.raises(ConfigurationError, match="no thresholds for such a host"):
        propose(found)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda metric: metric.update(value=None), "not a positive number in every run"),
        (lambda metric: metric.update(unit="TB/s"), "in a different unit than GB/s"),
    ],
)
def test_figure_that_says_nothing_is_left_out_with_the_reason(change, says):
    found = documents()
    change(found[1]["checks"][-1]["metrics"][0])
    answer = propose(found)
    assert [line for line in answer.left_out if says in line]
    assert not [p for p in answer.proposals if p.entry.metric == "copy_gb_per_s"]


def test_figure_of_another_algorithm_is_left_out():
    found = documents(LINKS)
    figure = next(m for m in metrics(found[0]) if m["name"] == "all_reduce_busbw")
    figure["conditions"]["choice"] = "TREE/LL"
    assert "measured under different conditions: choice" in "".join(propose(found).left_out)


def test_figure_that_one_run_lacks_is_left_out():
    found = documents()
    found[2]["checks"].pop()
    assert "measured 2 times in 3 runs" in "".join(propose(found).left_out)


@pytest.fixture
def checkout(tmp_path) -> Path:
    """The suites' rules and thresholds, to write into."""
    for part in ("harness", "vendors", "workloads", "thresholds", "devices.json", "drivers.json"):
        source, target = ROOT / "tests/acceptance" / part, tmp_path / "tests/acceptance" / part
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    return tmp_path


@pytest.fixture
def files(tmp_path) -> list[str]:
    paths = [tmp_path / f"{number}.json" for number in range(3)]
    for path, document in zip(paths, documents(), strict=True):
        path.write_text(json.dumps(document), encoding="utf-8")
    return [str(path) for path in paths]


def test_nothing_is_written_without_being_asked(checkout, files):
    target = checkout / "tests/acceptance/thresholds/nvidia/H200.json"
    before = target.read_bytes()
    shown = CliRunner().invoke(app, [*files, "--root", str(checkout)])
    assert shown.exit_code == 0, shown.output
    assert target.read_bytes() == before
    assert "nothing written; add --write to write them" in shown.stdout
    assert '+ {"metric": "copy_gb_per_s"' in shown.stdout


def test_write_adds_entries_and_changes_no_other_line(checkout, files):
    target = checkout / "tests/acceptance/thresholds/nvidia/H200.json"
    before = target.read_text(encoding="utf-8").splitlines()
    written = CliRunner().invoke(app, [*files, "--root", str(checkout), "--write", "--json"])
    assert written.exit_code == 0, written.output
    after = target.read_text(encoding="utf-8").splitlines()
    assert [line.rstrip(",") for line in after[: len(before) - 1]] == [
        line.rstrip(",") for line in before[:-1]
    ]
    assert len(after) == len(before) + len(json.loads(written.stdout)["proposals"])
    again = CliRunner().invoke(app, [*files, "--root", str(checkout), "--json"])
    assert {p["change"] for p in json.loads(again.stdout)["proposals"]} == {"same"}


def test_first_baseline_of_a_model_makes_its_file(checkout, files):
    target = checkout / "tests/acceptance/thresholds/nvidia/H200.json"
    target.unlink()
    CliRunner().invoke(app, [*files, "--root", str(checkout), "--write"])
    assert len(thresholds.load_thresholds(checkout, "nvidia", "H200").entries) == 21


def test_reading_and_writing_a_committed_file_changes_nothing():
    for path in (ROOT / "tests/acceptance/thresholds").rglob("*.json"):
        file = thresholds.load_thresholds(ROOT, path.parent.name, path.stem)
        assert json.loads(thresholds.as_text(file.merged(()))) == json.loads(file.text)


H100 = ROOT / "docs/results/suites-h100-x1-standard.json"


def test_one_run_alone_keeps_a_wider_margin_and_says_so():
    run = results.parse(H100.read_bytes())
    found = baseline.propose([run], root=ROOT, one_run=True)
    assert [
        line.partition(" (")[0] for line in found.left_out
    ] == [  # the default has the bound of its backend
        "attention_forward_tflops",
        "attention_backward_tflops",
    ]
    for proposal in found.proposals:
        entry, (value,) = proposal.entry, proposal.values
        margin = 0.15 if entry.metric.startswith(("h2d", "d2h", "train")) else 0.10
        assert entry.bound == pytest.approx(value * (1 - margin), rel=1e-3)
        assert (entry.bound <= value * (1 - margin), proposal.change) == (True, "same")  # it is committed
        assert "n = 1 run of" in entry.source
        assert "one run minus" in entry.tolerance
        assert entry.basis == {"runs": [run.run_id]}


def test_one_run_in_which_a_figure_failed_is_no_baseline():
    """Other checks may fail there, and this run has seven that did."""
    document = json.loads(H100.read_text(encoding="utf-8"))
    assert [check["id"] for check in document["checks"] if check["outcome"] == "failed"]
    slow = next(check for check in document["checks"] if check["id"].endswith("test_copy_speed"))
    slow |= {"outcome": "failed", "reason": "slow", "cause": None}
    run = results.parse(json.dumps(document).encode())
    with pytest.raises(ChecksFailedError, match="test_copy_speed"):
        baseline.propose([run], root=ROOT, one_run=True)
    with pytest.raises(ConfigurationError, match="too few runs"):
        baseline.propose([run], root=ROOT)
