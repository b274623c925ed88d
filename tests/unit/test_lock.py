"""What `stackcheck lock` learns, keeps and refuses to invent, against small indexes on this machine."""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import http.server
import io
import json
import re
import tarfile
import threading
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stackcheck import extensions, indexes, lock, resolve
from stackcheck.stack import Base, Package
from stackcheck.upstream import OutOfReachError, Upstream, split_reference

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
STACKS = resolve.load_stacks(ROOT)
CPU = resolve.select(STACKS, ["cpu*"])[0]
LOCKS = sorted(ROOT.glob("images/*/*.lock"))
PINS = sorted(ROOT.glob("images/*/pins.json"))
DIGEST = "sha256:" + "7" * 64


class Deaf(Upstream):
    """No registry and no release page answers."""

    def base_digest(self, reference: str) -> str:
        host = split_reference(reference)[0]
        raise OutOfReachError(f"{host} is out of reach of this machine")

    def answers(self, url: str) -> str:
        return f"{url.split('/')[2]} is out of reach of this machine"

    def wheel_sha256(self, version: str, wheel: str) -> str:
        raise OutOfReachError(f"no release {version} of {wheel}")


class Hearing(Deaf):
    """Every registry answers."""

    def base_digest(self, reference: str) -> str:  # noqa: ARG002
        return DIGEST


