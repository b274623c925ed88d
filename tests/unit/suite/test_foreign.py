"""An image from elsewhere is held to the same known issues as a stack of the matrix with its versions."""

import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from result_files import CONFIG_DIGEST, check, result
from stackcheck.errors import ConfigurationError
from stackcheck.matrix import known_issues
from stackcheck.matrix.rules import one_of
from stackcheck.suite import foreign, results, verdict
from stackcheck.suite.requirements import Requirements
from stackcheck.suite.subject import find_stack
from stackcheck.vendors import Host, HostDevice

ROOT = Path(__file__).resolve().parents[3]
ISSUES = known_issues.load_known_issues(ROOT / "images" / "known-issues.yaml")
# How a distribution of each axis is called in images that are really published.
NAMES = {
    "torch": ("torch",),
    "triton": ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm"),
    "flash_attn": ("flash-attn", "flash_attn", "flash-attn-3"),
    "nccl": ("nvidia-nccl-cu12", "nvidia-nccl-cu13"),
    "amdsmi": ("amdsmi",),
}
ARCHS = {"nvidia": "sm_90", "amd": "gfx942", "cpu": ""}


def version_for(axis: str, patterns: tuple[str, ...], *, hit: bool) -> str | None:
    """A version that fits the patterns, or one that does not; None if there is none."""
    named = [int(number) for pattern in patterns for number in re.findall(r"\d+", pattern)]
    parts = sorted({0, 1, *named, *(number + 1 for number in named)})
    candidates = (f"{a}.{b}.{c}" for a, b, c in itertools.product(parts, parts, parts))
    fits = one_of(axis, patterns)
    return next((version for version in candidates if fits(version) == hit), None)


def image_and_host(issue: known_issues.KnownIssue, name: int, *, without: str | None = None) -> Any:
    """An SBOM and a host that the issue hits; without one of its axes it does not."""
    told = {axis: version_for(axis, patterns, hit=axis != without) for axis, patterns in issue.when.items()}
    vendor = issue.when["vendor"][0] if "vendor" in issue.when else "nvidia"
    local = ""
    if cuda := told.get("cuda"):
        local = "+cu" + "".join(cuda.split(".")[:2])
    if rocm := told.get("rocm"):
        local = f"+rocm{rocm}"
    versions = {"torch": f"{told.get('torch') or '99.0'}{local}"}
    for axis, names in NAMES.items():
        if axis != "torch" and (version := told.get(axis)):
            versions[names[name % len(names)]] = version
    arch = issue.when.get("arch", (ARCHS[vendor],))[0].replace("*", "0")
    device = HostDevice(model="any", arch=arch, id="id-0", memory_bytes=1)
    return sbom(versions), host_of(vendor, device, driver=told.get("driver"))


def host_of(vendor: Any, *devices: HostDevice, driver: str | None = None) -> Host:
    return Host(
        vendor=vendor,
        devices=devices,
        driver=driver,
        kernel="6",
        partition=None,
        nvls="off",
        cpu="any",
        memory_bytes=1,
    )


def sbom(versions: Mapping[str, str]) -> dict[str, Any]:
    listed = [{"name": name, "version": at, "purl": f"pkg:pypi/{name}@{at}"} for name, at in versions.items()]
    return {"components": listed}


@pytest.mark.parametrize("name", range(4))
@pytest.mark.parametrize("issue", ISSUES, ids=lambda issue: issue.id)
def test_an_image_with_the_versions_of_an_issue_has_it(issue, name):
    document, host = image_and_host(issue, name)
    assert issue in foreign.issues(document, host, ROOT)
    for axis in issue.when.keys() & {"torch", "triton", "nccl", "rocm", "cuda", "driver"}:
        if version_for(axis, issue.when[axis], hit=False):
            document, host = image_and_host(issue, name, without=axis)
            assert issue not in foreign.issues(document, host, ROOT), axis


@pytest.mark.parametrize("issue", ISSUES, ids=lambda issue: issue.id)
def test_a_refused_combination_fails_whatever_its_checks_say(issue):
    run = results.parse(json.dumps(result(check("test_devices.py::test_device_count"))).encode())
    needed = Requirements(checks=("test_devices.py::test_device_count",), image_config_digest=CONFIG_DIGEST)
    assert verdict.judge(run, needed).status == "PASSED"
    judged = verdict.judge(run, Requirements(**{**vars(needed), "known_issues": (issue,)}))
    assert judged.status == ("FAILED" if issue.severity == "refuse" else "PASSED")
    assert judged.as_json()["known_issues"] == [issue.as_json()]
    assert all(issue.id in reason for reason in judged.reasons)


@pytest.mark.parametrize(
    ("version", "found"),
    [
        *(("2.9.0+cu130", {"cuda": "13.0"}), ("2.9.0+cu126", {"cuda": "12.6"}), ("2.9.0+cpu", {})),
        *(("2.9.0+rocm6.4", {"rocm": "6.4.0"}), ("2.12.1+rocm7.2.1", {"rocm": "7.2.1"})),
        ("2.9.1+rocm7.2.0.lw.git7e1940d4", {"rocm": "7.2.0"}),
        *(("2.8.0a0+34c6371d24.nv25.08", {}), ("2.9.0", {}), ("2.9.0+gitcu", {})),
    ],
)
def test_torch_names_its_runtime(version, found):
    assert dict(foreign.versions(sbom({"torch": version}))) == {"torch": version, **found}


PACKAGES = st.dictionaries(st.sampled_from("abcd"), st.sampled_from("123"))


@given(PACKAGES, PACKAGES)
def test_the_changes_of_packages_turn_one_list_into_the_other(before, after):
    made = dict(before)
    for line in foreign.changes(sbom(before), sbom(after)):
        words = line.split()
        if words[0] == "+":
            assert words[1] not in made
            made[words[1]] = words[2]
        elif words[0] == "-":
            assert made.pop(words[1]) == words[2]
        else:
            assert made[words[0]] == words[1]
            made[words[0]] = words[3]
    assert made == after


@pytest.mark.parametrize(
    "name",
    [
        "a:b",
        "host/a",
        "host:5000/a/b:1",
        "localhost/a-1.b:x",
        "a@sha256:" + "0" * 64,
        "sha256:" + "f" * 64,
        "a__b--c/d.e:T_1",
    ],
)
def test_a_name_that_an_engine_may_have_is_taken(name):
    assert find_stack(name, ROOT) is None


@pytest.mark.parametrize(
    "name",
    [
        "oci:dist:nothing",
        "oci:/nope:x",
        "a:",
        ":a",
        "a:b:c",
        "/a",
        "a//b",
        "UPPER/lower:",
        "a@sha256:12",
        "a b:c",
        "a:é",
        "a:b\n",
    ],
)
def test_a_name_that_no_engine_has_is_refused_before_an_engine_is_asked(name):
    with pytest.raises(ConfigurationError) as error:
        find_stack(name, ROOT)
    assert error.value.got == name
    assert ("stackcheck pull" in str(error.value.next_step)) is name.startswith("oci:")
