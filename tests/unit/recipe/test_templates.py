"""What the templates promise of every stack: stages, locks and variables of what is compiled."""

import dataclasses
import re
from pathlib import Path

import pytest

from stackcheck.errors import ConfigurationError
from stackcheck.imaging import stages
from stackcheck.matrix import resolve
from stackcheck.matrix.stack import FlashAttention, Package, Stack
from stackcheck.recipe import extensions, render

ROOT = Path(__file__).parents[3]
IMAGES = ROOT / "images"
STACKS = resolve.load_stacks(ROOT)
KNOWN = {
    "wheelhouse",
    "unpacked",
    "base",
    "smi",
    "toolchain",
    "flash-attn-build",
    "flash-attn",
    "wheels",
    "extended",
    "chosen",
    "final",
}
KNOWN |= {f"{name}{end}" for name in extensions.OPTIONAL for end in ("", "-build")}
every_stack = pytest.mark.parametrize("stack", STACKS, ids=lambda stack: stack.id)
every_template = pytest.mark.parametrize(
    "path", sorted(IMAGES.glob("**/*.j2")), ids=lambda path: str(path.relative_to(IMAGES))
)


def dockerfile_of(stack: Stack) -> str:
    return render.render(stack, IMAGES)["Dockerfile"]


def stage_of(stack: Stack, name: str) -> str:
    """The text of one stage."""
    found = re.search(
        rf"^FROM \S+ AS {name}$.*?(?=^FROM |\Z)", dockerfile_of(stack), re.MULTILINE | re.DOTALL
    )
    assert found, f"{stack.id} has no stage {name}"
    return found[0]


@every_stack
def test_stages_have_the_same_names_over_runtimes(stack):
    names = re.findall(r"^FROM \S+ AS (\S+)$", dockerfile_of(stack), re.MULTILINE)
    assert set(names) <= KNOWN
    assert len(set(names)) == len(names)


@every_stack
@pytest.mark.parametrize("kind", ["as it is", "host"])
def test_no_shipped_layer_has_byte_code_of_a_source_in_another_layer(stack, kind):
    """An image with such byte code is refused, as nobody can compare it; a COPY of a stage is one layer."""
    if kind == "host":
        cut = dataclasses.replace(stack.base, kind="host", suite="bookworm", packages=("python3.12",))
        stack = dataclasses.replace(stack, base=cut)
    text, name = dockerfile_of(stack), "final"
    starts = {made: start for start, made in re.findall(r"^FROM (\S+) AS (\S+)$", text, re.MULTILINE)}
    compiling = [made for made in starts if "-m compileall" in stage_of(stack, made)]
    while name in starts:
        assert name not in compiling
        name = starts[name]
    assert compiling, "the search finds no stage that compiles"


@every_stack
def test_what_pip_downloads_is_by_hash_in_every_stage(stack):
    text = dockerfile_of(stack).replace("\\\n", " ")
    commands = re.findall(r"bin/pip (?:install|wheel|download)\b[^&|;\n]*", text)
    assert commands
    assert [c for c in commands if "--require-hashes" not in c and "--no-index" not in c] == []


@every_stack
def test_what_is_compiled_is_never_taken_from_pips_cache(stack):
    text = dockerfile_of(stack).replace("\\\n", " ")
    commands = re.findall(r"bin/pip wheel\b[^&|;\n]*", text)
    assert [command for command in commands if "--no-cache-dir" not in command] == []


@every_stack
def test_each_stage_that_compiles_has_a_lock_of_its_own(stack):
    for extension in extensions.extensions(stack):
        text = stage_of(stack, f"{extension.name}-build")
        assert f"COPY {extension.name}.lock ./" in text
        # A change of any other package must not compile this one again.
        assert "requirements.lock" not in text
        if extension.form == "source":
            assert "requirements.lock" not in stage_of(stack, "toolchain")
            assert "ARG SOURCE_DATE_EPOCH" in text
            assert "MAX_JOBS=" in text


