import json
import re
from pathlib import Path

import pytest

from stackcheck.errors import ConfigurationError, NothingSelectedError
from stackcheck.files import yamlfile
from stackcheck.matrix import compat, matrix, pins, resolve
from stackcheck.matrix.stack import Package, Replacement, Stack

ROOT = Path(__file__).parents[3]
RULES = compat.load_rules(ROOT / "images" / "compat.yaml")
STACKS = {stack.id: stack for stack in resolve.load_stacks(ROOT)}
SELF_BUILT = "cuda13.0-torch2.13.0-py3.11-debian12"


def _resolved(**block: object) -> tuple[Stack, ...]:
    value = yamlfile.load_yaml(ROOT / "matrix.yaml")
    next(one for one in value["stacks"] if one.get("version") == "12.6").update(block)
    return resolve.resolve(matrix.parse(value), RULES)


def test_triton_and_the_collective_library_follow_from_the_rules():
    stack = STACKS["rocm7.2.1-torch2.13.0-fa2.8.3-py3.12-ubuntu24.04"]
    assert stack.triton == Package(name="triton-rocm", version="3.7.1")
    assert stack.collective == Package(name="rccl", version="2.27.7")


def test_flash_attention_comes_as_a_wheel_only_where_everything_matches():
    forms = {stack.id: stack.flash_attn.form for stack in STACKS.values() if stack.flash_attn}
    assert forms["cuda12.8-torch2.8.0-fa2.8.3-py3.12-ubuntu24.04"] == "wheel"
    assert forms["cuda13.0-torch2.13.0-fa2.8.3-py3.12-ubuntu24.04"] == "source"
    assert all(form == "source" for id_, form in forms.items() if id_.startswith("rocm"))


def test_flash_attention_4_is_a_package_of_the_index_and_a_declared_one():
    (stack,) = (found for found in STACKS.values() if "-fa4" in found.id)
    assert stack.flash_attn
    assert (stack.flash_attn.form, stack.flash_attn.package) == ("index", "flash-attn-4")
    assert "flash-attn-4==4.0.0b36" in stack.requirements
    assert stack.experimental


@pytest.mark.parametrize(
    ("id_", "torch"),
    [
        ("cpu-torch2.13.0-py3.11-debian12", "torch==2.13.0+cpu"),
        ("rocm6.2.4-torch2.6.0-fa2.7.4.post1-py3.10-ubuntu22.04", "torch==2.6.0+rocm6.2.4"),
        ("rocm7.2.1-torch2.13.0-fa2.8.3-py3.12-ubuntu24.04", "torch==2.13.0+rocm7.2"),
        ("cuda12.8-torch2.8.0-fa2.8.3-py3.12-ubuntu24.04", "torch==2.8.0+cu128"),
        (SELF_BUILT, "torch==2.13.0"),
    ],
)
def test_the_requirement_names_the_wheel_that_was_built_for_the_runtime(id_, torch):
    assert STACKS[id_].requirements[0] == torch


def test_a_cell_that_breaks_a_rule_stops_with_its_place_rule_and_source():
    with pytest.raises(
        ConfigurationError, match=r"stacks\[\d+\]: .* breaks R1-upstream-cuda\[2.7.1\]: .*\[TI\]"
    ):
        _resolved(version="13.0")


PAIR = "cuda13.0-torch2.13.0-nccl{}-py3.11-debian12"


def _chosen(**axes: object) -> dict[str, Stack]:
    value = yamlfile.load_yaml(ROOT / "matrix.yaml")
    value["stacks"] = [{**one, **axes} for one in value["stacks"] if one.get("nccl")]
    value["include"], value["overrides"] = [], []
    return {stack.id: stack for stack in resolve.resolve(matrix.parse(value), RULES)}


def test_a_product_over_nccl_replaces_only_what_torch_does_not_pin():
    found = _chosen(nccl=["2.29.7", "2.30.7"])
    assert list(found) == [PAIR.format("2.29.7"), PAIR.format("2.30.7")]
    own, newer = found.values()
    assert own.replacements == ()
    assert newer.replacements == (
        Replacement(name="nvidia-nccl-cu13", version="2.30.7", instead_of="2.29.7"),
    )
    assert newer.collective == Package(name="nccl", version="2.30.7")
    assert "nvidia-nccl-cu13==2.30.7" in newer.frozen


