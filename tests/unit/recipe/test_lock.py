"""What `stackcheck lock` learns, keeps and refuses to invent, against small indexes and pages of links."""

import dataclasses
import hashlib
import json
import subprocess
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

import loopback
from small_index import add_source, add_wheel, use
from small_wheels import index_of, locked_line, make_wheel, only_index, wheel
from stackcheck.engine import apt
from stackcheck.errors import BuildError
from stackcheck.files import requirements
from stackcheck.imaging import base_sources, bootstrap, platforms
from stackcheck.imaging.wheels import wheel_cache
from stackcheck.matrix import resolve
from stackcheck.matrix.stack import Base
from stackcheck.recipe import extensions, indexes, lock
from stackcheck.recipe.lock import WheelFolder
from stackcheck.recipe.upstream import OutOfReachError, Upstream, split_reference

ROOT = Path(__file__).parents[3]
STACKS = resolve.load_stacks(ROOT)
DIGEST = "sha256:" + "7" * 64


class Deaf(Upstream):
    """No registry and no release page answers."""

    def base_digest(self, reference: str) -> str:
        host = split_reference(reference)[0]
        raise OutOfReachError(f"{host} is out of reach of this machine")

    def answers(self, url: str) -> str:
        return f"{url.split('/')[2]} is out of reach of this machine"

    def reach(self, url: str) -> None:
        raise OutOfReachError(f"{url.split('/')[2]} is out of reach of this machine")

    def wheel_sha256(self, version: str, wheel: str) -> str:
        raise OutOfReachError(f"no release {version} of {wheel}")


class Hearing(Deaf):
    """Every registry answers."""

    def base_digest(self, reference: str) -> str:  # noqa: ARG002
        return DIGEST


@pytest.fixture
def stack() -> resolve.Stack:
    """A stack that has a base and a builder in a registry, torch from the index and flash-attn's source."""
    flash = resolve.select(STACKS, ["cuda13.0-torch2.13.0-fa*ubuntu*"])[0]
    return dataclasses.replace(
        flash, wheels="index", requirements=("torch==2.13.0",), triton=None, collective=None, missing=()
    )


@pytest.fixture
def images(tmp_path, stack: resolve.Stack) -> Path:
    (tmp_path / "images" / stack.id).mkdir(parents=True)
    return tmp_path / "images"


def pins_of(images: Path, stack: resolve.Stack) -> dict[str, object]:
    return json.loads((images / stack.id / "pins.json").read_text("utf-8"))


def test_a_reachable_machine_locks_packages_tools_sources_and_bases(index, images, stack):
    sha256 = add_source(index, "flash-attn", "2.8.3")
    done = lock.lock(stack, images, Hearing())
    assert done == lock.LockResult(missing=(), kept=())
    folder = images / stack.id
    assert set(indexes.read_lock(folder / "requirements.lock")) == {"torch", "filelock", "einops"}
    assert {"torch", "ninja", "setuptools"} <= set(indexes.read_lock(folder / "toolchain.lock"))
    assert indexes.read_lock(folder / "flash-attn.lock") == {"flash-attn": ("2.8.3", (f"sha256:{sha256}",))}
    pins = pins_of(images, stack)
    assert pins["locked"] is True
    assert pins["bases"] == {"ubuntu:24.04": DIGEST, "nvidia/cuda:13.0.2-devel-ubuntu24.04": DIGEST}
    assert pins["sources"] == {
        "flash-attn": {
            "version": "2.8.3",
            "form": "source",
            "file": "flash_attn-2.8.3.tar.gz",
            "sha256": sha256,
        }
    }
    assert list(pins["wheels"]["torch"]) == ["torch-2.13.0-py3-none-any.whl"]


def test_what_is_out_of_reach_is_named_and_what_was_locked_is_kept(
    index, images, stack, tmp_path, monkeypatch
):
    add_source(index, "flash-attn", "2.8.3")
    lock.lock(stack, images, Hearing())
    before = {path.name: path.read_bytes() for path in (images / stack.id).iterdir()}
    (tmp_path / "empty").mkdir()
    use(tmp_path / "empty", monkeypatch)
    known = dataclasses.replace(
        stack,
        base=dataclasses.replace(stack.base, digest=DIGEST),
        builder=Base(kind="registry", reference="nvidia/cuda:13.0.2-devel-ubuntu24.04", digest=DIGEST),
    )
    done = lock.lock(known, images, Deaf())
    assert done.missing == ()
    assert {path.name: path.read_bytes() for path in (images / stack.id).iterdir()} == before
    assert any("ubuntu:24.04" in reason and "docker.io is out of reach" in reason for reason in done.kept)
    assert any(reason.startswith("requirements.lock: no index") for reason in done.kept)


