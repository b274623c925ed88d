"""Which stages are the same, and which are not: what is built once for all stacks rests on it."""

import re
from pathlib import Path

import pytest

from stackcheck.errors import BuildError
from stackcheck.imaging import stages

ROOT = Path(__file__).resolve().parents[3]
FILES = {"requirements.lock": "sha256:1", "stack.json": "sha256:2", "rootfs.tar": "sha256:3"}
DOCKERFILE = """\
# Stack one: a comment
FROM scratch AS wheelhouse
COPY stack.json /

FROM scratch AS base
ADD rootfs.tar /
ENV A=1

FROM registry.example.org/compiler@sha256:abc AS toolchain
RUN true

FROM toolchain AS flash-build
# why
RUN --mount=type=bind,from=wheelhouse,target=/w \\
    # inside
    echo 'flash-attn==1.0' > x

FROM scratch AS flash
COPY --from=flash-build /wheels/ /

FROM base AS unused
RUN false

FROM base AS wheels
COPY requirements.lock ./
RUN --mount=type=bind,from=wheelhouse,target=/w --mount=type=bind,from=flash,target=/f pip install
COPY stack.json ./

FROM base AS final
COPY --from=wheels /opt /opt
"""


def read(text: str = DOCKERFILE, platform: str = "linux/amd64", **changes: str) -> dict[str, stages.Stage]:
    found = stages.read_stages(text, {**FILES, **changes}, platform=platform)
    return {stage.name: stage for stage in found}


def changed(text: str = DOCKERFILE, platform: str = "linux/amd64", **changes: str) -> set[str]:
    """The stages whose key is not what it was."""
    before = read()
    return {name for name, stage in read(text, platform, **changes).items() if stage.key != before[name].key}


def test_only_stages_that_the_last_one_is_made_from_count_each_after_what_it_needs():
    assert list(read()) == ["base", "toolchain", "flash-build", "flash", "wheels", "final"]
    assert read()["wheels"].needs == ("base", "wheelhouse", "flash")
    assert read()["wheels"].files == ("requirements.lock", "stack.json")


def test_a_file_changes_only_the_stages_that_copy_it():
    assert changed(**{"requirements.lock": "sha256:9"}) == {"wheels", "final"}
    assert changed(**{"rootfs.tar": "sha256:9"}) == {"base", "wheels", "final"}


def test_a_base_image_and_a_platform_change_what_stands_on_them():
    assert changed(DOCKERFILE.replace("sha256:abc", "sha256:abd")) >= {"toolchain", "flash"}
    assert "base" not in changed(DOCKERFILE.replace("sha256:abc", "sha256:abd"))
    assert changed(platform="linux/arm64") == set(read())


def test_comments_unused_stages_and_where_lines_break_change_nothing():
    text = DOCKERFILE.replace("Stack one", "Stack two").replace("RUN false", "RUN other")
    assert changed(text) == set()
    assert changed(text.replace("target=/w \\\n    # inside\n    echo", "target=/w echo")) == set()


def test_a_global_argument_changes_every_stage():
    assert changed("ARG PYTHON=3.12\n" + DOCKERFILE) == set(read())


def test_here_documents_belong_to_their_instruction():
    text = "FROM scratch AS a\nRUN <<EOF\n# kept: it is no comment here\nFROM b\nEOF\nRUN true\n"
    (stage,) = stages.read_stages(text, {}, platform="linux/amd64")
    assert stage.instructions == ("RUN <<EOF\n# kept: it is no comment here\nFROM b\nEOF", "RUN true")


@pytest.mark.parametrize("source", ["none.txt", "folder/", "*.toml"])
def test_a_file_that_is_not_there_is_named(source):
    with pytest.raises(BuildError, match="not in its folder") as caught:
        stages.read_stages(f"FROM scratch\nCOPY {source} /\n", FILES, platform="linux/amd64")
    assert source in str(caught.value)


def test_folders_patterns_and_bind_mounts_name_their_files():
    files = {"src/a.py": "1", "src/b/c.py": "2", "x.lock": "3", "y.lock": "4"}
    text = 'FROM scratch\nCOPY src /s\nADD ["x.lock", "/"]\nCOPY --chmod=644 *.lock /l/\n'
    (stage,) = stages.read_stages(text, files, platform="linux/amd64")
    assert stage.files == ("src/a.py", "src/b/c.py", "x.lock", "y.lock")
    (stage,) = stages.read_stages(
        "FROM scratch\nRUN --mount=source=src,target=/s true\n", files, platform="p"
    )
    assert stage.files == ("src/a.py", "src/b/c.py")


def test_the_committed_dockerfile_of_every_stack_is_understood():
    names = set()
    for path in sorted((ROOT / "images").glob("*-torch*/Dockerfile")):
        others = ("rootfs.tar", "stack.json", "pins.json")
        locks = ("requirements.lock", "toolchain.lock", "flash-attn.lock", "transformer-engine-torch.lock")
        locks += ("amd-smi-lib.sha256", "chosen.lock")
        files = dict.fromkeys((*others, *locks), "sha256:0")
        found = stages.read_stages(path.read_text(encoding="utf-8"), files, platform="linux/amd64")
        assert found[-1].name == "final"
        names |= {stage.name for stage in found}
    assert {"base", "wheels", "final"} <= names


def test_a_run_without_network_is_the_same_stage_but_for_apt():
    text = (
        "FROM a AS b\n# RUN in a comment \\\n"
        "RUN --mount=type=secret,id=apt_sources,target=/s \\\n    apt-get update\n"
        "RUN true \\\n    # a comment\n    && RUN=1\nrun <<E\nRUN inner\nE\nENV RUN=2\nRUN --network=host x"
    )
    cut = stages.without_network(text)
    assert cut.replace("--network=none ", "").lower() == text.lower()
    assert [line for line in cut.splitlines() if "--network" in line] == [
        "RUN --network=none true \\",
        "RUN --network=none <<E",
        "RUN --network=host x",
    ]
    for path in (ROOT / "images").glob("*/Dockerfile"):
        found = stages.without_network(path.read_text(encoding="utf-8"))
        assert found.count("\nRUN --network=none ") + found.count("id=apt_sources") == found.count("\nRUN ")


def test_a_stage_without_a_name_has_its_number_in_the_name_of_its_secret():
    text = "FROM a AS one\nRUN --mount=type=secret,id=pip_conf,target=/p true\nFROM b\n"
    text += "RUN --mount=type=secret,id=pip_conf,target=/p \\\n    --mount=type=secret,id=ca,target=/c true\n"
    own = stages.with_own_secret(text, "pip_conf")
    assert re.findall(r"id=([a-z_0-9-]+)", own) == ["pip_conf-one", "pip_conf-1", "ca"]
    names = [stage.name for stage in stages.read_stages(text, {}, platform="linux/amd64")]
    assert names == ["1"]
