"""The tables around a run: published beside ours, what a token costs, and one system in another's terms."""

import json
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import cost
import fit
import measures
import options
import ratio
import rows
import table
from tools import launch

H200 = 150754820096


def machine(count: int, model: str = "H200") -> fit.Machine:
    return fit.Machine(model=model, count=count, memory_bytes=H200, fp8=True)


def record(
    rate: float, *, device: str = "MI250", size: str = "1b", unit: str = "tokens", micro_batch: int = 4
) -> dict[str, Any]:
    speed = {"unit": unit, f"{unit}_per_s_per_gpu": rate}
    speed |= {"tflops_noncausal": rate / 100, "tflops_hardware": rate / 75}
    names = {"model": "mpt", "size": size}
    given = {"layers": None, "precision": "bf16", "parallel": "full_shard", "implementation": "native"}
    return {
        **names,
        "options": names | given,
        "layout": {"parallel": "full_shard", "data": 1, "tensor": 1, "pipeline": 1},
        "plan": {"seq_len": 2048, "micro_batch": micro_batch},
        "device": {"model": device, "bf16": 1000.0},
        "performance": speed,
        "problems": [],
        "world_size": 1,
        "software": {"torch": "2.13"},
    }


def kept(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_a_row_that_fits_runs_at_true_size_and_another_as_a_proxy_of_true_width():
    amd = {row.id: row for row in rows.document("amd-container").rows}
    first = next(fit.variants(amd["mi300x-llama-8b-bf16-8192"], machine(1), 1))
    assert first.proxy is None
    assert "ZeRO-1" in first.changed, "16 bytes a parameter are 128 GB: one H200 holds it only in ZeRO-1"
    assert fit.shown(first.flags).endswith("--moments bf16 --implementation fused --micro-batch 2")
    two = next(fit.variants(amd["mi300x-llama-8b-bf16-8192"], machine(2), 2))
    assert (two.proxy, two.changed) == (None, "")
    large = next(fit.variants(amd["mi300x-llama-70b-bf16-8192"], machine(1), 1))
    assert large.proxy is not None
    assert large.proxy.endswith("layers of true width")
    published = next(fit.variants(amd["mi300x-llama-70b-bf16-8192"], machine(8, "B200"), 8))
    assert "proxy" in published.how, "8 x 141 GB hold no 70B model with four samples of 8,192 tokens each"


@pytest.mark.parametrize(
    ("job", "ranks", "split", "layers"),
    [("22b", 2, (1, 2), None), ("22b", 8, (1, 8), None), ("175b", 8, (4, 2), 32), ("1t", 2, (2, 1), 1)],
)
def test_a_row_of_frontier_runs_its_layout_with_zero1_as_far_as_the_ranks_go(job, ranks, split, layers):
    row = next(row for row in rows.document("frontier").rows if row.id == f"gpt-{job}-tflops")
    first = next(fit.variants(row, machine(ranks), ranks))
    given = options.parse(list(first.flags))
    assert (given.parallel, given.tp, given.pp, given.layers) == ("zero1", *split, layers)
    assert (first.proxy is None) == (layers is None)


class Kept(measures.Bench):
    """A bench whose runs are at hand: the table is under test, not the machine."""

    def record(self, flags: tuple[str, ...], ranks: int) -> dict[str, Any]:
        self.ran[str(ranks), *flags] = {}
        return record(40_000 if "--tp" in flags else 50_000, unit="images" if "flux" in flags else "tokens")


def lines(
    document: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *more: str
) -> dict[str, list[str]]:
    monkeypatch.setattr(measures, "Bench", Kept)
    given = table._parser().parse_args([document, *more])
    table.run(rows.document(document), machine(2), given)
    out = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    return {cells[0]: cells for cells in out}


def test_every_row_is_in_the_table_and_one_that_did_not_run_has_its_reason(capsys, monkeypatch, tmp_path):
    out = tmp_path / "rows.jsonl"
    shown = lines("amd-container", capsys, monkeypatch, "--out", str(out))
    assert set(shown) >= {row.id for row in rows.document("amd-container").rows}
    assert shown["mi300x-llama-8b-bf16-8192"][2:5] == ["542.9", "500", "0.92"]
    assert shown["mi300x-llama-8b-bf16-8192"][6] == "2 GPUs for 8"
    assert shown["mi300x-flux-dev-bf16"][5] == "images/s/GPU"
    assert len(out.read_text().splitlines()) == 15
    again = lines("amd-container", capsys, monkeypatch, "--out", str(out))
    assert again == shown
    assert len(out.read_text().splitlines()) == 15, "what is there is not run again"
    shown = lines("frontier", capsys, monkeypatch)
    assert shown["gpt-22b-tensor-2"][3] == "0.8"
    assert "not run: a rule, which --tp follows" in shown["tensor-parallel-limit"][-1]
    shown = lines("spheron", capsys, monkeypatch)
    assert shown["cost-h100"][2:5] == ["506,000", "506,061", "1.00"]
    assert shown["cost-mi300x"][2:5] == ["228,000", "227,778", "1.00"]
    shown = lines("mosaicml-october", capsys, monkeypatch)
    assert "ratio.py compares their records" in shown["stack-over-stack"][-1]
    assert "convergence.py" in shown["amd-mpt-1b-boolq"][-1]


def test_a_row_that_does_not_fit_is_named_with_the_arithmetic():
    row = next(row for row in rows.document("frontier").rows if row.id == "gpt-1t-tflops")
    small = fit.Machine(model="H200", count=1, memory_bytes=20e9, fp8=True)
    with pytest.raises(
        measures.CannotRunError,
        match=r"does not fit: batch 1 on 1 needs at least state .* a device has 20\.0 GB",
    ):
        measures.measure(row, measures.Bench(machine=small, ranks=1, tiny=False, seconds=1))


def test_two_systems_are_compared_job_by_job_beside_what_was_published(tmp_path, capsys):
    ours = [kept(tmp_path / f"o{s}", record(rate, size=s)) for s, rate in (("1b", 800), ("3b", 300))]
    theirs = [
        kept(tmp_path / f"t{s}", record(rate, size=s, device="A100-40GB", micro_batch=2))
        for s, rate in (("1b", 1000), ("3b", 400), ("7b", 1))
    ]
    arguments = ["--ours", *map(str, ours), "--theirs", *map(str, theirs)]
    assert ratio.main(arguments) == 0
    said = capsys.readouterr().out
    assert "| mpt 1b bf16 2048 | 800 | 1,000 | 0.800 |" in said
    assert "| mean of 2 | | | 0.775 |" in said
    assert "only on one side: mpt 7b" in said
    published = [line.split(": ")[1] for line in said.splitlines() if line.startswith("  mosaicml")]
    assert published == ["80 %", "94 %", "85 %"]
    assert ratio.main(["--ours", str(ours[0]), "--theirs", str(theirs[1])]) == 2
    assert "no job on both sides" in capsys.readouterr().err


def test_a_record_costs_what_its_devices_prices_say(tmp_path, capsys):
    path = kept(tmp_path / "record", record(2750, device="H100"))
    assert cost.main([str(path)]) == 0
    said = capsys.readouterr().out
    assert "| 5.01 on demand | 0.506 | 506,061 |" in said
    assert "| 2.91 spot | 0.294 | 293,939 |" in said
    assert cost.main([str(kept(tmp_path / "unknown", record(1, device="MI325X")))]) == 2
    assert "the guide has no price of MI325X; give --price-per-hour" in capsys.readouterr().err


def test_the_table_refuses_a_machine_and_a_document_that_it_does_not_know(capsys):
    assert table.main(["amd", "--device", "CPU"]) == 2
    assert "no document amd; rows.yaml has amd-container, mosaicml-june" in capsys.readouterr().err
    assert table.main(["amd-container", "--device", "MI999"]) == 2
    assert "--device MI999: not in" in capsys.readouterr().err


class Machine:
    """In place of launch.run: two GPUs on which four samples of the fused layer run out of memory."""

    def __init__(self) -> None:
        self.jobs: list[tuple[str, ...]] = []
        self.gpus: Counter[str] = Counter()
        self.both = threading.Barrier(2)

    def run(self, system: launch.System, flags: list[str], *, timeout_s: float) -> dict[str, Any]:
        self.jobs.append(tuple(flags))
        assert timeout_s <= 90
        gpu = next((word for word in system.command if word.startswith("CUDA_VISIBLE_DEVICES=")), "all")
        if gpu != "all":
            self.gpus[gpu] += 1
        if len(self.jobs) <= 2 and gpu != "all":
            self.both.wait(60)  # one job alone never comes through
        if "fused" in flags and flags[flags.index("--micro-batch") + 1] == "4":
            raise launch.RunError("here ended with 1\nncclUnhandledCudaError: Out of memory", 1)
        return record(50_000, device="H200", unit="images" if "flux" in flags else "tokens")


def test_rows_of_one_gpu_run_side_by_side_and_a_call_that_was_cut_continues(monkeypatch, tmp_path, capsys):
    here, out = Machine(), tmp_path / "rows.jsonl"
    monkeypatch.setattr(launch, "run", here.run)
    command = ["amd-container", "--device", "H200", "--count", "2", "--beside", "0,1", "--out", str(out)]
    command += ["--seconds", "10", "--limit-s", "80", "--only", "llama-8b,mistral"]
    assert table.main(command) == 0
    assert set(here.gpus) == {"CUDA_VISIBLE_DEVICES=0", "CUDA_VISIBLE_DEVICES=1"}
    assert max(Counter(here.jobs).values()) == 1, "rows of one job share its record, and its lack of memory"
    assert [job for job in here.jobs if "4" in job], "4,096 tokens: four samples are tried first"
    table_shown = capsys.readouterr().out
    assert "true size; batch 3; ZeRO-1, 16-bit sums and moments" in table_shown
    lines_kept = out.read_text().splitlines(keepends=True)
    assert len(lines_kept) == 12

    # The last two lines are lost, one of them in the middle: only their rows run again, and not their jobs.
    begun, kept_rows = len(here.jobs), {json.loads(line)["row"] for line in lines_kept[:10]}
    out.write_text("".join(lines_kept[:10]) + lines_kept[10][:100])
    assert table.main([*command, "--budget-s", "0"]) in {0, 1}
    again = capsys.readouterr().out
    assert len(here.jobs) == begun, "a record that is kept serves every row of its job"
    assert all(f"| {row} |" in again for row in kept_rows)
    assert len(again.splitlines()) == len(table_shown.splitlines())

    assert table.main(["amd-container", "--show", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "not run: no result in rows.jsonl" in said
    assert said.count("true size") >= 10
    assert table.main(["amd-container", "--show"]) == 2
    assert table.main(["amd-container", "--show", "--out", str(tmp_path / "nowhere")]) == 2
    assert "nowhere: no such file; measure first" in capsys.readouterr().err


def test_without_time_no_row_begins_and_the_table_says_so(monkeypatch, capsys, tmp_path):
    here, out = Machine(), tmp_path / "rows.jsonl"
    monkeypatch.setattr(launch, "run", here.run)
    command = ["frontier", "--device", "H200", "--count", "2", "--budget-s", "10", "--out", str(out)]
    assert table.main(command) == 1
    assert "no time is left to start it" in capsys.readouterr().out
    assert not here.jobs
    assert table.main(["frontier", "--show", "--out", str(out)]) == 0
    assert "no time is left to start it" in capsys.readouterr().out, "the reason is kept"


def test_both_sides_of_a_comparison_are_one_job_but_for_what_is_compared(monkeypatch):
    here = Machine()
    monkeypatch.setattr(launch, "run", here.run)
    frontier = {row.id: row for row in rows.document("frontier").rows}
    bench = measures.Bench(machine=machine(2), ranks=2, tiny=False, seconds=10, limit_s=80)
    for name in ("gpt-22b-tensor-2", "gpt-22b-pipeline-2", "strong-scaling-175b", "flash-attention-gain"):
        measures.measure(frontier[name], bench)
    tried = [options.parse([*job]) for job in here.jobs]
    plain, tensor, stages, alone, both, slow, fast = tried
    assert (tensor.tp, stages.pp, plain.tp * plain.pp) == (2, 2, 1)
    assert plain.global_batch == tensor.global_batch == stages.global_batch == 4
    assert plain.layers == tensor.layers == stages.layers
    assert (alone.global_batch, alone) == (4, both), "strong scaling: the same step on one GPU and on two"
    assert (slow.attention, fast.attention) == ("math", "flash")
    compile_row = next(row for row in rows.document("spheron").rows if row.id == "compile")
    one = measures.Bench(machine=machine(1), ranks=1, tiny=False, seconds=10, limit_s=80)
    measures.measure(compile_row, one)
    assert [options.parse([*job]).implementation for job in here.jobs[-2:]] == ["native", "native"]
    assert [options.parse([*job]).micro_batch for job in here.jobs[-2:]] == ["1", "1"], "autograd keeps more"


def test_gradients_of_earlier_microbatches_leave_less_room_for_activations():
    june, october = (
        next(row for row in rows.document(document).rows if row.id == name)
        for document, name in (("mosaicml-june", "mpt-7b"), ("mosaicml-october", "strong-scaling-4"))
    )
    once, accumulated = (next(fit.variants(row, machine(1), 1)) for row in (june, october))
    assert (once.micro_batch, accumulated.micro_batch) == (4, 3), "the same model: 26.6 GB of gradients more"


def test_a_proxy_of_one_layer_has_no_two_stages_and_nothing_starts(monkeypatch):
    here = Machine()
    monkeypatch.setattr(launch, "run", here.run)
    frontier = {row.id: row for row in rows.document("frontier").rows}
    bench = measures.Bench(machine=machine(2), ranks=2, tiny=False, seconds=10, limit_s=80)
    result = table.measured(frontier["gpt-1t-pipeline-2"], bench)
    assert (result["ours"], result["failed"]) == (None, False)
    assert "needs two layers" in result["reason"]
    assert not here.jobs
    assert table.measured(frontier["gpt-1t-tensor-2"], bench)["ours"] is not None


@pytest.mark.parametrize("metric", ["compile", "gpt-22b-tensor-2", "weak-scaling-175b"])
def test_a_second_side_that_fails_is_a_failed_row_and_not_the_end_of_the_table(metric, monkeypatch):
    calls = iter([record(50_000), launch.RunError("here did not end in 90 s", None)])

    def run(*_: object, **__: object) -> dict[str, Any]:
        found = next(calls)
        if isinstance(found, launch.RunError):
            raise found
        return found

    monkeypatch.setattr(launch, "run", run)
    every = {row.id: row for name in ("frontier", "spheron") for row in rows.document(name).rows}
    result = table.measured(
        every[metric], measures.Bench(machine=machine(2), ranks=2, tiny=False, seconds=10)
    )
    assert (result["ours"], result["failed"]) == (None, True)
    assert "did not end in 90 s" in result["reason"]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_runs")
def test_a_documents_commands_run_on_a_tiny_model(capsys):
    command = "frontier --device CPU --tiny --count 2 --only 22b-t,22b-pipeline,175b-tfl"
    assert table.main(command.split()) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| gpt")]
    assert len(said) == 4
    assert "zero1 TP 2 x PP 1 x DP 1 (published: TP 4 x PP 16), native" in said[1]
    assert "zero1 TP 1 x PP 2 x DP 1 (published: TP 1 x PP 8), native" in said[0]
    assert not [line for line in said if "not run" in line], said


def test_a_table_shows_how_a_failure_begins_and_ends():
    trace = "here ended with 1 in phase build\nTraceback\n  File a\n  File b\nMemoryError: a | b"
    assert table._in_a_cell(trace) == "here ended with 1 in phase build … MemoryError: a / b"
    assert table._in_a_cell("the job needs\n 90 GB") == "the job needs 90 GB"


TOOLS = [f"../../trainers/tools/{name}.py" for name in ("evaluate", "export")]


@pytest.mark.parametrize("program", ["table.py", "convergence.py", "cost.py", *TOOLS])
def test_a_python_without_torch_is_named_in_one_line(program):
    python = [sys.executable, "-E", "-S"]  # without its installed packages
    path = Path(table.__file__).parent / program
    got = subprocess.run([*python, path, "--help"], capture_output=True, text=True, check=False)
    assert got.returncode == 2
    (said,) = got.stderr.splitlines()
    assert said.startswith(f"{path.name}: {sys.executable} has no torch")
    assert "image" in said
    assert "pip install torch" in said
