"""Data as its users have it: by the writer of mosaicml-streaming, and by `datasets`.

`import streaming` itself also loads its image data sets and with them torchvision, which has no build for
torch's CPU wheels. So its package is entered below its own `__init__`.
"""

import importlib.machinery
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest


def _entered() -> None:
    if "streaming" in sys.modules:
        return
    found = importlib.machinery.PathFinder.find_spec("streaming")
    if found is None or found.origin is None:
        pytest.skip("mosaicml-streaming is not installed (.ci/peers.txt pins it)")
    package = types.ModuleType("streaming")
    package.__path__ = [str(Path(found.origin).parent)]
    sys.modules["streaming"] = package


def write(folder: Path, encoding: str, rows: list[Any], *, column: str = "tokens", **how: Any) -> Path:
    """Rows as shards; raw bytes where the encoding is `bytes`. `how`: compression, size_limit, …"""
    _entered()
    from streaming.base.format.mds.writer import MDSWriter

    with MDSWriter(out=str(folder), columns={column: encoding}, **how) as out:
        for row in rows:
            out.write({column: row.tobytes() if encoding == "bytes" else row})
    return folder


def saved(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """A saved data set, made from JSON lines (from_dict cannot pickle pyarrow 26's types)."""
    import datasets

    lines = folder.with_suffix(".json")
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    datasets.Dataset.from_json(str(lines), cache_dir=str(folder.with_suffix(".cache"))).save_to_disk(folder)
    return folder
