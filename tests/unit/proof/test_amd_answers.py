"""docs/reference/amd.md says of each check what healthy AMD devices answer, from which source, and what else.

The lines come from devices.json, thresholds/, checks.json, matrix.yaml and the checks.
`make lists` writes them anew.
"""

import ast
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import made_up
from harness import models, thresholds
from stackcheck.matrix import matrix
from stackcheck.policy import is_advisory
from stackcheck.suite import expected
from workloads import gated

ROOT = Path(__file__).resolve().parents[3]
SUITES = ROOT / "tests/acceptance"
PAGE = ROOT / "docs/reference/amd.md"
BEGINS, ENDS = "<!-- a line for each check -->", "<!-- end of the lines -->"
MODELS = ("MI250X", "MI300X", "MI325X", "MI355X")
COUNT = 8
# A reading that a row may lack -> the check that asks for it.
READINGS = {
    "recovery action": "test_devices.py::test_no_device_asks_for_recovery",
    "switch fabric": "test_devices_links.py::test_switch_fabric_is_up",
    "compute partition": "test_devices.py::test_partition_is_the_reference",
    "active links": "test_devices_links.py::test_every_pair_is_linked",
    "throttle reasons": "test_devices.py::test_nothing_throttles",
}
# A check -> the fields of a model's row that it expects, and how they read.
ROWS = {
    "test_devices.py::test_device_identity": ("{arch}, {compute_units} units", ("compute_units", "pci_ids")),
    "test_devices.py::test_power_cap_is_the_default": (
        "its default, {power_w} W by the data sheet",
        ("power_w",),
    ),
    "test_devices_links.py::test_pcie_link_is_full": (
        "generation {pcie[generation]}, x{pcie[width]}",
        ("pcie",),
    ),
    "test_devices_links.py::test_every_pair_is_linked": ("{link[kind]}, {link[links]} links", ("link",)),
}
# Suites -> what the others of their checks compare with.
SOURCES = {
    (
        "attention",
        "kernels",
        "compiled",
        "generated",
        "packages",
    ): "a reference in more bits; gfx90a by AMD's documents",
    (
        "collectives",
        "collective_speed",
        "witness",
    ): "values that are known before, or computed on the processor",
    ("kernel_speed", "node_speed"): "the same device, and the others of the node",
    ("training", "training_variants"): "the reference curve, and the job's own earlier steps",
    (
        "devices",
        "devices_after",
        "devices_links",
        "devices_memory",
        "fabric",
    ): "the host's own files, and its other devices",
    ("image",): "the declaration of the image",
    ("static",): "Triton's code for the architecture (`test_triton_releases.py`)",
}
UNFIT_CALLS = {"machine", "invalid", "unfit"}
BESIDE = "beside"  # the fixture that judges a speed by another one, where a copy was measured


def lines() -> Iterator[str]:
    """A line for each check, and one for those of a suite that no model answers in its own way."""
    yield "| suite | check | MI250X | MI300X | MI325X | MI355X | source | if that is wrong |"
    yield "|---|---|---|---|---|---|---|---|"
    ids = expected.check_ids(ROOT, vendor="amd", tier="standard", count=COUNT)
    alike: dict[tuple[str, ...], list[str]] = {}
    for check in dict.fromkeys(name.partition("[")[0] for name in ids):
        told = [answer(check, model) for model in MODELS]
        sources = "; ".join(dict.fromkeys(source for _, source in told))
        cells = [told[0][0], *("same" if one == told[0] else one[0] for one in told[1:])]
        suite, _, name = check.removeprefix("test_").partition(".py::test_")
        alike.setdefault((suite, *cells, sources, wrong(check)), []).append(name)
    for (suite, *cells), names in alike.items():
        yield f"| {suite} | {', '.join(names)} | {' | '.join(cells)} |"


def answer(check: str, model: str) -> tuple[str, str]:
    """What a healthy device of the model answers, and from which source this is known."""
    row = models.row(model)
    if lacking := [one for one in unreadable() if READINGS.get(one["reading"]) == check and fits(one, row)]:
        return "skip, accepted", lacking[0]["source"]
    if check in ROWS:
        words, fields = ROWS[check]
        return words.format(**row), ", ".join(dict.fromkeys(row["sources"][name] for name in fields))
    if found := bounds(check, model):
        limits = sorted({f"{one.bound:g}" for one in found}, key=float)
        ends = limits[0] if len(limits) == 1 else f"{limits[0]} to {limits[-1]}"
        sign = "at least" if found[0].direction == "min" else "at most"
        return (
            f"{sign} {ends} {found[0].unit}",
            f"{', '.join(sorted({one.kind for one in found}))}: thresholds.md",
        )
    if check.split("::")[1] in speeds():
        judged = check in {made_up._functions()[name] for name, _ in gated.figures(row, COUNT, "standard")}
        return ("no bound", "thresholds.md") if judged else ("skip, accepted: memory", "devices.json")
    if is_beside(check):
        return "recorded: no copy was measured", "thresholds.md"
    suite = check.removeprefix("test_").partition(".py::")[0]
    return "passes", next(words for names, words in SOURCES.items() if suite in names)


