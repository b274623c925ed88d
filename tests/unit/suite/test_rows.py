"""A founding document's figures as gates: for the devices of the document, at true size, and fail closed."""

import json
from pathlib import Path

import pytest

from stackcheck.errors import ConfigurationError
from stackcheck.suite import rows
from stackcheck.vendors import Host, HostDevice

ROOT = Path(__file__).resolve().parents[3]


def host(model: str, count: int) -> Host:
    device = HostDevice(model=model, arch="gfx942", id="0", memory_bytes=206158430208)
    facts = {"driver": "6.10", "kernel": "6.1", "partition": None, "nvls": "absent", "cpu": "EPYC"}
    return Host(vendor="amd", devices=(device,) * count, memory_bytes=1, **facts)


def line(row: rows.Row, **other: object) -> str:
    facts = {"document": "amd-container", "row": row.id, "machine": row.device, "ranks": 8, "ours": row.value}
    return json.dumps(facts | other) + "\n"


def test_the_rows_of_a_device_are_the_ones_that_were_published_for_it() -> None:
    assert len(rows.gates(ROOT, "amd-container", host("MI300X", 8))) == 8
    chosen = rows.gates(ROOT, "amd-container", host("MI325X", 8))
    assert len(chosen) == 7
    assert {row.device for row in chosen} == {"MI325X"}
    assert rows.command("amd-container", chosen)[:4] == (
        "/stackcheck/trainers/tools/table.py",
        *("amd-container", "--only", ",".join(row.id for row in chosen)),
    )


@pytest.mark.parametrize(
    ("document", "model", "count", "said"),
    [
        ("amd-container", "MI300X", 4, "4 x MI300X.*expected: 8 x MI300X or 8 x MI325X"),
        ("amd-container", "CPU", 1, "1 x CPU.*8 x MI300X or 8 x MI325X"),
        ("amd", "MI300X", 8, "no such document.*expected: amd-container, mosaicml-june"),
        ("mosaicml-october", "MI250", 4, "no figure for these devices"),
    ],
)
def test_another_machine_or_document_is_refused(document: str, model: str, count: int, said: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        rows.gates(ROOT, document, host(model, count))
    assert_matches(str(refused.value), said)


def assert_matches(text: str, said: str) -> None:
    import re

    assert re.search(said, text.replace("\n", " "), re.DOTALL), text


def test_a_row_is_reached_at_nine_tenths_and_nothing_else_is(tmp_path: Path) -> None:
    chosen = rows.gates(ROOT, "amd-container", host("MI300X", 8))
    written = tmp_path / "rows.jsonl"
    written.write_text("".join(line(row, ours=row.value * 0.9001) for row in chosen))
    judged = rows.judge("amd-container", chosen, rows.read(written))
    assert (len(judged.passed), judged.failed, judged.reasons) == (8, (), ())
    others = [
        ({"ours": chosen[0].value * 0.89}, "expected at least 384.1: 90% of 426.79"),
        ({"ours": None, "reason": "does not fit: …"}, "does not fit"),
        ({"ours": None}, "the image measured nothing"),
        ({"proxy": "8 layers of true width"}, "measured as a proxy"),
        ({"ranks": 4}, "measured on 4 x MI300X, published for 8 x MI300X"),
        ({"machine": "MI325X"}, "measured on 8 x MI325X"),
        ({"document": "spheron"}, "the image measured nothing"),
    ]
    for other, said in others:
        written.write_text(line(chosen[0], **other))
        judged = rows.judge("amd-container", chosen[:1], rows.read(written))
        assert judged.passed == ()
        assert judged.failed == ("rows::amd-container::mi300x-llama-70b-bf16-8192",)
        assert said in judged.reasons[0]


def test_a_file_that_cannot_be_read_measured_nothing(tmp_path: Path) -> None:
    chosen = rows.gates(ROOT, "amd-container", host("MI300X", 8))
    written = tmp_path / "rows.jsonl"
    good = line(chosen[0])
    for content in (
        "",
        "{",
        good[:-9],
        good + "[]\n",
        good.replace("426.79", "NaN"),
        good.replace("426.79", '"426"'),
    ):
        written.write_text(content)
        assert rows.judge("amd-container", chosen, rows.read(written)).passed == (), content
    written.unlink()
    written.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_text(good)
    assert rows.judge("amd-container", chosen, rows.read(written)).passed == ()
