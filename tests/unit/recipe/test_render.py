import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest

from stackcheck.matrix import resolve
from stackcheck.matrix.stack import Stack
from stackcheck.recipe import render, stack_table

ROOT = Path(__file__).parents[3]
IMAGES = ROOT / "images"
STACKS = resolve.load_stacks(ROOT)
every_stack = pytest.mark.parametrize("stack", STACKS, ids=lambda stack: stack.id)


def test_committed_files_are_what_the_templates_say():
    assert render.check(STACKS, IMAGES) == ()
    assert stack_table.is_fresh(IMAGES / "README.md", STACKS)


@every_stack
def test_the_final_stage_starts_from_the_base_and_copies_no_build_tree(stack: Stack):
    final = render.render(stack, IMAGES)["Dockerfile"].partition(" AS final")[2]
    assert "USER 1000:1000" in final
    assert set(re.findall(r"COPY --from=(\S+)", final)) <= {"wheels", "extended", "smi", "chosen"}


@every_stack
def test_every_install_is_by_hash_and_no_secret_becomes_a_layer(stack: Stack):
    dockerfile = render.render(stack, IMAGES)["Dockerfile"]
    assert "--require-hashes -r requirements.lock" in dockerfile
    assert "# syntax=" not in dockerfile
    assert not re.search(r"^(COPY|ADD|ENV|ARG).*(pip\.conf|ca-certificates\.crt)", dockerfile, re.MULTILINE)


@pytest.mark.parametrize(
    "stack",
    [stack for stack in STACKS if stack.flash_attn and stack.flash_attn.form == "source"],
    ids=lambda stack: stack.id,
)
def test_architectures_are_always_named_where_something_compiles(stack: Stack):
    dockerfile = render.render(stack, IMAGES)["Dockerfile"]
    names = (
        ["GPU_ARCHS", "PYTORCH_ROCM_ARCH"]
        if stack.vendor == "amd"
        else ["FLASH_ATTN_CUDA_ARCHS", "TORCH_CUDA_ARCH_LIST"]
    )
    assert all(re.search(rf'{name}="[^"]+"', dockerfile) for name in names)
    assert "MAX_JOBS=" in dockerfile
    assert "native" not in dockerfile.replace("`native` by default", "")


def test_a_digest_in_the_pins_reaches_the_dockerfile():
    stack = next(stack for stack in STACKS if stack.base.kind == "registry")
    base = dataclasses.replace(stack.base, digest="sha256:" + "0" * 64)
    dockerfile = render.render(dataclasses.replace(stack, base=base), IMAGES)["Dockerfile"]
    assert f"FROM {base.reference}@{base.digest} AS base" in dockerfile


@every_stack
def test_the_declaration_is_the_contract_of_the_image_suite(stack: Stack):
    declared = json.loads(render.render(stack, IMAGES)["stack.json"])
    assert declared["schema"] == 1
    assert declared["packages"].get("torch", "").startswith(stack.torch or "")
    assert declared["stack_id"] == stack.id


@every_stack
def test_every_package_of_the_distribution_has_a_reason_and_a_link_in_the_dockerfile(stack: Stack):
    head = render.render(stack, IMAGES)["Dockerfile"].partition(" AS base")[0]
    reasons = re.findall(r"^#   ([a-z0-9.+ -]+): .+: https://\S+$", head, re.MULTILINE)
    assert sorted(" ".join(reasons).split()) == sorted(set(stack.base.packages))


def test_a_stack_is_locked_or_unlocked_and_nothing_else():
    cells = {row.split(" | ")[-1].removesuffix(" |") for row in stack_table.markdown(STACKS).splitlines()[2:]}
    assert cells == {"locked", "unlocked"}


def test_the_table_marks_an_experimental_stack():
    marked = stack_table.markdown([dataclasses.replace(STACKS[0], experimental=True), STACKS[1]])
    assert f"| `{STACKS[0].id}` (experimental) |" in marked
    assert f"| `{STACKS[1].id}` |" in marked


def test_drift_leftovers_and_missing_files_are_found_and_mended(tmp_path: Path):
    images = tmp_path / "images"
    shutil.copytree(IMAGES, images)
    (images / STACKS[0].id / "Dockerfile").write_text("FROM scratch\n")
    (images / STACKS[1].id / "stack.json").unlink()
    (images / "rocm9.9").mkdir()
    (images / "rocm9.9" / "stack.json").write_text("{}")
    lines = render.check(STACKS, images)
    assert len(lines) == 3
    assert "differs" in lines[0]
    assert "missing" in lines[1]
    assert "no stack" in lines[2]
    assert len(render.write(STACKS, images)) == 2
    assert len(render.check(STACKS, images)) == 1


@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: stack.id)
def test_labels_name_the_stack_its_version_and_its_base_and_nothing_that_changes(stack: Stack):
    found = render.labels(stack)
    assert found["org.opencontainers.image.title"] == stack.id
    assert found["org.opencontainers.image.version"]
    if stack.base.kind == "registry":
        assert found["org.opencontainers.image.base.name"] == stack.base.reference
        assert found.get("org.opencontainers.image.base.digest") == stack.base.digest
    else:
        assert stack.base.suite in found["stackcheck.base"]
    # Two builds of one lock are one image: a date or a commit in it would make them two.
    assert not {"org.opencontainers.image.created", "org.opencontainers.image.revision"} & set(found)