@every_stack
def test_extensions_go_into_a_layer_of_their_own_and_no_compiler_into_any(stack):
    found, text = extensions.extensions(stack), stage_of(stack, "wheels")
    if found:
        extended = stage_of(stack, "extended")
        assert all(f"--mount=type=bind,from={extension.name}," in extended for extension in found)
        assert "COPY --from=extended /opt/extensions" in stage_of(stack, "final")
        text += extended
    else:
        assert "AS extended" not in dockerfile_of(stack)
    assert not re.search(r"g\+\+|nvcc|hipcc|apt-get", text + stage_of(stack, "final"))


@pytest.mark.parametrize("name", ["rocm7.14*", "cuda13.0*debian12", "rocm7.2.1-torch2.13*"])
def test_another_pin_of_an_extension_changes_its_stages_and_the_last_ones_alone(name):
    stack = next(one for one in resolve.select(STACKS, [name]) if one.flash_attn)
    assert stack.flash_attn
    other = dataclasses.replace(
        stack, flash_attn=dataclasses.replace(stack.flash_attn, version="9.9.9"), id=stack.id + "-other"
    )
    assert changed(stack, other) == {"flash-attn-build", "flash-attn", "extended", "final"}


def changed(stack: Stack, other: Stack) -> set[str]:
    """The stages whose keys differ; an extension's lock follows its pin, other locks are as they were."""
    keys = []
    for one in (stack, other):
        files = {"flash-attn.lock": str(one.flash_attn), "stack.json": one.id}
        same = ("requirements.lock", "toolchain.lock", "transformer-engine-torch.lock", "rootfs.tar")
        same += ("amd-smi-lib.sha256",)
        files |= dict.fromkeys(same, "as it was")
        found = stages.read_stages(dockerfile_of(one), files, platform="linux/amd64")
        keys.append({stage.name: stage.key for stage in found})
    return {name for name in keys[0] if keys[0][name] != keys[1][name]}


def test_a_chosen_nccl_is_one_more_stage_and_all_others_are_shared():
    plain, chosen = (
        resolve.select(STACKS, [f"cuda13.0-torch2.13.0-{part}py3.11-debian12"])[0] for part in ("", "nccl*-")
    )
    shared: list[dict[str, str]] = []
    for one in (plain, chosen):
        names = ("requirements.lock", "chosen.lock", "rootfs.tar", "stack.json")
        files = {
            name: (IMAGES / one.id / name).read_text("utf-8")
            for name in names
            if name.endswith("lock") and (IMAGES / one.id / name).exists()
        }
        found = stages.read_stages(
            dockerfile_of(one), {**dict.fromkeys(names, ""), **files}, platform="linux/amd64"
        )
        shared.append({stage.name: stage.key for stage in found})
    assert set(shared[1]) - set(shared[0]) == {"chosen"}
    assert {name for name in shared[0] if shared[0][name] != shared[1][name]} == {"final"}


@pytest.mark.parametrize("path", sorted(IMAGES.glob("*/toolchain.lock")), ids=lambda path: path.parent.name)
def test_the_toolchain_has_the_torch_that_the_image_has(path):
    torch = re.compile(r"^torch==\S+", re.MULTILINE)
    image = path.with_name("requirements.lock").read_text("utf-8")
    assert torch.findall(path.read_text("utf-8")) == torch.findall(image)


def test_the_triton_backend_needs_no_compiler_and_keeps_its_variable_at_run_time():
    stack = resolve.select(STACKS, ["rocm7.14*"])[0]
    assert "apt-get" not in stage_of(stack, "toolchain")
    assert 'FLASH_ATTENTION_TRITON_AMD_ENABLE="TRUE"' in stage_of(stack, "flash-attn-build")
    assert 'FLASH_ATTENTION_TRITON_AMD_ENABLE="TRUE"' in stage_of(stack, "final")
    assert extensions.toolchain(stack)[-1] == "wheel"


