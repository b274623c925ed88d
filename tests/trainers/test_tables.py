"""The tables around a run: published beside ours, what a token costs, and one system in another's terms."""

import json
from pathlib import Path
from typing import Any

import pytest

import options
import rows
from tools import cost, fit, measures, ratio, table

H200 = 150754820096


def machine(count: int, model: str = "H200") -> fit.Machine:
    return fit.Machine(model=model, count=count, memory_bytes=H200, fp8=True)


def record(
    rate: float, *, device: str = "MI250", size: str = "1b", unit: str = "tokens", micro_batch: int = 4
) -> dict[str, Any]:
    speed = {
        "unit": unit,
        f"{unit}_per_s_per_gpu": rate,
        "tflops_noncausal": rate / 100,
        "tflops_hardware": rate / 75,
    }
    given = {
        "model": "mpt",
        "size": size,
        "layers": None,
        "precision": "bf16",
        "parallel": "full_shard",
        "implementation": "native",
    }
    return {
        "model": "mpt",
        "size": size,
        "options": given,
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


def test_a_row_that_fits_runs_at_true_size_and_another_as_a_proxy_of_true_width() -> None:
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
def test_a_row_of_frontier_runs_its_layout_with_zero1_as_far_as_the_ranks_go(
    job: str, ranks: int, split: tuple[int, int], layers: int | None
) -> None:
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


def test_every_row_is_in_the_table_and_one_that_did_not_run_has_its_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "rows.jsonl"
    shown = lines("amd-container", capsys, monkeypatch, "--out", str(out))
    assert set(shown) >= {row.id for row in rows.document("amd-container").rows}
    assert shown["mi300x-llama-8b-bf16-8192"][2:5] == ["542.9", "500", "0.92"]
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
    assert "tools/ratio.py compares their records" in shown["stack-over-stack"][-1]
    assert "tools/convergence.py" in shown["amd-mpt-1b-boolq"][-1]


def test_a_row_that_does_not_fit_is_named_with_the_arithmetic() -> None:
    row = next(row for row in rows.document("frontier").rows if row.id == "gpt-1t-tflops")
    small = fit.Machine(model="H200", count=1, memory_bytes=20e9, fp8=True)
    with pytest.raises(
        measures.CannotRunError,
        match=r"does not fit: batch 1 on 1 needs at least state .* a device has 20\.0 GB",
    ):
        measures.measure(row, measures.Bench(machine=small, ranks=1, tiny=False, seconds=1))


def test_two_systems_are_compared_job_by_job_beside_what_was_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert [line.split(": ")[1] for line in said.splitlines() if line.startswith("  mosaicml")] == [
        "80 %",
        "94 %",
        "85 %",
    ]
    assert ratio.main(["--ours", str(ours[0]), "--theirs", str(theirs[1])]) == 2
    assert "no job on both sides" in capsys.readouterr().err


def test_a_record_costs_what_its_devices_prices_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = kept(tmp_path / "record", record(2750, device="H100"))
    assert cost.main([str(path)]) == 0
    said = capsys.readouterr().out
    assert "| 5.01 on demand | 0.506 | 506,061 |" in said
    assert "| 2.91 spot | 0.294 | 293,939 |" in said
    assert cost.main([str(kept(tmp_path / "unknown", record(1, device="MI325X")))]) == 2
    assert "the guide has no price of MI325X; give --price-per-hour" in capsys.readouterr().err


def test_the_table_refuses_a_machine_and_a_document_that_it_does_not_know(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert table.main(["amd", "--device", "CPU"]) == 2
    assert "no document amd; rows.yaml has amd-container, mosaicml-june" in capsys.readouterr().err
    assert table.main(["amd-container", "--device", "MI999"]) == 2
    assert "--device MI999: not in" in capsys.readouterr().err


@pytest.mark.slow
def test_a_documents_commands_run_on_a_tiny_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        table.main(
            [
                *("frontier", "--device", "CPU", "--tiny", "--count", "2"),
                "--only",
                "22b-t,22b-pipeline,175b-tfl",
            ]
        )
        == 0
    )
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| gpt")]
    assert len(said) == 4
    assert "zero1 TP 2 x PP 1 x DP 1 (published: TP 4 x PP 16), native" in said[1]
    assert "zero1 TP 1 x PP 2 x DP 1 (published: TP 1 x PP 8), native" in said[0]
    assert not [line for line in said if "not run" in line], said
