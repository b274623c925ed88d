"""The tables of variables that drawn environments set: each has a source, and what must not be set is not."""

import json
import re
from pathlib import Path

import pytest

from stackcheck import vendors
from stackcheck.vendors import environment

ROOT = Path(__file__).resolve().parents[3]
PATHS = sorted((ROOT / "tests/acceptance/vendors").glob("*_environment.json"))
OF = {"nvidia": ("nvidia", "nccl", "torch"), "amd": ("amd", "nccl", "torch"), "cpu": ("cpu",)}


def told(name: str) -> dict:
    def once(pairs: list[tuple[str, object]]) -> dict:
        assert len({key for key, _ in pairs}) == len(pairs), f"{name}: a key is there twice: {pairs}"
        return dict(pairs)

    text = (ROOT / "tests/acceptance/vendors" / f"{name}_environment.json").read_text(encoding="utf-8")
    return json.loads(text, object_pairs_hook=once)


def values(vendor: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in OF[vendor]:
        for group in told(name)["groups"]:
            for variable, some in group["variables"].items():
                found.setdefault(variable, []).extend(some)
    return found


def test_each_table_is_read_by_a_vendor():
    assert {path.name.removesuffix("_environment.json") for path in PATHS} == {*sum(OF.values(), ())}


@pytest.mark.parametrize("name", sorted({*sum(OF.values(), ())}))
def test_each_group_has_a_source_and_values(name):
    table = told(name)
    assert table.keys() - {"devices"} == {"about", "groups"}
    for group in table["groups"]:
        assert group.keys() - {"refused", "without"} == {"source", "variables"}
        assert "." in group["source"]
        for variable, some in group["variables"].items():
            assert re.fullmatch(r"[A-Z][A-Z0-9_]+", variable)
            assert some, variable
            assert all(isinstance(one, str) for one in some), variable
            assert len({*some}) == len(some), variable
        for part in ("refused", "without"):
            assert group.get(part, {}).keys() <= group["variables"].keys()
        assert all(re.compile(words) for words in group.get("refused", {}).values())


@pytest.mark.parametrize("vendor", OF)
def test_no_value_is_there_twice_and_none_is_dangerous(vendor):
    found = values(vendor)
    assert all(len({*some}) == len(some) for some in found.values())
    assert not [name for name in found if vendors.hides_devices(name)], "devices are drawn from what is there"
    assert found.get("NCCL_NVLS_ENABLE", ["0"]) == ["0"], "NVLink multicast stays off"
    assert not {"LL128", "Simple,LL128"} & {*found.get("NCCL_PROTO", ())}, "it may corrupt data where forced"
    steering = ("LD_", "PYTHONPATH", "PYTHONHOME", "HSA_OVERRIDE", "TORCH_ALLOW_TF32", "PYTEST", "STACKCHECK")
    assert not [name for name in found if name.startswith(steering)]


@pytest.mark.parametrize("vendor", [name for name in OF if name != "cpu"])
def test_what_hides_devices_is_what_the_tool_knows(vendor):
    devices = told(vendor)["devices"]
    names = [name for level in devices["levels"] for name in level]
    assert all(vendors.hides_devices(name) for name in names)
    assert {*devices["ids"]} <= {*names}
    assert "." in devices["source"]


@pytest.mark.parametrize("vendor", OF)
def test_what_images_and_jobs_set_for_speed_is_drawn(vendor):
    """`stackcheck.vendors.environment` says what AMD's containers set; an image with it must be right too."""
    for one in environment.variables(vendor):
        assert {*one.values} <= {*values(vendor).get(one.name, ())}, one.name