def test_a_lock_of_other_versions_does_not_stay(index, images, stack, tmp_path, monkeypatch):
    add_source(index, "flash-attn", "2.8.3")
    lock.lock(stack, images, Hearing())
    (tmp_path / "empty").mkdir()
    use(tmp_path / "empty", monkeypatch)
    newer = dataclasses.replace(stack, requirements=("torch==2.14.1",))
    done = lock.lock(newer, images, Deaf())
    assert any("torch==2.14.1" in reason for reason in done.missing)
    assert not (images / stack.id / "requirements.lock").exists()
    assert pins_of(images, stack)["locked"] is False


def test_an_absent_source_and_an_unreachable_registry_are_missing_one_reason_each(index, images, stack):
    assert index.exists()
    done = lock.lock(stack, images, Deaf())
    assert len(done.missing) == 3
    assert "flash-attn" in done.missing[-1] or any("flash-attn==2.8.3" in line for line in done.missing)
    assert sum("docker.io is out of reach" in line for line in done.missing) == 2
    assert pins_of(images, stack)["sources"]["flash-attn"]["sha256"] is None


def test_the_place_of_torchs_makers_is_asked_when_no_index_of_pip_has_it(
    index, images, stack, tmp_path, monkeypatch
):
    add_source(index, "flash-attn", "2.8.3")
    add_wheel(tmp_path / "whl" / "cu130", "torch", "2.13.0+cu130", "filelock")
    upstream = dataclasses.replace(stack, wheels="upstream", requirements=("torch==2.13.0+cu130",))
    monkeypatch.setattr("stackcheck.recipe.upstream.TORCH_INDEX", (tmp_path / "whl").as_uri())
    refused = lock.lock(upstream, images, Hearing())
    assert any("torch==2.13.0+cu130 is in no index" in reason for reason in refused.missing)
    monkeypatch.setattr(Hearing, "answers", lambda *_: None)
    assert lock.lock(upstream, images, Hearing()).missing == ()
    assert indexes.read_lock(images / stack.id / "requirements.lock")["torch"][0] == "2.13.0+cu130"


def test_a_wheel_that_only_amd_builds_is_never_taken_from_the_index(images, index):
    assert index.exists()
    stack = resolve.select(STACKS, ["*-amd"])[0]
    (images / stack.id).mkdir()
    done = lock.lock(stack, images, Deaf())
    assert "repo.radeon.com" in done.missing[0]
    assert not (images / stack.id / "requirements.lock").exists()


def test_an_index_that_hangs_is_one_that_does_not_answer(index, monkeypatch):
    run = subprocess.run

    def hang(command: list[str], **options: Any) -> Any:
        if Path(command[0]).name != "uv":
            return run(command, **options)
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(indexes.subprocess, "run", hang)
    with pytest.raises(
        indexes.UnresolvedError, match=r"no index of this machine answers for torch==2\.13\.0"
    ):
        indexes.resolve(("torch==2.13.0",), python="3.12", places=[f"--index-url={index.as_uri()}"])


@pytest.mark.parametrize(
    ("selector", "wheel"),
    [
        ("cuda12.1*", "flash_attn-2.6.3+cu123torch2.4cxx11abiFALSE-cp310-cp310-linux_x86_64.whl"),
        ("cuda12.8*", "flash_attn-2.8.3+cu12torch2.8cxx11abiTRUE-cp312-cp312-linux_x86_64.whl"),
    ],
)
def test_an_official_wheel_has_the_name_that_its_setup_looks_for(selector, wheel):
    (extension,) = extensions.extensions(resolve.select(STACKS, [selector])[0])
    assert extension.wheel == wheel
    assert extension.pin == f"flash-attn=={wheel.split('-')[1].lower()}"


