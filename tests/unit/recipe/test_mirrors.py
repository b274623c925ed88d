"""What a site's mirrors file may say, which address is asked in place of a public one, and who decides."""

from pathlib import Path

import pytest

from stackcheck import mirrors
from stackcheck.errors import ConfigurationError
from stackcheck.matrix import resolve
from stackcheck.recipe import mirror_list, rocm
from stackcheck.recipe.upstream import OutOfReachError, Upstream

TEXT = """\
schema: 1
urls:
  https://download.pytorch.org/whl: https://mirror.example.org/pytorch/
  https://download.pytorch.org/whl/rocm7.2: https://fast.example.org/rocm
registries: {docker.io: "registry.example.org:5000/hub"}
apt:
  ubuntu24.04: ["deb [signed-by=/usr/share/keyrings/site.gpg] https://mirror.example.org/ubuntu noble main"]
keys: {"https://repo.radeon.com": keys/rocm.gpg}
"""
WHL = "https://download.pytorch.org/whl"


def write(folder: Path, text: str = TEXT) -> Path:
    path = folder / "mirrors.yaml"
    path.write_text(text)
    return path


def test_the_longest_beginning_decides_and_other_addresses_stay(tmp_path: Path) -> None:
    found = mirrors.load_mirrors(write(tmp_path))
    assert found.url(f"{WHL}/rocm7.2/torch/") == "https://fast.example.org/rocm/torch/"
    assert found.url(f"{WHL}/rocm7.14") == "https://mirror.example.org/pytorch/rocm7.14"
    assert found.url(f"{WHL}-other/x") == f"{WHL}-other/x"
    assert found.url("https://repo.radeon.com/rocm") == "https://repo.radeon.com/rocm"


def test_short_names_of_images_are_dockers(tmp_path: Path) -> None:
    found = mirrors.load_mirrors(write(tmp_path))
    assert found.image("ubuntu:24.04") == "registry.example.org:5000/hub/library/ubuntu:24.04"
    assert found.image("rocm/dev-ubuntu-24.04:7") == "registry.example.org:5000/hub/rocm/dev-ubuntu-24.04:7"
    assert found.image("quay.io/a/b:1") == "quay.io/a/b:1"


def test_a_key_lies_beside_the_file_that_names_it(tmp_path: Path) -> None:
    found = mirrors.load_mirrors(write(tmp_path))
    assert found.key("https://repo.radeon.com/rocm/apt/7.2.4", rocm.KEY) == tmp_path / "keys" / "rocm.gpg"
    assert found.key("https://elsewhere.example.org", rocm.KEY) == rocm.KEY


def test_the_flag_goes_before_the_environment_and_that_before_the_users_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, place in (("flag", "a"), ("environment", "b"), ("config/stackcheck", "c")):
        (tmp_path / name).mkdir(parents=True)
        write(tmp_path / name, f"schema: 1\nregistries: {{docker.io: {place}.example.org}}\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv(mirrors.VARIABLE, raising=False)
    assert mirrors.load_mirrors().image("a/b:1") == "c.example.org/a/b:1"
    monkeypatch.setenv(mirrors.VARIABLE, str(tmp_path / "environment" / "mirrors.yaml"))
    assert mirrors.load_mirrors().image("a/b:1") == "b.example.org/a/b:1"
    assert mirrors.load_mirrors(tmp_path / "flag" / "mirrors.yaml").image("a/b:1") == "a.example.org/a/b:1"
    monkeypatch.setenv(mirrors.VARIABLE, str(tmp_path / "absent.yaml"))
    with pytest.raises(ConfigurationError, match=r"absent\.yaml cannot be read"):
        mirrors.load_mirrors()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "schema: 1\nurls: {'https://a.example.org': 'https://me:hunter2@b.example.org'}\n",
            "a login belongs to",
        ),
        (
            "schema: 1\napt: {ubuntu24.04: ['deb https://me:hunter2@b.example.org/u noble main']}\n",
            "a login belongs to",
        ),
        ("schema: 1\nurls: {'https://a.example.org': 'ftp://b.example.org'}\n", "urls"),
        ("schema: 1\nregistries: {docker.io: 'HTTPS://x'}\n", "registries"),
        ("schema: 1\nmirror: {}\n", "mirror"),
        ("schema: 2\n", "schema"),
    ],
)
def test_a_wrong_file_is_refused_and_no_password_is_shown(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem) as caught:
        mirrors.load_mirrors(write(tmp_path, text))
    assert "hunter2" not in str(caught.value)


def test_a_silent_mirror_is_named_by_the_public_host(tmp_path: Path) -> None:
    text = "schema: 1\nurls: {'https://repo.radeon.com': 'http://127.0.0.1:9/amd'}\n"
    text += "registries: {docker.io: '127.0.0.1:9'}\n"
    upstream = Upstream(mirrors=mirrors.load_mirrors(write(tmp_path, text)), timeout_s=(0.5, 0.5))
    with pytest.raises(OutOfReachError, match=r"^the mirror of repo\.radeon\.com is out of reach"):
        upstream.reach("https://repo.radeon.com/rocm/apt/7.2.4")
    with pytest.raises(OutOfReachError, match=r"^the mirror of docker\.io is out of reach"):
        upstream.base_digest("ubuntu:24.04")
    assert "127.0.0.1" not in str(upstream.answers("https://repo.radeon.com/rocm/manylinux/rocm-rel-7.2.4/"))


# What a site copies for a stack of which no index tells the files' names here.

ROOT = Path(__file__).resolve().parents[3]


def test_an_unlocked_stack_lists_what_it_asks_for_and_says_that_more_follows() -> None:
    (stack,) = resolve.load_stacks(ROOT, ("rocm7.2.1-torch2.13.0-*",))
    found = mirror_list.wanted(stack, ROOT / "images", Upstream(), lambda _: None)
    by_name = {one.name: one for one in found}
    assert by_name["torch==2.13.0+rocm7.2"].place == "https://download.pytorch.org/whl/rocm7.2"
    assert by_name["triton-rocm==3.7.1"].place == "https://download.pytorch.org/whl/rocm7.2"
    assert by_name["numpy==2.4.6"].place == mirror_list.PACKAGE_INDEX
    assert "not locked" in by_name["torch==2.13.0+rocm7.2"].note
    assert by_name["flash_attn-2.8.3.tar.gz"].sha256
    assert by_name["ubuntu:24.04"].kind == "image"
    assert by_name["amd-smi-lib"].place == "https://repo.radeon.com/rocm/apt/7.2.1 noble main"
    assert len(by_name) == len(found)