def bounds(check: str, model: str) -> list[thresholds.Threshold]:
    entries, row = thresholds.load(thresholds.path_of("amd", model)), models.row(model)
    figures = [one for one in gated.figures(row, COUNT, "standard") if made_up._functions()[one[0]] == check]
    found = (
        thresholds.find(entries, name, conditions | {"nvls": "unavailable"}) for name, conditions in figures
    )
    return [one for one in found if one]


def speeds() -> set[str]:
    """The functions of all figures that some device is judged by."""
    own = {made_up._functions()[name] for name, _ in gated.figures(models.row("MI300X"), COUNT, "standard")}
    return {one.split("::")[1] for one in own}


def unreadable() -> list[dict[str, Any]]:
    """What AMD's rows may not tell, whatever driver and release there are."""
    every = json.loads((SUITES / "devices.json").read_text(encoding="utf-8"))["unreadable"]
    return [
        one for one in every if one["vendor"] == "amd" and not {"runtime_below", "driver_below"} & set(one)
    ]


def fits(entry: dict[str, Any], row: dict[str, Any]) -> bool:
    return row["arch"] in entry.get("archs", [row["arch"]])


def wrong(check: str) -> str:
    """How the run ends where the check does not pass, by what the check itself calls."""
    if is_advisory(check, matrix.load_matrix(ROOT / "matrix.yaml").policy.advisory):
        return "a note"
    if check.split("::")[1] in speeds():
        kinds = {one.kind for model in MODELS for one in bounds(check, model)}
        return "UNFIT under a derived bound or without one" + (
            ", FAILED under a published one" if "published" in kinds else ""
        )
    if is_beside(check):
        return "nothing"
    if "devices" not in check:
        return "FAILED"
    return "UNFIT" if blames_the_machine(check) else "FAILED"


def is_beside(check: str) -> bool:
    """Whether a share of another speed judges the check, and on no model of `MODELS`."""
    copies = [one for model in MODELS for one in thresholds.load(thresholds.path_of("amd", model))]
    assert not [one for one in copies if (one.metric, one.kind) == ("copy_gb_per_s", "measured")]
    file, _, function = check.partition("::")
    body = bodies(file)[function]
    return BESIDE in {one.arg for one in body.args.args}


def bodies(file: str) -> dict[str, ast.FunctionDef]:
    """The functions of a file of the suites, by their names."""
    tree = ast.parse((SUITES / file).read_text(encoding="utf-8"))
    return {one.name: one for one in tree.body if isinstance(one, ast.FunctionDef)}


def blames_the_machine(check: str) -> bool:
    """Whether the check, or a function of its file that it calls, says that the machine is unfit."""
    file, _, function = check.partition("::")
    known = bodies(file)
    names, new = set[str](), {function}
    while new:
        called = {name for one in new if one in known for name in calls(known[one])}
        new, names = called - names, names | called
    return bool(names & UNFIT_CALLS)


def calls(body: ast.FunctionDef) -> Iterator[str]:
    """The names of what a function calls or hands on."""
    for one in ast.walk(body):
        if isinstance(one, ast.Attribute | ast.Name):
            yield one.attr if isinstance(one, ast.Attribute) else one.id


def test_the_page_has_a_line_for_each_check():
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGINS)
    old, _, after = rest.partition(ENDS)
    new = "\n" + "\n".join(lines()) + "\n"
    if os.environ.get("STACKCHECK_WRITE_CHECKS"):
        PAGE.write_text(f"{before}{BEGINS}{new}{ENDS}{after}", encoding="utf-8")
        return
    assert old == new, "the lines in docs/reference/amd.md are out of date: make lists"


def test_each_reading_and_row_names_a_check_of_the_suites():
    ids = {
        name.partition("[")[0]
        for name in expected.check_ids(ROOT, vendor="amd", tier="standard", count=COUNT)
    }
    assert {*READINGS.values(), *ROWS} <= ids
    assert {one["reading"] for one in unreadable()} - {"memory partition"} <= READINGS.keys()


@pytest.mark.parametrize(
    ("check", "machine"),
    [
        ("test_devices_links.py::test_pcie_link_is_full", True),
        ("test_devices_after.py::test_no_link_error_since_the_start", True),
        ("test_devices.py::test_device_count", False),
    ],
)
def test_who_is_blamed_is_read_from_the_check(check, *, machine):
    assert blames_the_machine(check) is machine
