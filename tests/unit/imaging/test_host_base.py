"""A base cut from a host: files of packages and dpkg's entries, without kernels of architectures unnamed."""

import hashlib
import json
import os
import tarfile
from pathlib import Path

import pytest

from stackcheck import vendors
from stackcheck.errors import BuildError, FileError
from stackcheck.files import atomic
from stackcheck.files.digest import sha256_of
from stackcheck.imaging import base_sources, bootstrap, host_base
from stackcheck.imaging.bootstrap import installed_packages
from stackcheck.imaging.plans import kernels
from stackcheck.matrix import resolve

STATUS = """\
Package: shell
Essential: yes
Status: install ok installed
Architecture: all
Version: 5.2-1
Provides: sh
Conffiles:
 /etc/shellrc {rc}

Package: dpkg
Status: install ok installed
Architecture: amd64
Version: 1.22

Package: python9
Status: install ok installed
Architecture: amd64
Version: 9.1
Depends: libnine (>= 9) | libeight, sh
Pre-Depends: certs:any

Package: libnine
Status: install ok installed
Architecture: amd64
Multi-Arch: same
Version: 9.0

Package: certs
Status: install ok installed
Architecture: all
Version: 2026

Package: secret-tool
Status: install ok installed
Architecture: all
Version: 1

Package: apt
Status: install ok installed
Architecture: amd64
Version: 2.9

Package: removed
Status: deinstall ok config-files
Architecture: all
Version: 1
"""
FILES = {
    "shell": {"/bin/sh": b"\x7fshell", "/etc/shellrc": b"PS1=x\n", "/usr/share/man/man1/sh.1": b"manual"},
    "dpkg": {"/usr/bin/dpkg": b"dpkg"},
    "python9": {"/usr/bin/python9": b"\x7fpython", "/usr/share/doc/python9/copyright": b"terms\n"},
    "libnine:amd64": {"/usr/lib/libnine.so": b"\x7flib"},
    "certs": {"/usr/share/ca-certificates/b.crt": b"B\n", "/usr/share/ca-certificates/a.crt": b"A"},
    "apt": {"/usr/bin/apt": b"apt"},
    "secret-tool": {"/usr/bin/secret": b"not asked for"},
}


@pytest.fixture
def root(tmp_path) -> Path:
    """A host with a merged /usr and six packages."""
    root = tmp_path / "host"
    (root / "usr/bin").mkdir(parents=True)
    (root / "bin").symlink_to("usr/bin")
    info = root / "var/lib/dpkg/info"
    info.mkdir(parents=True)
    for package, files in FILES.items():
        for name, data in files.items():
            path = root / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        listed = ["/.", *sorted({str(p) for name in files for p in Path(name).parents} - {"/"}), *files]
        (info / f"{package}.list").write_text("".join(f"{line}\n" for line in listed))
        sums = "".join(f"{md5(data)}  {name[1:]}\n" for name, data in files.items() if name != "/etc/shellrc")
        (info / f"{package}.md5sums").write_text(sums)
    (root / "var/lib/dpkg/status").write_text(STATUS.format(rc=md5(b"PS1=x\n")))
    (root / "usr/bin/python9").chmod(0o755)
    (root / "usr/bin/python").symlink_to("python9")
    with (info / "python9.list").open("a") as file:
        file.write("/usr/bin/python\n")
    alternatives = root / "var/lib/dpkg/alternatives"
    alternatives.mkdir()
    choices = "/usr/bin/secret\n90\n/usr/bin/python9\n50\n"
    (alternatives / "snake").write_text(f"manual\n/usr/bin/snake\n\n{choices}\n")
    (root / "etc/hostname").write_text("this-host\n")
    (root / "home").mkdir()
    return root


def md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def cut(root: Path, *packages: str, keep_changed: bool = False) -> host_base.Cut:
    return host_base.cut(
        packages, root.parent / "bases", system="A test", root=root, keep_changed=keep_changed
    )


def read(path: Path) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(path) as archive:
        return {entry.name.removeprefix("./"): entry for entry in archive}


def data(path: Path, name: str) -> bytes:
    with tarfile.open(path) as archive:
        file = archive.extractfile(f"./{name}")
        assert file is not None
        return file.read()


def test_a_base_has_the_closure_of_the_named_packages_and_nothing_else_of_the_host(root):
    made = cut(root, "python9")
    assert dict(made.packages) == {
        "apt": "2.9",
        "certs": "2026",
        "libnine": "9.0",
        "python9": "9.1",
        "shell": "5.2-1",
    }
    assert installed_packages(made.path) == made.packages  # dpkg in the image says the same
    found = read(made.path)
    assert found["bin"].linkname == "usr/bin"
    assert found["usr/bin/sh"].size == 6  # listed as /bin/sh
    assert found["usr/bin/python"].linkname == "python9"
    assert found["usr/bin/python9"].mode == 0o755
    assert data(made.path, "etc/ssl/certs/ca-certificates.crt") == b"A\nB\n"
    assert found["usr/bin/snake"].linkname == "/etc/alternatives/snake"
    assert (
        found["etc/alternatives/snake"].linkname == "/usr/bin/python9"
    )  # the host prefers what the base lacks
    assert data(made.path, "etc/hostname") == b"localhost\n"
    assert "usr/share/doc/python9/copyright" in found
    for name in ("usr/bin/secret", "usr/share/man/man1/sh.1", "home", "var/lib/dpkg/info/secret-tool.list"):
        assert name not in found
    assert {entry.mtime for entry in found.values()} == {1767225600}
    assert [*found] == sorted(found)


