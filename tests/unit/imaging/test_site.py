"""What a build gets of a site: mirrored bases, apt sources, AMD's key, and the same modes on every host."""

import dataclasses
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stackcheck.errors import ConfigurationError
from stackcheck.imaging import bakefile, stages
from stackcheck.imaging.plans import BuildPlan
from stackcheck.matrix import resolve
from stackcheck.matrix.stack import Stack
from stackcheck.mirrors import NO_MIRRORS, Mirrors
from stackcheck.recipe import render

ROOT = Path(__file__).resolve().parents[3]
DIGEST = "sha256:" + "7" * 64
OWN = Mirrors(
    urls={
        "https://repo.radeon.com": "https://m.example.org/amd",
        "https://download.pytorch.org": "https://m.example.org/t",
    },
    registries={"docker.io": "r.example.org/hub"},
    apt={"ubuntu24.04": ("deb https://m.example.org/ubuntu noble main",)},
)


@pytest.fixture
def stack() -> Stack:
    (found,) = resolve.load_stacks(ROOT, ("*-amd",))
    assert found.builder
    return dataclasses.replace(
        found,
        base=dataclasses.replace(found.base, digest=DIGEST),
        builder=dataclasses.replace(found.builder, digest=DIGEST),
        missing=(),
    )


def plan_of(stack: Stack) -> BuildPlan:
    text = render.render(stack, ROOT / "images")["Dockerfile"]
    files = dict.fromkeys(
        ("requirements.lock", "toolchain.lock", "flash-attn.lock", "stack.json"), "sha256:0"
    )
    files["amd-smi-lib.sha256"] = "sha256:0"
    found = stages.read_stages(text, files, platform="linux/amd64")
    return BuildPlan(
        stack=stack, folder=ROOT, files={"Dockerfile": text.encode()}, rootfs=None, inputs={}, key="",
        engine="e", platform="linux/amd64", stages=found,
    )  # fmt: skip


def test_bases_come_from_the_mirror_by_their_digest(stack):
    assert bakefile.base_images(plan_of(stack), OWN) == {
        f"ubuntu:24.04@{DIGEST}": f"docker-image://r.example.org/hub/library/ubuntu:24.04@{DIGEST}",
        f"rocm/dev-ubuntu-24.04:7.2.4-complete@{DIGEST}": "docker-image://r.example.org/hub/"
        f"rocm/dev-ubuntu-24.04:7.2.4-complete@{DIGEST}",
    }
    assert bakefile.base_images(plan_of(stack), NO_MIRRORS) == {}


def test_a_stage_gets_the_addresses_that_it_asks_for_and_no_other(stack):
    upstream = dataclasses.replace(stack, wheels="upstream", requirements=("torch==2.13.0+rocm7.2",))
    by_name = {stage.name: stage for stage in plan_of(upstream).stages}
    assert bakefile.mirror_arguments(by_name["smi"], OWN) == {
        "ROCM_ARCHIVE": "https://m.example.org/amd/rocm/apt/7.2.4"
    }
    assert bakefile.mirror_arguments(by_name["wheels"], OWN) == {
        "TORCH_INDEX": "https://m.example.org/t/whl/rocm7.2"
    }
    assert bakefile.mirror_arguments(by_name["final"], OWN) == {}
    assert bakefile.mirror_arguments(by_name["smi"], NO_MIRRORS) == {}


def test_the_mirrors_sources_go_before_the_hosts(stack):
    assert bakefile.apt_sources(stack, OWN) == "deb https://m.example.org/ubuntu noble main\n"


def test_amds_archive_comes_with_its_key_and_not_without(stack, tmp_path):
    (tmp_path / "rocm.gpg").write_bytes(b"a key")
    own = dataclasses.replace(OWN, keys={"https://repo.radeon.com": tmp_path / "rocm.gpg"})
    secrets = bakefile.rocm_secrets(stack, own)
    assert secrets["rocm_key"] == b"a key"
    option = b"[arch=amd64 signed-by=/etc/apt/keyrings/rocm.gpg]"
    address = b"https://m.example.org/amd/rocm/apt/7.2.4"
    assert secrets["rocm_sources"] == b"deb " + option + b" " + address + b" noble main\n"
    absent = dataclasses.replace(OWN, keys={"https://repo.radeon.com": tmp_path / "absent.gpg"})
    with pytest.raises(
        ConfigurationError, match="the key of AMD's package archive is not on this host"
    ) as caught:
        bakefile.rocm_secrets(stack, absent)
    assert "rocm.gpg.key" in str(caught.value.next_step)


def test_each_stage_asks_for_pip_settings_of_its_own(stack):
    text = plan_of(stack).files["Dockerfile"].decode()
    own = stages.with_own_secret(text, "pip_conf")
    assert "id=pip_conf," not in own
    assert {"id=pip_conf-wheels,", "id=pip_conf-toolchain,", "id=pip_conf-flash-attn-build,"} <= {
        word
        for line in own.splitlines()
        for word in [line.partition("type=secret,")[2].partition("target")[0]]
    }
    assert own.replace("pip_conf-wheels", "pip_conf").count("id=ca,") == text.count("id=ca,")


NAMES = st.from_regex(r"[a-z]{1,8}\.(json|lock|diff)", fullmatch=True)


@given(
    umask=st.integers(0, 0o077), files=st.dictionaries(NAMES, st.binary(max_size=20)), closed=st.booleans()
)
def test_no_umask_reaches_a_layer(umask, files, *, closed):
    before = os.umask(umask)
    try:
        with tempfile.TemporaryDirectory() as folder:
            files = {**files, "Dockerfile": b"FROM scratch\n"}
            plan: Any = SimpleNamespace(folder=Path(folder), files=files, rootfs=None)
            context = bakefile._context(plan, closed=closed)
            assert context.stat().st_mode & 0o777 == 0o755
            modes = {path.name: path.stat().st_mode & 0o777 for path in context.iterdir()}
    finally:
        os.umask(before)
    assert modes == dict.fromkeys(files, 0o644)