def test_flash_attention_4_is_no_stage_of_its_own_and_asks_for_the_compiler_of_its_cuda():
    stack = resolve.select(STACKS, ["*-fa4*"])[0]
    assert extensions.extensions(stack) == ()
    assert extensions.needs(stack) == ("flash-attn-4[cu13]",)
    assert extensions.needs(dataclasses.replace(stack, runtime_version="12.8")) == ()
    assert not extensions.toolchain(stack)


def test_a_wheel_of_a_page_without_hashes_is_locked_by_its_hash(tmp_path, monkeypatch):
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    version = "2.9.1+rocm7.2.4.lw.git39497456"
    made = wheel(tmp_path / "page", "torch", version, tag="cp312-cp312-linux_x86_64")
    with loopback.serving(SimpleHTTPRequestHandler, made.parent) as host:
        places = ["--no-index", f"--find-links=http://{host}/"]
        text = indexes.resolve(["torch==2.9.1"], python="3.12", places=places)
    digest = hashlib.sha256(made.read_bytes()).hexdigest()
    assert text == f"torch=={version} \\\n    --hash=sha256:{digest}\n"


def test_pip_is_asked_for_its_places_once_and_again_after_a_change_of_the_environment(monkeypatch):
    started: list[object] = []
    run = subprocess.run

    def counted(command: list[str], **options: object) -> object:
        started.append(command)
        return run(command, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "run", counted)
    for address in ("http://127.0.0.1:1/first/", "http://127.0.0.1:1/second/"):
        monkeypatch.setenv("PIP_INDEX_URL", address)
        for find_links in (True, False, True):
            assert f"--index-url={address}" in indexes.pip_places(find_links=find_links)
    assert len(started) == 2


SECRET = "s3cretPW"


def test_no_password_of_an_address_is_an_argument_of_a_program(tmp_path, monkeypatch):
    """Each way to ask an index, with an address of pip's settings and one of the site's mirrors."""
    argv: list[str] = []
    run = subprocess.run

    def seen(command: list[str], **options: Any) -> Any:
        argv.append(" ".join(command))
        return run(command, **options)

    wheel = make_wheel(tmp_path / "index")
    with index_of(wheel) as (address, fetched):
        own = address.replace("://", f"://robot:{SECRET}@")
        only_index(monkeypatch, own)
        monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
        monkeypatch.setattr(subprocess, "run", seen)
        name, version = "small-package", "1.0"
        places = [*indexes.pip_places(find_links=True), f"--find-links={own}"]
        assert f"{name}=={version}" in indexes.resolve([name], python="3.11", places=places)
        assert indexes.listed([f"{name}=={version}"], python="3.11", places=places)
        also = (f"--extra-index-url={own}",)
        assert indexes.versions(name, python="3.11", also=also) == (version,)
        target = platforms.InstallTarget(platform="linux/amd64", python="3.11", glibc=36)
        wanted = requirements.read_packages(locked_line(wheel))
        assert wheel_cache.WheelCache(tmp_path / "wheels").fill(wanted, target, also) == {}
        assert fetched
    monkeypatch.setattr(apt, "options", lambda: (f'Acquire::http::Proxy "http://robot:{SECRET}@proxy:1";',))
    way = base_sources.Way(name="here", sources=f"deb http://robot:{SECRET}@archive/ bookworm main")
    argv.append(" ".join(bootstrap._command("bookworm", (), bootstrap.NOTHING_SELECTED, tmp_path / "x", way)))
    assert len(argv) > 5
    assert [line for line in argv if SECRET in line] == []


# A lock of one folder of wheels: the folder's own hashes, or a refusal that names what is absent.


def test_a_lock_has_the_hashes_of_the_files_and_what_is_absent_is_named(tmp_path):
    wheel = make_wheel(tmp_path / "house", word="one")
    house = WheelFolder(wheel.parent)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    text = house.resolve(["small-package==1.0"], python="3.12")
    assert text == f"small-package==1.0 \\\n    --hash=sha256:{digest}\n"
    assert house.files(["small-package==1.0"]) == {"small-package==1.0": {wheel.name: digest}}
    with pytest.raises(BuildError, match="lacks packages of the stack") as caught:
        house.resolve(["small-package==1.0", "absent-one==2"], python="3.12")
    assert "absent-one" in str(caught.value.got)
    assert str(wheel.parent) in str(caught.value.next_step)
