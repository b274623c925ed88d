"""The Python of an image is found by this host, and accepted only as a package of the image installed it."""

from __future__ import annotations

import hashlib
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from fake_files import HEALTHY, PACKAGE, PYTHON, STATUS, HasFiles, dpkg
from stackcheck.errors import ChecksFailedError
from stackcheck.suite import interpreter

if TYPE_CHECKING:
    from collections.abc import Mapping

VENV = {
    "/opt/venv/bin/python3": "/usr/bin/python3",
    "/opt/venv/pyvenv.cfg": b"home = /usr/bin\ninclude-system-site-packages = false\n",
}


def find(files: Mapping[str, bytes | str], path: str | None = "/opt/venv/bin:/usr/bin") -> Any:
    class Engine(HasFiles):
        image = files

        def inspect(self, _reference: str) -> Any:
            return SimpleNamespace(env={} if path is None else {"PATH": path})

    engine: Any = Engine()
    return interpreter.find("some:tag", engine)


def refusal(files: Mapping[str, bytes | str], path: str = "/opt/venv/bin:/usr/bin") -> str:
    with pytest.raises(ChecksFailedError) as caught:
        find(files, path)
    return str(caught.value)


@pytest.mark.parametrize("path", ["/usr/bin", None, ":bin:/nowhere:/usr/bin"])
def test_the_first_python_on_path_is_identified(path: str | None) -> None:
    found = find(HEALTHY, path)
    assert (found.path, found.file, found.package) == ("/usr/bin/python3", "/usr/bin/python3", PACKAGE)
    assert found.sha256 == "sha256:" + hashlib.sha256(PYTHON).hexdigest()


def test_a_virtual_environment_is_called_by_its_own_path() -> None:
    found = find(HEALTHY | VENV)
    assert (found.path, found.file) == ("/opt/venv/bin/python3", "/usr/bin/python3")


def test_another_python_first_on_path_is_refused() -> None:
    text = refusal(HEALTHY | {"/evil/bin/python3": b"#!/bin/sh"}, "/evil/bin:/usr/bin")
    assert "belongs to no package" in text
    assert "/evil/bin/python3" in text


def test_a_python_that_was_exchanged_is_refused() -> None:
    assert "belongs to no package" in refusal(HEALTHY | {"/usr/bin/python3": PYTHON + b"!"})


def test_a_package_that_was_removed_owns_nothing() -> None:
    removed = dpkg(("/usr/bin/python3", PYTHON), status=STATUS.replace("install ok", "deinstall ok"))
    assert "belongs to no package" in refusal(HEALTHY | removed)


def test_an_image_without_python_or_packages_is_refused() -> None:
    assert "the image has no python3" in refusal({"/usr/bin/bash": b""})
    assert "belongs to no package" in refusal({"/usr/bin/python3": PYTHON})


def test_a_file_that_is_listed_without_usr_is_the_same_file() -> None:
    found = find({"/usr/bin/python3": PYTHON, **dpkg(("/bin/python3", PYTHON))})
    assert found.package == PACKAGE


@pytest.mark.parametrize(
    "config",
    [b"home = /evil/bin\n", b"home = /usr/bin\nhome = /evil/bin\n", b"", b"home=\n", b"home = usr/bin\n"],
)
def test_a_library_from_somewhere_else_is_refused(config: bytes) -> None:
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


def test_a_python_of_conda_is_identified() -> None:
    found = find(conda(hashlib.sha256(PYTHON).hexdigest()), "/opt/conda/bin")
    assert found.package == "conda:python 3.12.4"


def test_a_python_of_conda_that_was_exchanged_is_refused() -> None:
    assert "belongs to no package" in refusal(conda("0" * 64), "/opt/conda/bin")


@pytest.mark.parametrize(
    "record", [b"", b"[]", b'{"paths_data": {"paths": [1]}}', b'{"paths_data": 1}', b"[" * 99999]
)
def test_a_broken_record_owns_nothing(record: bytes) -> None:
    files = conda("") | {"/opt/conda/conda-meta/python-3.12.4-h1_0.json": record}
    assert "belongs to no package" in refusal(files, "/opt/conda/bin")
