"""The template's stages that compile, built for real: on this machine that is all of them but ROCm's CK.

In: the stack `cpu`, turned into one that has an extension, and locked and rendered as any stack is. Out: a
build by `docker buildx` alone, of the stages up to a proof that runs in what the final stage holds.
"""

import dataclasses
import hashlib
import shutil
import sys
from pathlib import Path

import pytest

from stackcheck.errors import BuildError
from stackcheck.matrix.stack import FlashAttention, Replacement, Stack
from stackcheck.recipe.upstream import Upstream
from template_builds import CPU, build, offer, prepare, with_extension

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def with_triton_backend() -> Stack:
    """One stack for two tests: what the first built, the second finds in the builder's cache."""
    flash = FlashAttention(version="2.8.3", form="source", backend="triton", sha256=None)
    env = {**CPU.env, "FLASH_ATTENTION_TRITON_AMD_ENABLE": "TRUE"}
    return with_extension(id="proof-flash-attn-triton", flash_attn=flash, env=env)


# In what the final stage holds, as the user that it has. A backend asks for the GPU's architecture when it is
# loaded: the stack's is told, as there is none here.
ATTENTION = """
FROM final AS proved
ENV HOME=/tmp
RUN <<'EOF' python3
import flash_attn, torch, triton
import flash_attn.flash_attn_interface as interface
from pathlib import Path
backend = interface.flash_attn_gpu.__name__
Path("/tmp/proof").write_text(f"{flash_attn.__version__} {backend} {torch.__version__} {triton.__version__}")
EOF
RUN ! command -v g++ && ! command -v hipcc && ! command -v ninja
FROM scratch AS proof
COPY --from=proved /tmp/proof /
"""


def test_flash_attentions_triton_backend_is_built_without_a_compiler_and_loads(tmp_path):
    context = prepare(with_triton_backend(), tmp_path)
    proof = build(context, "proof", tmp_path / "proof", ATTENTION) / "proof"
    assert proof.read_text() == "2.8.3 flash_attn.flash_attn_triton_amd.interface_fa 2.13.0+cpu 3.7.1"
    first = build(context, "flash-attn", tmp_path / "first")
    again = build(context, "flash-attn", tmp_path / "again", again=["flash-attn-build"])
    (name,) = (path.name for path in first.iterdir())
    assert (first / name).read_bytes() == (again / name).read_bytes()


REPLACED = """
FROM final AS proved
RUN <<'EOF' python3
import importlib.util, sympy, torch
from pathlib import Path
compiled = Path(importlib.util.cache_from_source(sympy.__file__)).is_file()
listed = Path("/opt/stackcheck/versions").read_text().split()
told = sympy.__version__, compiled, "sympy==1.13.1" in listed, torch.__version__
Path("/tmp/proof").write_text(" ".join(map(str, told)))
EOF
FROM scratch AS proof
COPY --from=proved /tmp/proof /
"""


def test_what_was_chosen_replaces_torchs_pin_and_is_compiled_and_listed(tmp_path):
    # torch's wheel for processors pins no library; of what it needs, it refuses this release of sympy.
    replaced = Replacement(name="sympy", version="1.13.1", instead_of="1.14.0")
    stack = dataclasses.replace(with_triton_backend(), id="proof-chosen", replacements=(replaced,))
    proof = build(prepare(stack, tmp_path), "proof", tmp_path / "proof", REPLACED) / "proof"
    assert proof.read_text() == "1.13.1 True True 2.13.0+cpu"


# Somebody installs into a finished image, as its owner: also without the constraints, to see that they alone
# are what refuses it.
FREEZE = """
FROM final AS proved
USER root
RUN --mount=type=bind,from=offers,target=/offers --network=none <<'EOF' bash
tell() { if "${@:2}" > /dev/null 2>&1; then echo "$1: yes"; else echo "$1: no"; fi >> /tmp/proof; }
pip="pip install --no-index --find-links /offers --no-cache-dir"
uv="/offers/uv pip install --python /opt/venv/bin/python --offline --no-index --find-links /offers"
for wanted in torch==9.9 triton==9.9 wants-torch wants-triton; do
    tell "pip could $wanted" env -u PIP_CONSTRAINT $pip --dry-run "$wanted"
    tell "uv could $wanted" env -u UV_CONSTRAINT $uv --dry-run "$wanted"
    tell "pip does $wanted" $pip "$wanted"
    tell "uv does $wanted" $uv "$wanted"
done
tell "pip does harmless" $pip harmless
tell "uv does harmless-too" $uv harmless-too
python -c 'import torch, triton; print("still", torch.__version__, triton.__version__)' >> /tmp/proof
EOF
FROM scratch AS proof
COPY --from=proved /tmp/proof /
"""


def test_nothing_installed_later_replaces_torch_or_triton(tmp_path):
    context = prepare(with_triton_backend(), tmp_path)
    offers = tmp_path / "offers"
    offers.mkdir()
    offered = {"wants-torch": "torch==9.9", "wants-triton": "triton==9.9", "harmless": "torch"}
    for name, needs in {"torch": "", "triton": "", **offered, "harmless-too": "triton"}.items():
        offer(offers, name, needs)
    shutil.copy(Path(sys.executable).with_name("uv"), offers / "uv")
    proof = build(context, "proof", tmp_path / "out", FREEZE, contexts={"offers": offers}) / "proof"
    told = proof.read_text().splitlines()
    wanted = ("torch==9.9", "triton==9.9", "wants-torch", "wants-triton")
    expected = [
        line
        for name in wanted
        for line in (
            f"pip could {name}: yes",
            f"uv could {name}: yes",
            f"pip does {name}: no",
            f"uv does {name}: no",
        )
    ]
    expected += ["pip does harmless: yes", "uv does harmless-too: yes", "still 2.13.0+cpu 3.7.1"]
    assert told == expected


class Releases(Upstream):
    """A release page that lists one wheel."""

    def __init__(self, sha256: str) -> None:
        super().__init__()
        self.sha256 = sha256

    def wheel_sha256(self, version: str, wheel: str) -> str:
        assert wheel.startswith(f"flash_attn-{version}+cu12")
        return self.sha256


@pytest.mark.parametrize("right", [True, False], ids=["right checksum", "another checksum"])
def test_an_official_wheel_goes_in_by_its_checksum_alone(tmp_path, *, right):
    stack = dataclasses.replace(
        with_extension(id="proof-official-wheel"),
        runtime="cuda",
        vendor="nvidia",
        runtime_version="12.8",
        layout=None,
        archs=("sm_90",),
        cxx11abi="TRUE",
        flash_attn=FlashAttention(version="2.8.3", form="wheel", backend=None, sha256=None),
    )
    folder = tmp_path / "official"
    folder.mkdir()
    wheel = offer(
        folder, "flash-attn", "torch", "2.8.3+cu12torch2.13cxx11abiTRUE", "cp311-cp311-linux_x86_64"
    )
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    context = prepare(stack, tmp_path, Releases(sha256 if right else "0" * 64))
    out = tmp_path / "out"
    if right:
        build(context, "flash-attn", out, extra=wheel)
        assert [path.read_bytes() for path in out.iterdir()] == [wheel.read_bytes()]
    else:
        with pytest.raises(BuildError, match="THESE PACKAGES DO NOT MATCH THE HASHES"):
            build(context, "flash-attn", out, extra=wheel)