def test_only_the_device_code_of_the_stacks_architectures_is_asked_for():
    """torch's wheel asks for all; what a stage asks `rocm` for besides is kept."""
    stack = resolve.select(STACKS, ["rocm7.14*"])[0]
    assert extensions.overrides(stack, stack.requirements) == ("rocm[device-gfx942,libraries]==7.14.1",)
    two = dataclasses.replace(stack, archs=("gfx942", "gfx950"))
    (found,) = extensions.overrides(two, ["rocm[devel]==7.14.1", "torch==2.14.1"])
    assert found == "rocm[devel,device-gfx942,device-gfx950,libraries]==7.14.1"
    others = [one for one in STACKS if one.layout != "amdrocm"]
    assert not [one.id for one in others if extensions.overrides(one, one.requirements)]


def test_a_compiler_comes_from_the_builder_or_else_from_the_index():
    with_builder = resolve.select(STACKS, ["cuda13.0-torch2.13.0-fa*ubuntu*"])[0]
    assert not any("nvcc" in name for name in extensions.toolchain(with_builder))
    without = dataclasses.replace(with_builder, builder=None)
    assert "nvidia-cuda-nvcc==13.0.*" in extensions.toolchain(without)
    assert "ENV CUDA_HOME=/opt/venv/lib/python3.12/site-packages/nvidia/cu13" in stage_of(
        without, "toolchain"
    )
    old = dataclasses.replace(without, runtime_version="12.8")
    with pytest.raises(ConfigurationError, match="no package index has a compiler"):
        extensions.toolchain(old)
    rocm = resolve.select(STACKS, ["rocm7.14*"])[0]
    flash = FlashAttention(version="2.8.3", form="source", backend="ck", sha256=None)
    assert "rocm[devel]==7.14.1" in extensions.toolchain(dataclasses.replace(rocm, flash_attn=flash))


@every_stack
def test_constraints_are_read_from_what_was_installed(stack):
    text = stage_of(stack, "extended" if extensions.extensions(stack) else "wheels")
    if stack.torch is None:
        assert "touch constraints.txt" in text
        return
    assert "grep -Eix '(torch" in text
    assert all(f'{name}="/opt/stackcheck/constraints.txt"' in stage_of(stack, "final") for name in
               ("PIP_CONSTRAINT", "UV_CONSTRAINT"))  # fmt: skip


@every_template
def test_no_template_knows_a_version_or_a_place_of_ours(path):
    text = path.read_text("utf-8")
    assert not re.search(r"==\s*[\"']?\d+\.\d|[<>]=?\s*[\"']\d", text)
    assert "/work" not in text


def test_a_triton_that_the_matrix_asks_for_is_frozen_once():
    cpu = resolve.select(STACKS, ["cpu-*"])[0]
    asked = dataclasses.replace(cpu, requirements=("torch==2.13.0+cpu", "triton==3.7.1"))
    assert asked.frozen == asked.requirements
    ruled = dataclasses.replace(asked, triton=Package(name="triton", version="3.7.1"))
    assert ruled.frozen == asked.requirements


ROCM = [stack for stack in STACKS if stack.layout == "classic" and stack.torch]


@pytest.mark.parametrize("stack", ROCM, ids=lambda stack: stack.id)
def test_amds_management_library_is_of_the_release_by_hash_and_off_torchs_path(stack):
    text = stage_of(stack, "smi")
    folder = stack.runtime_version.removesuffix(".0")  # AMD's archive names the first patch so
    assert f"repo.radeon.com/rocm/apt/{folder}\n" in text
    assert text.index("sha256sum --check") < text.index("dpkg-deb --extract")
    assert f"/smi/opt/rocm-{stack.runtime_version}/share/amd_smi/" in text
    # Nothing that Python imports from by itself, and no set-up script of the package: it would call pip.
    assert not re.search(r"/opt/venv|site-packages|dist-packages|PYTHONPATH|\.pth|apt-get|dpkg -i", text)
    assert "COPY --from=smi /smi/ /\n" in stage_of(stack, "final")


def test_no_stack_takes_amdsmi_from_an_index():
    assert [one.id for one in STACKS if any(pin.startswith("amdsmi") for pin in one.requirements)] == []


def test_roc_ms_own_libraries_come_with_amds_wheel_alone_which_does_not_bring_them():
    with_packages = [one.id for one in STACKS if "rocm-hip-libraries" in dockerfile_of(one)]
    assert with_packages == [one.id for one in STACKS if one.wheels == "amd"] != []
