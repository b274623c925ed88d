"""The Python of an image is found by this host, and accepted only as a package of the image installed it."""

import hashlib
import json
from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from fake_files import HEALTHY, PACKAGE, PYTHON, STATUS, HasFiles, dpkg
from stackcheck.errors import ChecksFailedError
from stackcheck.suite import interpreter

VENV = {
    "/opt/venv/bin/python3": "/usr/bin/python3",
    "/opt/venv/pyvenv.cfg": b"home = /usr/bin\ninclude-system-site-packages = false\n",
}


def find(
    files: Mapping[str, bytes | str],
    path: str | None = "/opt/venv/bin:/usr/bin",
    accepted: Collection[str] = (),
    **env: str,
) -> Any:
    class Engine(HasFiles):
        image = files

        def inspect(self, _reference: str) -> Any:
            return SimpleNamespace(env=env if path is None else {"PATH": path, **env})

    engine: Any = Engine()
    return interpreter.find("some:tag", engine, accepted)


def refusal(
    files: Mapping[str, bytes | str], path: str = "/opt/venv/bin:/usr/bin", *accepted: str, **env: str
) -> str:
    with pytest.raises(ChecksFailedError) as caught:
        find(files, path, accepted, **env)
    return str(caught.value)


@pytest.mark.parametrize("path", ["/usr/bin", None, ":bin:/nowhere:/usr/bin"])
def test_the_first_python_on_path_is_identified(path):
    found = find(HEALTHY, path)
    assert (found.path, found.file, found.package) == ("/usr/bin/python3", "/usr/bin/python3", PACKAGE)
    assert found.sha256 == "sha256:" + hashlib.sha256(PYTHON).hexdigest()


def test_another_python_first_on_path_is_refused():
    text = refusal(HEALTHY | {"/evil/bin/python3": b"#!/bin/sh"}, "/evil/bin:/usr/bin")
    assert "belongs to no package" in text
    assert "/evil/bin/python3" in text


def test_a_package_that_was_removed_owns_nothing():
    removed = dpkg(("/usr/bin/python3", PYTHON), status=STATUS.replace("install ok", "deinstall ok"))
    assert "belongs to no package" in refusal(HEALTHY | removed)


def test_an_image_without_python_or_packages_is_refused():
    assert "the image has no python3" in refusal({"/usr/bin/bash": b""})
    assert "belongs to no package" in refusal({"/usr/bin/python3": PYTHON})


def test_a_file_that_is_listed_without_usr_is_the_same_file():
    found = find({"/usr/bin/python3": PYTHON, **dpkg(("/bin/python3", PYTHON))})
    assert found.package == PACKAGE


@pytest.mark.parametrize(
    "config",
    [b"home = /evil/bin\n", b"home = /usr/bin\nhome = /evil/bin\n", b"", b"home=\n", b"home = usr/bin\n"],
)
def test_a_library_from_somewhere_else_is_refused(config):
    files = HEALTHY | VENV | {"/opt/venv/pyvenv.cfg": config, "/evil/bin/python3": PYTHON}
    assert "belongs to another Python" in refusal(files)


def conda(digest: str, name: str = "python") -> dict[str, bytes | str]:
    record = {
        "name": name,
        "version": "3.12.4",
        "paths_data": {"paths": [{"_path": "bin/python3.12", "sha256_in_prefix": digest}]},
    }
    return {
        "/opt/conda/bin/python3": "/opt/conda/bin/python3.12",
        "/opt/conda/bin/python3.12": PYTHON,
        f"/opt/conda/conda-meta/{name}-3.12.4-h1_0.json": json.dumps(record).encode(),
    }


def test_a_python_of_conda_is_identified():
    found = find(conda(hashlib.sha256(PYTHON).hexdigest()), "/opt/conda/bin")
    assert found.package == "conda:python 3.12.4"


def test_a_python_of_conda_that_was_exchanged_is_refused():
    assert "belongs to no package" in refusal(conda("0" * 64), "/opt/conda/bin")


@pytest.mark.parametrize(
    "record", [b"", b"[]", b'{"paths_data": {"paths": [1]}}', b'{"paths_data": 1}', b"[" * 99999]
)
def test_a_broken_record_owns_nothing(record):
    files = conda("") | {"/opt/conda/conda-meta/python-3.12.4-h1_0.json": record}
    assert "belongs to no package" in refusal(files, "/opt/conda/bin")


