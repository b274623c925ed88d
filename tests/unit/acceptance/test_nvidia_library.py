"""The release of nvidia-ml-py, found without importlib.metadata."""

import importlib.metadata
from pathlib import Path
from types import SimpleNamespace

import pynvml

from vendors import nvidia_library


def test_the_release_is_the_one_that_the_installer_recorded(tmp_path: Path) -> None:
    assert nvidia_library.version(pynvml) == importlib.metadata.version("nvidia-ml-py")
    nowhere = SimpleNamespace(__file__=str(tmp_path / "pynvml.py"))
    assert nvidia_library.version(nowhere) == "of unknown version"
