"""The seven failures that come back in every public project that builds GPU images: each is refused here."""

import re
from pathlib import Path

import pytest

from stackcheck.matrix import compat, explain, resolve
from stackcheck.matrix.explain import parse_question
from stackcheck.matrix.stack import Stack

ROOT = Path(__file__).parents[3]
RULES = compat.load_rules(ROOT / "images" / "compat.yaml")
STACKS = resolve.load_stacks(ROOT)


@pytest.mark.parametrize(
    ("question", "rule"),
    [
        pytest.param(
            "rocm=7.2 torch=2.13.0 wheels=upstream triton_package=triton",
            "R2-name-from-2.10",
            id="1-replaced",
        ),
        pytest.param(
            "rocm=7.2 torch=2.13.0 wheels=index", "R1-index-has-no-rocm", id="1-cuda-torch-in-a-rocm-image"
        ),
        pytest.param(
            "cuda=13.0 torch=2.9.1 flash_attn=2.8.3 flash_attn_from=wheel", "R7-wheel-cuda[2.8.3]", id="2-abi"
        ),
        pytest.param("torch=2.9.1 cxx11abi=FALSE", "R7-abi-true", id="2-old-abi"),
        pytest.param("cuda=13.0 torch=2.13.0 nccl=2.28.9", "R9-nccl-cuda13[2.13.0]", id="3-nccl"),
        pytest.param("rocm=7.2 torch=2.13.0 beside=tensorflow", "R9-one-copy", id="4-two-copies"),
        pytest.param("rocm=7.14 torch=2.14.1 device_wheels=all", "R11-one-device", id="5-size"),
        pytest.param("rocm=7.2 render_gid=109", "R13-render-group", id="6-render-group"),
        pytest.param(
            "rocm=7.2 flash_attn=2.8.3 flash_attn_backend=triton variables=build",
            "R14-run-time-variables",
            id="7-variable",
        ),
    ],
)
def test_explain_refuses_a_known_failure_with_reason_source_and_a_way_out(question: str, rule: str):
    found = explain.explain(parse_question(question.split(), RULES), RULES)
    assert found.judgement.answer == "refused"
    assert rule in {broken.id for broken in found.judgement.broken}
    assert all(broken.because and broken.source for broken in found.judgement.broken)
    assert found.nearest


@pytest.mark.parametrize("stack", [stack for stack in STACKS if stack.torch], ids=lambda stack: stack.id)
def test_every_image_freezes_its_torch_and_triton(stack: Stack) -> None:
    dockerfile = (ROOT / "images" / stack.id / "Dockerfile").read_text(encoding="utf-8")
    names = [pin.partition("==")[0] for pin in stack.frozen]
    # The constraints are what was installed, and the build fails where one of them is not.
    pattern = "|".join(re.sub("[-_.]+", "[-_.]", name) for name in names)
    assert f"grep -Eix '({pattern})==.*' versions > constraints.txt" in dockerfile
    assert f'[ "$(wc -l < constraints.txt)" = {len(names)} ]' in dockerfile
    assert 'PIP_CONSTRAINT="/opt/stackcheck/constraints.txt"' in dockerfile
    if stack.vendor != "cpu":
        assert stack.triton
        assert f"{stack.triton.name}=={stack.triton.version}" in stack.frozen


def test_a_run_time_variable_is_env_of_the_image_and_of_the_build():
    stack = next(stack for stack in STACKS if stack.flash_attn and stack.flash_attn.backend == "triton")
    dockerfile = (ROOT / "images" / stack.id / "Dockerfile").read_text(encoding="utf-8")
    build, _, final = dockerfile.partition("FROM base AS final")
    assert 'FLASH_ATTENTION_TRITON_AMD_ENABLE="TRUE"' in build
    assert 'FLASH_ATTENTION_TRITON_AMD_ENABLE="TRUE"' in final


def test_no_image_builds_a_render_group_in():
    assert all(
        "render" not in path.read_text("utf-8").split("\n", 4)[4] for path in ROOT.glob("images/*/Dockerfile")
    )


def test_every_stack_has_a_size_budget():
    assert all(0 < stack.size_budget_bytes <= 20e9 for stack in STACKS)