# As python:3.12 has it: built with --enable-shared, so the interpreter is a library.
NAME = "libpython3.12.so.1.0"
STUB = b"\x7fELF a stub that needs " + NAME.encode() + b"\0"
LIBRARY = b"\x7fELF the interpreter"
COMPILED = {
    "/usr/local/bin/python3": "/usr/local/bin/python3.12",
    "/usr/local/bin/python3.12": STUB,
    f"/usr/local/lib/{NAME}": LIBRARY,
}


def sha256(body: bytes) -> str:
    return "sha256:" + hashlib.sha256(body).hexdigest()


def test_a_python_of_no_package_counts_with_the_digests_of_its_files_and_says_so():
    found = find(COMPILED, "/usr/local/bin", {sha256(STUB), sha256(LIBRARY)})
    assert found.model_dump(exclude_defaults=True) == {
        "path": "/usr/local/bin/python3",
        "file": "/usr/local/bin/python3.12",
        "sha256": sha256(STUB),
        "package": None,
        "libraries": {f"/usr/local/lib/{NAME}": sha256(LIBRARY)},
    }


def test_the_refusal_names_each_file_and_the_way_out():
    text = refusal(COMPILED, "/usr/local/bin", sha256(STUB))
    assert "belongs to no package" in text
    assert f"sha256sum IMAGE /usr/local/bin/python3.12 /usr/local/lib/{NAME}" in text
    assert f"--accept-python {sha256(STUB)} --accept-python {sha256(LIBRARY)}" in text


@pytest.mark.parametrize(
    ("place", "env"),
    [
        (f"/usr/local/lib/{NAME}", {}),
        (f"/evil/{NAME}", {"LD_LIBRARY_PATH": "/usr/local/cuda/lib64:/evil"}),
        (f"/evil/glibc-hwcaps/x86-64-v3/{NAME}", {"LD_LIBRARY_PATH": "/evil"}),
        (f"/usr/lib/x86_64-linux-gnu/{NAME}", {}),
        (f"/cached/{NAME}", {}),
    ],
)
def test_another_library_in_place_of_the_accepted_one_is_refused(place, env):
    cache = {"/etc/ld.so.cache": b"glibc-ld.so.cache1.1\0" + f"\0{NAME}\0/cached/{NAME}\0".encode()}
    assert find(COMPILED | cache, "/usr/local/bin", {sha256(STUB), sha256(LIBRARY)}, **env).package is None
    text = refusal(
        COMPILED | cache | {place: b"\x7fELF evil"}, "/usr/local/bin", sha256(STUB), sha256(LIBRARY), **env
    )
    assert place in text


def test_a_script_is_never_accepted_by_its_digest():
    script = b"#!/bin/sh\necho PASSED\n"
    text = refusal({"/usr/local/bin/python3": script}, "/usr/local/bin", sha256(script))
    assert "a script cannot be accepted" in text
    assert "--accept-python" not in text


def test_a_library_that_is_loaded_into_every_program_is_refused():
    assert find(HEALTHY | {"/etc/ld.so.preload": b"\n"}).package == PACKAGE
    text = refusal(HEALTHY | {"/etc/ld.so.preload": b"/evil/lib.so\n"})
    assert "loads a library into every program" in text
    assert "/evil/lib.so" in text


def test_the_environment_of_uv_names_its_python_by_a_link_of_the_minor_version():
    full = "/opt/uv/python/cpython-3.12.11-linux-x86_64-gnu"
    files = {
        "/opt/uv/python/cpython-3.12-linux-x86_64-gnu": full,
        f"{full}/bin/python3.12": b"\x7fELF whole",
        "/opt/venv/bin/python3": f"{full}/bin/python3.12",
        "/opt/venv/pyvenv.cfg": b"home = /opt/uv/python/cpython-3.12-linux-x86_64-gnu/bin\nuv = 0.9.7\n",
    }
    assert find(files, "/opt/venv/bin", {sha256(b"\x7fELF whole")}).path == "/opt/venv/bin/python3"