def add_wheel(index: Path, name: str, version: str, *needs: str) -> str:
    """A wheel in a simple index (PEP 503) on disk; its checksum."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {need}\n" for need in needs)
    tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = {f"{info}/METADATA": metadata, f"{info}/WHEEL": tags}
    record = "".join(f"{path},{_record(text)}\n" for path, text in files.items())
    body = io.BytesIO()
    with zipfile.ZipFile(body, "w") as archive:
        for path, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(path, text)
    return _add(index, name, f"{name}-{version}-py3-none-any.whl", body.getvalue())


def _record(text: str) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
    return f"sha256={digest},{len(text)}"


def add_source(index: Path, name: str, version: str) -> str:
    """A source archive whose set-up cannot run here, as flash-attn's cannot without torch."""
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w:gz") as archive:
        for path, text in {
            "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\n",
            "setup.py": "import torch",
        }.items():
            member = tarfile.TarInfo(f"{name}-{version}/{path}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return _add(index, name, f"{name.replace('-', '_')}-{version}.tar.gz", body.getvalue())


def _add(index: Path, name: str, file: str, body: bytes) -> str:
    folder = index / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_bytes(body)
    digest = hashlib.sha256(body).hexdigest()
    with (folder / "index.html").open("a") as page:
        page.write(f'<a href="{file}#sha256={digest}">{file}</a>\n')
    return digest


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index on disk, the only one that this machine's pip is told of."""
    folder = tmp_path / "simple"
    add_wheel(folder, "torch", "2.13.0", "filelock")
    add_wheel(folder, "filelock", "4.0")
    add_wheel(folder, "einops", "0.8.2")
    for tool in ("ninja", "packaging", "psutil", "setuptools", "wheel"):
        add_wheel(folder, tool, "1.0")
    use(folder, monkeypatch)
    return folder


def use(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexes, "pip_places", lambda **_: [f"--index-url={index.as_uri()}"])


@pytest.fixture
def stack() -> resolve.Stack:
    """A stack that has a base and a builder in a registry, torch from the index and flash-attn's source."""
    flash = resolve.select(STACKS, ["cuda13.0-torch2.13.0-fa*ubuntu*"])[0]
    return dataclasses.replace(
        flash, wheels="index", requirements=("torch==2.13.0",), triton=None, collective=None, missing=()
    )


@pytest.fixture
def images(tmp_path: Path, stack: resolve.Stack) -> Path:
    (tmp_path / "images" / stack.id).mkdir(parents=True)
    return tmp_path / "images"


def pins_of(images: Path, stack: resolve.Stack) -> dict[str, object]:
    return json.loads((images / stack.id / "pins.json").read_text("utf-8"))


def test_a_reachable_machine_locks_packages_tools_sources_and_bases(
    index: Path, images: Path, stack: resolve.Stack
) -> None:
    sha256 = add_source(index, "flash-attn", "2.8.3")
    done = lock.lock(stack, images, Hearing())
    assert done == lock.Outcome(missing=(), kept=())
    folder = images / stack.id
    assert set(indexes.read(folder / "requirements.lock")) == {"torch", "filelock", "einops"}
    assert {"torch", "ninja", "setuptools"} <= set(indexes.read(folder / "toolchain.lock"))
    assert indexes.read(folder / "flash-attn.lock") == {"flash-attn": ("2.8.3", (f"sha256:{sha256}",))}
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
    index: Path, images: Path, stack: resolve.Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_lock_of_other_versions_does_not_stay(
    index: Path, images: Path, stack: resolve.Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_source(index, "flash-attn", "2.8.3")
    lock.lock(stack, images, Hearing())
    (tmp_path / "empty").mkdir()
    use(tmp_path / "empty", monkeypatch)
    newer = dataclasses.replace(stack, requirements=("torch==2.14.1",))
    done = lock.lock(newer, images, Deaf())
    assert any("torch==2.14.1" in reason for reason in done.missing)
    assert not (images / stack.id / "requirements.lock").exists()
    assert pins_of(images, stack)["locked"] is False


def test_an_absent_source_and_an_unreachable_registry_are_missing_one_reason_each(
    index: Path, images: Path, stack: resolve.Stack
) -> None:
    assert index.exists()
    done = lock.lock(stack, images, Deaf())
    assert len(done.missing) == 3
    assert "flash-attn" in done.missing[-1] or any("flash-attn==2.8.3" in line for line in done.missing)
    assert sum("docker.io is out of reach" in line for line in done.missing) == 2
    assert pins_of(images, stack)["sources"]["flash-attn"]["sha256"] is None


def test_the_place_of_torchs_makers_is_asked_when_no_index_of_pip_has_it(
    index: Path, images: Path, stack: resolve.Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_source(index, "flash-attn", "2.8.3")
    add_wheel(tmp_path / "whl" / "cu130", "torch", "2.13.0+cu130", "filelock")
    upstream = dataclasses.replace(stack, wheels="upstream", requirements=("torch==2.13.0+cu130",))
    monkeypatch.setattr(lock, "TORCH_INDEX", (tmp_path / "whl").as_uri())
    refused = lock.lock(upstream, images, Hearing())
    assert any("torch==2.13.0+cu130 is in no index" in reason for reason in refused.missing)
    monkeypatch.setattr(Hearing, "answers", lambda *_: None)
    assert lock.lock(upstream, images, Hearing()).missing == ()
    assert indexes.read(images / stack.id / "requirements.lock")["torch"][0] == "2.13.0+cu130"


def test_every_locked_package_has_a_hash() -> None:
    for path in LOCKS:
        names = re.findall(r"^[\w.-]+==", path.read_text("utf-8"), re.MULTILINE)
        assert len(indexes.read(path)) == len(names) > 0


def test_no_lock_names_an_index_host_or_a_path() -> None:
    for path in LOCKS:
        body = [line for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]
        assert not any("://" in line or line.startswith(("-", "/")) for line in body)


def test_pins_and_locks_tell_the_same_checksums() -> None:
    for path in PINS:
        for name, source in json.loads(path.read_text("utf-8"))["sources"].items():
            locked = indexes.read(path.with_name(f"{name}.lock")).get(name)
            assert (locked and locked[1]) == (source["sha256"] and (f"sha256:{source['sha256']}",))


def test_a_lock_that_disagrees_with_the_rules_is_not_complete() -> None:
    stack = resolve.select(STACKS, ["cuda13.0-*debian12"])[0]
    path = ROOT / "images" / stack.id / "requirements.lock"
    assert lock.disagreements(stack, path) == []
    wrong = dataclasses.replace(stack, triton=Package(name="triton", version="3.6.0"))
    assert lock.disagreements(wrong, path) == ["the indexes give triton 3.7.1, the rules 3.6.0"]


def test_a_wheel_that_only_amd_builds_is_never_taken_from_the_index(images: Path, index: Path) -> None:
    assert index.exists()
    stack = resolve.select(STACKS, ["*-amd"])[0]
    (images / stack.id).mkdir()
    done = lock.lock(stack, images, Deaf())
    assert "repo.radeon.com" in done.missing[0]
    assert not (images / stack.id / "requirements.lock").exists()


def test_what_is_missing_is_named_and_not_invented() -> None:
    stack = resolve.select(STACKS, ["rocm7.2.4-torch2.13.0*"])[0]
    assert stack.base.digest is None
    assert any("ubuntu:24.04" in reason for reason in stack.missing)
    assert any("download.pytorch.org/whl/rocm7.2" in reason for reason in stack.missing)


def test_the_cpu_stack_is_locked() -> None:
    assert CPU.missing == ()


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("ubuntu:24.04", ("docker.io", "ubuntu", "24.04")),
        ("rocm/dev-ubuntu-24.04:7.2.4-complete", ("docker.io", "rocm/dev-ubuntu-24.04", "7.2.4-complete")),
        ("quay.io/pypa/manylinux_2_28:1", ("quay.io", "pypa/manylinux_2_28", "1")),
        ("127.0.0.1:5000/base:1", ("127.0.0.1:5000", "base", "1")),
        ("localhost/base:1", ("localhost", "base", "1")),
    ],
)
def test_a_base_is_read_as_docker_reads_it(reference: str, expected: tuple[str, str, str]) -> None:
    assert split_reference(reference) == expected


@pytest.mark.parametrize(
    ("selector", "wheel"),
    [
        ("cuda12.1*", "flash_attn-2.6.3+cu123torch2.4cxx11abiFALSE-cp310-cp310-linux_x86_64.whl"),
        ("cuda12.8*", "flash_attn-2.8.3+cu12torch2.8cxx11abiTRUE-cp312-cp312-linux_x86_64.whl"),
    ],
)
def test_an_official_wheel_has_the_name_that_its_setup_looks_for(selector: str, wheel: str) -> None:
    (extension,) = extensions.extensions(resolve.select(STACKS, [selector])[0])
    assert extension.wheel == wheel
    assert extension.pin == f"flash-attn=={wheel.split('-')[1].lower()}"


@pytest.fixture
def releases(tmp_path: Path) -> Iterator[str]:
    """A release page in the form of GitHub's API, served on loopback."""
    handler = functools.partial(_Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        (tmp_path / "old.whl").write_bytes(b"an old wheel")
        assets = [
            {"name": "new.whl", "digest": DIGEST, "browser_download_url": f"{address}/gone.whl"},
            {"name": "old.whl", "digest": None, "browser_download_url": f"{address}/old.whl"},
        ]
        (tmp_path / "v2.8.3").write_text(json.dumps({"assets": assets}))
        yield address
        server.shutdown()
        thread.join()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def test_an_official_wheels_checksum_is_the_releases_or_that_of_its_bytes(releases: str) -> None:
    upstream = Upstream(releases=releases)
    assert upstream.wheel_sha256("2.8.3", "new.whl") == "7" * 64
    assert upstream.wheel_sha256("2.8.3", "old.whl") == hashlib.sha256(b"an old wheel").hexdigest()
    with pytest.raises(OutOfReachError, match=r"has no other\.whl"):
        upstream.wheel_sha256("2.8.3", "other.whl")
    with pytest.raises(OutOfReachError, match="404"):
        upstream.wheel_sha256("9.9", "new.whl")
    assert upstream.answers(f"{releases}/old.whl") is None


def test_a_place_that_does_not_answer_is_named_and_asked_once(unused_tcp_port: int) -> None:
    upstream = Upstream(releases=f"http://127.0.0.1:{unused_tcp_port}")
    asked = []
    ask = upstream._json
    upstream._json = lambda url: (asked.append(url), ask(url))[1]
    for _ in range(2):
        with pytest.raises(OutOfReachError, match=f"127.0.0.1:{unused_tcp_port} is out of reach"):
            upstream.wheel_sha256("2.8.3", "new.whl")
    assert len(asked) == 1
    with pytest.raises(OutOfReachError, match="is out of reach"):
        upstream.base_digest(f"127.0.0.1:{unused_tcp_port}/base:1")


@pytest.fixture
def unused_tcp_port() -> int:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Quiet) as server:
        return server.server_port


def test_an_index_that_hangs_is_one_that_does_not_answer(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexes, "TIMEOUT_S", 0.001)
    with pytest.raises(
        indexes.UnresolvedError, match=r"no index of this machine answers for torch==2\.13\.0"
    ):
        indexes.resolve(("torch==2.13.0",), python="3.12", places=[f"--index-url={index.as_uri()}"])