def test_two_cuts_are_one_digest_also_where_times_and_other_packages_differ(root):
    first = cut(root, "python9")
    for path in root.rglob("*"):
        os.utime(path, (1, 1), follow_symlinks=False)
    (root / "usr/bin/secret").write_bytes(b"upgraded")
    second = cut(root, "python9")
    assert second.facts() == first.facts()
    assert first.digest == "sha256:" + hashlib.sha256(first.path.read_bytes()).hexdigest()


def test_a_package_that_is_not_installed_is_named_with_who_needs_it(root):
    status = root / "var/lib/dpkg/status"
    status.write_text(status.read_text().replace("Package: libnine", "Package: another"))
    with pytest.raises(BuildError, match="this host lacks packages of the base") as caught:
        cut(root, "python9", "removed")
    assert "libnine or libeight, which python9 needs" in str(caught.value.got)
    assert "removed, which the stack needs" in str(caught.value.got)
    assert caught.value.next_step == "apt-get install libnine removed"


def test_a_file_that_is_missing_or_changed_is_refused_by_name(root):
    (root / "usr/bin/python9").write_bytes(b"\x7fpatched")
    (root / "usr/lib/libnine.so").unlink()
    with pytest.raises(
        BuildError, match="2 files of this host are not as their packages have them"
    ) as caught:
        cut(root, "python9", keep_changed=True)  # which is about configuration files alone
    assert "/usr/bin/python9 of python9 is not the package's file" in str(caught.value.got)
    assert "/usr/lib/libnine.so of libnine is missing" in str(caught.value.got)
    assert str(caught.value.next_step).startswith("apt-get install --reinstall libnine python9")
    assert not list((root.parent / "bases").glob("*"))


def test_a_changed_configuration_file_is_taken_only_when_asked_and_is_recorded(root):
    (root / "etc/shellrc").write_bytes(b"PS1=this host\n")
    with pytest.raises(BuildError, match="/etc/shellrc of shell is not the package's file") as caught:
        cut(root, "python9")
    assert "--keep-changed" in str(caught.value.next_step)
    made = cut(root, "python9", keep_changed=True)
    assert made.facts()["changed"] == ("/etc/shellrc",)
    (root / "etc/shellrc").unlink()
    assert cut(root, "python9").left_out == ("/etc/shellrc",)


def test_a_host_without_dpkg_and_a_disk_without_room_are_clear_errors(root, tmp_path, monkeypatch):
    with pytest.raises(BuildError, match="no packages that a base could be cut from"):
        host_base.cut(["python9"], tmp_path, system="A test", root=tmp_path / "empty")
    usage = type(atomic.shutil.disk_usage("/"))
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda _path: usage(1, 1, 0))
    with pytest.raises(FileError, match="not enough room for the base"):
        cut(root, "python9")
    monkeypatch.undo()
    (root.parent / "bases").rmdir()
    (root.parent / "bases").write_text("a file in the way")
    with pytest.raises(FileError):
        cut(root, "python9")


ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("hipcc", "librocblas-dev")


def stack(name: str) -> resolve.Stack:
    (found,) = resolve.load_stacks(ROOT, (name,))
    return found


def test_files_of_other_architectures_are_left_out_and_those_of_the_stack_kept():
    selected = kernels(stack("rocm5.7-debian13"))
    assert selected.excluded == ("/usr/lib/*/rocblas/*/library/*gfx*",)
    assert selected.included == ("/usr/lib/*/rocblas/*/library/*gfx90a*",)


@pytest.mark.parametrize("name", ["cpu-*", "cuda13.0-torch2.13.0-py3.11-debian12"])
def test_a_base_without_such_files_is_made_as_ever(name):
    assert kernels(stack(name)) == bootstrap.NOTHING_SELECTED


def test_what_is_left_out_is_part_of_the_key_of_a_base():
    every, wanted = vendors.module("amd").kernel_files(("gfx90a",))
    selected = bootstrap.Selected(excluded=every, included=wanted)
    keys = {
        bootstrap.key("trixie", PACKAGES),
        bootstrap.key("trixie", PACKAGES, selected),
        bootstrap.key("trixie", PACKAGES, bootstrap.Selected(excluded=every)),
    }
    assert len(keys) == 3
    assert bootstrap.key("trixie", PACKAGES) == bootstrap.key("trixie", PACKAGES, bootstrap.NOTHING_SELECTED)


def test_the_kept_files_come_after_the_left_out_as_the_last_match_counts(tmp_path):
    selected = bootstrap.Selected(excluded=("/a/*gfx*",), included=("/a/*gfx90a*",))
    way = base_sources.Way(name="an archive", sources="x")
    command = bootstrap._command("trixie", PACKAGES, selected, tmp_path / "rootfs.tar", way)
    assert command.index("--dpkgopt=path-exclude=/a/*gfx*") < command.index(
        "--dpkgopt=path-include=/a/*gfx90a*"
    )


def test_a_base_whose_tar_is_not_the_described_one_is_made_again(tmp_path):
    """It may be exchanged at the same size and time, by a rename."""
    tar, description = tmp_path / "x.tar", tmp_path / "x.json"
    tar.write_bytes(b"base")
    facts = {"digest": "sha256:" + sha256_of(tar), "packages": {}}
    description.write_text(json.dumps(facts))
    assert bootstrap.load_root_fs(description, reused=True) is not None
    status = tar.stat()
    other = tmp_path / "other"
    other.write_bytes(b"evil")
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.rename(tar)
    assert bootstrap.load_root_fs(description, reused=True) is None
