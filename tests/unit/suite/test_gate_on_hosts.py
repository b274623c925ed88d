"""The gate over results of H100 and H200 with torch 2.11: refused for public faults of torch and cuDNN.

It is PASSED only with a waiver for each of them.
"""

import datetime as dt
import fnmatch
import json
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

import result_files
from stackcheck import vendors
from stackcheck.matrix import matrix
from stackcheck.policy import Waiver, names
from stackcheck.suite import bounds, expected, results, skips, verdict
from stackcheck.suite.requirements import Requirements

pytestmark = pytest.mark.usefixtures("suites_asked_here")
ROOT = Path(__file__).resolve().parents[3]
STACK = "cuda13.0-torch2.11.0-fa4.0.0b36-py3.12-ubuntu24.04"
KEPT = {("H200", 1): "h200-x1-again", ("H200", 2): "h200-x2-standard", ("H100", 1): "h100-x1-first"}
on_every_host = pytest.mark.parametrize("host", KEPT, ids=lambda host: f"{host[0]} x{host[1]}")
RESULTS = {
    host: results.load_result(ROOT / "docs" / "results" / f"suites-{name}.json")
    for host, name in KEPT.items()
}
IMAGES_NAME = "stack-h200-x2-fa4"
IMAGE = results.load_result(ROOT / "docs" / "results" / IMAGES_NAME / "result.json")
# Result -> the checks that the suites have since that run: `make lists` writes it.
NEWER_FILE = Path(__file__).with_name("newer_checks.json")
NEWER = json.loads(NEWER_FILE.read_text(encoding="utf-8"))
# What fails on that host -> why. The last one is about the bare host: nobody builds an image with such files.
KNOWN = {
    "test_attention.py::test_attention_of_models[default-*]": "pytorch/pytorch#196678",
    "test_attention.py::test_attention_of_models[cudnn-*]": "pytorch/pytorch#196678",
    "test_compiled.py::test_compiled_norms_sharing_a_table": "pytorch/pytorch#193061",
    "test_compiled.py::test_compiled_sums_in_place": "pytorch/pytorch#180642",
    "test_image.py::test_nothing_runs_unasked_when_python_starts": "https://docs.python.org/3/library/site.html",
}


WAIVERS = tuple(
    Waiver.model_validate(result_files.waiver(check, issue=issue)) for check, issue in KNOWN.items()
)
POLICY = matrix.load_matrix(ROOT / "matrix.yaml").policy
# The waivers of the matrix for our own image, as on the day of its run: they end, and its result stays.
OURS = tuple(
    one.model_copy(update={"until": dt.date.max})
    for one in POLICY.waivers
    if any(fnmatch.fnmatchcase(STACK, pattern) for pattern in one.stacks)
)


def today(host: tuple[str, int]) -> tuple[str, ...]:
    """The checks that this checkout's suites run on such a host."""
    return expected.check_ids(ROOT, vendor="nvidia", tier="standard", count=host[1])


def test_the_list_of_newer_checks_is_up_to_date():
    runs = {f"{host[0]} x{host[1]}": (host, result) for host, result in RESULTS.items()}
    found = {
        name: sorted({*today(host)} - {check.id for check in result.checks})
        for name, (host, result) in (runs | {IMAGES_NAME: (("H200", 2), IMAGE)}).items()
    }
    if os.environ.get("STACKCHECK_WRITE_CHECKS"):
        NEWER_FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    assert json.loads(NEWER_FILE.read_text(encoding="utf-8")) == found, "write it again: make lists"


def gate(
    result: results.RunResult, checks: Iterable[str], waivers: tuple[Waiver, ...], image: str
) -> verdict.Verdict:
    """Today's verdict on a result, held to these checks."""
    rows = {row["model"]: row for row in vendors.device_table()}
    needed = Requirements(
        checks=tuple(checks),
        image_config_digest=image,
        vendor="nvidia",
        devices=tuple(device.id for device in result.host.devices),
        facts=skips.Facts(rows=[rows[device.model] for device in result.host.devices]),
        advisory=POLICY.advisory,
        waivers=waivers,
        same_thresholds=False,  # some bounds are better since
    )
    return verdict.judge(result, needed, bounds.look_up(result, ROOT))


def judged(host: tuple[str, int], *waivers: Waiver) -> verdict.Verdict:
    newer = NEWER[f"{host[0]} x{host[1]}"]
    asked = (name for name in today(host) if name not in newer)
    return gate(RESULTS[host], asked, waivers, "no image")  # the bare host


def checks_of(reasons: tuple[str, ...]) -> set[str]:
    """The waivers of `KNOWN` and of the matrix that the reasons ask for; else the check."""
    named = [*KNOWN, *(one.check for one in OURS)]
    found = {reason.partition(" ")[0].rstrip(":") for reason in reasons}
    return {next((one for one in named if names(one, check)), check.partition("[")[0]) for check in found}


def of_image(*waivers: Waiver) -> verdict.Verdict:
    """Today's verdict on the image that was built here."""
    assert IMAGE.image is not None
    asked = (name for name in today(("H200", 2)) if name not in NEWER[IMAGES_NAME])
    return gate(IMAGE, asked, waivers, IMAGE.image.config_digest)


def test_an_image_of_our_own_passes_with_the_waivers_of_the_matrix_and_without_none_of_them():
    """docs/results/stack-h200-fa4.md: the image that was published, on two H200s."""
    found = of_image(*OURS)
    assert (found.status, found.reasons) == ("PASSED", ())
    for missing in OURS:
        found = of_image(*(one for one in OURS if one is not missing))
        assert (found.status, checks_of(found.reasons)) == ("FAILED", {missing.check})


@on_every_host
@pytest.mark.parametrize("missing", range(len(WAIVERS)))
def test_each_of_them_needs_a_waiver_of_its_own(missing, host):
    found = judged(host, *(one for number, one in enumerate(WAIVERS) if number != missing))
    assert (found.status, checks_of(found.reasons)) == ("FAILED", {WAIVERS[missing].check})


@on_every_host
def test_with_waivers_it_passes_and_the_certificate_names_them(host):
    found = judged(host, *WAIVERS)
    assert (found.status, found.reasons) == ("PASSED", ())
    assert checks_of(found.warned) == set(KNOWN)
    assert found.waivers == WAIVERS
    assert {device.model for device in RESULTS[host].host.devices} == {host[0]}


@on_every_host
def test_with_the_waivers_of_the_matrix_only_the_bare_host_is_left_to_blame(host):
    found = judged(host, *OURS)
    assert checks_of(found.reasons) == {"test_image.py::test_nothing_runs_unasked_when_python_starts"}
    assert judged(host, *OURS, WAIVERS[-1]).status == "PASSED"
