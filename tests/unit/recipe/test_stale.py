"""`render --check` sees pins and locks that no longer say what their stack needs; the committed ones do."""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stackcheck.matrix import resolve
from stackcheck.matrix.stack import Package
from stackcheck.recipe import indexes, lock, render, rocm, stack_table
from stackcheck.recipe.extensions import extensions

ROOT = Path(__file__).parents[3]
STACKS = resolve.load_stacks(ROOT)


def chosen(stacks: tuple[resolve.Stack, ...]) -> list[resolve.Stack]:
    """Stacks of each kind: AMD's package, wheels of extensions, sources, locked, with a replaced package."""
    kinds = (
        rocm.takes_smi,
        lambda stack: any(extension.wheel for extension in extensions(stack)),
        lambda stack: any(not extension.wheel for extension in extensions(stack)),
        lambda stack: not stack.missing,
        lambda stack: stack.replacements,
    )
    found = [one for kind in kinds for one in [stack for stack in stacks if kind(stack)][:2]]
    return list({one.id: one for one in found}.values())


@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: stack.id)
def test_the_pins_of_this_checkout_are_what_their_stacks_need(stack):
    assert render.stale(stack, ROOT / "images") == ()


def drop_a_reason(pins: dict[str, Any]) -> None:
    if pins["missing"]:
        pins["missing"] = pins["missing"][:-1] or ["something else"]


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no entry of AMD's package": lambda pins: pins.pop("debs", None),
    "a package that it does not need": lambda pins: pins.setdefault("debs", {}).update(other=None),
    "no bases": lambda pins: pins.update(bases={}),
    "another base": lambda pins: pins["bases"].update({"ubuntu:18.04": None}),
    "no sources": lambda pins: pins.update(sources={}),
    "another version": lambda pins: [source.update(version="0.1") for source in pins["sources"].values()],
    "said to be locked": lambda pins: pins.update(locked=not pins["locked"]),
    "of another stack": lambda pins: pins.update(stack_id="cpu"),
    "a reason less": drop_a_reason,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("stack", chosen(STACKS), ids=lambda stack: stack.id)
def test_a_change_of_the_pins_is_seen_unless_it_says_the_same(stack, change, tmp_path):
    folder = tmp_path / stack.id
    shutil.copytree(ROOT / "images" / stack.id, folder)
    path = folder / "pins.json"
    before = json.loads(path.read_text())
    pins = json.loads(path.read_text())
    CHANGES[change](pins)
    path.write_text(json.dumps(pins))
    same = pins == before
    if change == "a reason less":  # a reason that names no entry is not missed
        gone = [reason for reason in before["missing"] if reason not in pins["missing"]]
        entries = [*before["bases"], *before.get("debs", {})]
        same = not any(name in reason for reason in gone for name in entries)
    assert bool(render.stale(stack, tmp_path)) == (not same)


def test_a_lock_that_lacks_a_requirement_or_is_not_needed_is_seen(tmp_path):
    (stack,) = (one for one in STACKS if one.vendor == "cpu")
    shutil.copytree(ROOT / "images" / stack.id, tmp_path / stack.id)
    path = tmp_path / stack.id / "requirements.lock"
    text = path.read_text()
    path.write_text(text.replace("\nnumpy==", "\nnumpx=="))
    (line,) = render.stale(stack, tmp_path)
    assert line.startswith(f"images/{stack.id}/requirements.lock: does not hold every one of ")
    path.write_text(text)
    (path.parent / "flash-attn.lock").write_text("flash-attn==2.8.3\n")
    (line,) = render.stale(stack, tmp_path)
    assert "flash-attn.lock: the stack does not need it" in line
    shutil.rmtree(path.parent)
    assert render.stale(stack, tmp_path) == (f"images/{stack.id}/pins.json: is missing",)


CPU = resolve.select(STACKS, ["cpu*"])[0]
LOCKS = sorted(ROOT.glob("images/*/*.lock"))
PINS = sorted(ROOT.glob("images/*/pins.json"))


def test_every_locked_package_has_a_hash():
    for path in LOCKS:
        names = re.findall(r"^[\w.-]+==", path.read_text("utf-8"), re.MULTILINE)
        assert len(indexes.read_lock(path)) == len(names) > 0


def test_no_lock_names_an_index_host_or_a_path():
    for path in LOCKS:
        body = [line for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]
        assert not any("://" in line or line.startswith(("-", "/")) for line in body)


def test_pins_and_locks_tell_the_same_checksums():
    for path in PINS:
        for name, source in json.loads(path.read_text("utf-8"))["sources"].items():
            locked = indexes.read_lock(path.with_name(f"{name}.lock")).get(name)
            assert (locked and locked[1]) == (source["sha256"] and (f"sha256:{source['sha256']}",))


def test_a_lock_that_disagrees_with_the_rules_is_not_complete():
    stack = resolve.select(STACKS, ["cuda13.0-*debian12"])[0]
    path = ROOT / "images" / stack.id / "requirements.lock"
    assert lock.disagreements(stack, path) == []
    wrong = dataclasses.replace(stack, triton=Package(name="triton", version="3.6.0"))
    assert lock.disagreements(wrong, path) == ["the indexes give triton 3.7.1, the rules 3.6.0"]


def test_what_is_missing_is_named_and_not_invented():
    stack = resolve.select(STACKS, ["rocm7.2.1-torch2.13.0*"])[0]
    assert stack.base.digest is None
    assert any("ubuntu:24.04" in reason for reason in stack.missing)
    assert any("download.pytorch.org/whl/rocm7.2" in reason for reason in stack.missing)


def test_the_cpu_stack_is_locked():
    assert CPU.missing == ()


IMAGES = ROOT / "images"
every_stack = pytest.mark.parametrize("stack", STACKS, ids=lambda stack: stack.id)


def test_committed_files_are_what_the_templates_say():
    assert render.check(STACKS, IMAGES) == ()
    assert stack_table.is_fresh(IMAGES / "README.md", STACKS)


@every_stack
def test_the_final_stage_starts_from_the_base_and_copies_no_build_tree(stack):
    final = render.render(stack, IMAGES)["Dockerfile"].partition(" AS final")[2]
    assert "USER 1000:1000" in final
    assert set(re.findall(r"COPY --from=(\S+)", final)) <= {"wheels", "extended", "smi", "chosen"}


@every_stack
def test_every_install_is_by_hash_and_no_secret_becomes_a_layer(stack):
    dockerfile = render.render(stack, IMAGES)["Dockerfile"]
    assert "--require-hashes -r requirements.lock" in dockerfile
    assert "# syntax=" not in dockerfile
    assert not re.search(r"^(COPY|ADD|ENV|ARG).*(pip\.conf|ca-certificates\.crt)", dockerfile, re.MULTILINE)


@pytest.mark.parametrize(
    "stack",
    [stack for stack in STACKS if stack.flash_attn and stack.flash_attn.form == "source"],
    ids=lambda stack: stack.id,
)
def test_architectures_are_always_named_where_something_compiles(stack):
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
def test_the_declaration_is_the_contract_of_the_image_suite(stack):
    declared = json.loads(render.render(stack, IMAGES)["stack.json"])
    assert declared["schema"] == 1
    assert declared["packages"].get("torch", "").startswith(stack.torch or "")
    assert declared["stack_id"] == stack.id


@every_stack
def test_every_package_of_the_distribution_has_a_reason_and_a_link_in_the_dockerfile(stack):
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


def test_drift_leftovers_and_missing_files_are_found_and_mended(tmp_path):
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
def test_labels_name_the_stack_its_version_and_its_base_and_nothing_that_changes(stack):
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