def test_a_chosen_triton_replaces_torchs_pin():
    (found,) = _chosen(nccl="2.29.7", triton="3.8.0").values()
    assert found.id == "cuda13.0-torch2.13.0-nccl2.29.7-triton3.8.0-py3.11-debian12"
    assert found.replacements == (Replacement(name="triton", version="3.8.0", instead_of="3.7.1"),)


@pytest.mark.parametrize(
    ("axes", "line"),
    [
        ({"nccl": "2.28.9"}, r"breaks R9-nccl-cuda13\[2.13.0\]: "),
        ({"nccl": "2.30.7", "experimental": False}, r"breaks R9-nccl-cuda13-untested\[2.13.0\]: "),
        ({"triton": "3.6.0"}, r"breaks R2-triton\[2.13.0\]: "),
        ({"triton": "3.8.0", "experimental": False}, r"breaks R2-triton-untested\[2.13.0\]: "),
        ({"nccl": "2.99.1", "experimental": False}, r"breaks R0-known\[nccl\]"),
    ],
)
def test_an_older_library_is_refused_and_a_newer_one_only_as_an_experiment(axes, line):
    with pytest.raises(ConfigurationError, match=line):
        _chosen(**axes)


@pytest.mark.parametrize(
    ("block", "line"),
    [
        ({"runtime": "rocm", "nccl": "2.29.7"}, r"\.nccl: only a CUDA stack .* RCCL is inside torch's wheel"),
        ({"runtime": "cpu", "version": None, "triton": "3.8.0"}, r"\.triton: only a GPU stack"),
        ({"runtime": "rocm", "rccl": "2.28.9"}, r"\.rccl: RCCL cannot be chosen: .* the ROCm that has"),
    ],
)
def test_what_is_no_package_of_its_own_cannot_be_chosen(block, line):
    with pytest.raises(ConfigurationError, match=line):
        _chosen(**{"nccl": None, **block})


@pytest.mark.parametrize(
    "stack", [stack for stack in STACKS.values() if stack.vendor != "cpu"], ids=lambda one: one.id
)
def test_a_test_target_is_a_known_device_whose_architecture_is_in_the_image_and_whose_driver_serves_it(stack):
    path = ROOT / "tests" / "acceptance" / "devices.json"
    devices = {device["model"]: device for device in json.loads(path.read_text(encoding="utf-8"))["devices"]}
    for target in stack.tested_on or ():
        device = devices[target.device]
        assert (device["vendor"], device["arch"] in stack.archs) == (stack.vendor, True)
        asked = {"vendor": stack.vendor, stack.runtime: stack.runtime_version, "arch": device["arch"]}
        assert not RULES.broken({**asked, "driver": target.driver})


def test_selectors_are_patterns_and_one_that_matches_nothing_is_an_error():
    stacks = tuple(STACKS.values())
    assert {stack.runtime for stack in resolve.select(stacks, ["rocm7*"])} == {"rocm"}
    with pytest.raises(NothingSelectedError):
        resolve.select(stacks, ["rocm99*"])


GOOD_PINS = {"schema": 1, "missing": [], "bases": {}, "sources": {}}


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("{", "x/pins.json"),
        ("[" * 100_000, "x/pins.json"),
        (json.dumps({**GOOD_PINS, "schema": 2}), "x/pins.json: schema"),
        (json.dumps({**GOOD_PINS, "missing": ["torch\nRUN id"]}), r"x/pins.json: missing\[0\]"),
        (json.dumps({**GOOD_PINS, "missing": "torch"}), "x/pins.json: missing"),
        (json.dumps({**GOOD_PINS, "bases": {"ubuntu:24.04": "latest"}}), "x/pins.json: bases"),
        (
            json.dumps({**GOOD_PINS, "bases": {"a:b": "sha256:" + "0" * 64 + "\nRUN id"}}),
            "x/pins.json: bases",
        ),
        (json.dumps({**GOOD_PINS, "sources": {"flash-attn": {"sha256": "$(id)"}}}), "x/pins.json: sources"),
    ],
    ids=lambda value: value[:60],
)
def test_broken_pins_are_an_error_that_names_the_file(tmp_path, text, place):
    folder = tmp_path / "images" / "x"
    folder.mkdir(parents=True)
    (folder / "pins.json").write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        pins.read_pins(tmp_path)
    assert re.search(place, str(caught.value))
