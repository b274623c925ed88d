"""A text of at least 50 MB that this machine has: sources and documentation of Python and its packages.

    python trainers/corpus.py --out FOLDER

Out: corpus.jsonl, a document a line; heldout.jsonl, one document in fifty, which no training sees; facts.json
with sizes, the digest and where the documents are from. `--data corpus` makes it in the cache. It is never
committed: another machine has other packages, so two systems that are compared must get one copy.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cache
from errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

LEAST, ENOUGH = 50_000_000, 64_000_000  # bytes
SMALLEST, LARGEST = 400, 400_000  # bytes of a document: longer ones are tables
HELD_OUT = 50  # one in so many
SUFFIXES = {".py", ".pyi", ".md", ".rst", ".txt"}
DOCUMENTATION = Path("/usr/share/doc")


def roots() -> list[Path]:
    """Where to look, in this order: the standard library, packages, documentation of the system."""
    paths = sysconfig.get_paths()
    found = [Path(paths[name]) for name in ("stdlib", "purelib", "platlib")]
    found += [Path(entry) for entry in sys.path if entry.endswith("-packages")]
    return [path for path in dict.fromkeys([*found, DOCUMENTATION]) if path.is_dir()]


def documents(folders: Iterable[Path]) -> Iterator[str]:
    """Each text of these folders once, in an order that depends on their names alone."""
    known: set[bytes] = set()
    for folder in folders:
        for path in _walk(folder):
            text = _text(path)
            name = hashlib.sha256(text.encode()).digest()
            if len(text) >= SMALLEST and name not in known:
                known.add(name)
                yield text


def _walk(folder: Path) -> Iterator[Path]:
    """The files of a folder, by name; lazily, because a system has a million of them."""
    for here, inside, names in os.walk(folder):
        inside.sort()
        yield from (Path(here) / name for name in sorted(names) if Path(name).suffix in SUFFIXES)


def _text(path: Path) -> str:
    try:
        if not path.is_file() or path.stat().st_size > LARGEST:
            return ""
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):  # a broken link, another encoding: not a text for us
        return ""


def write(
    folder: Path, folders: Iterable[Path] | None = None, *, enough: int = ENOUGH, least: int = LEAST
) -> dict[str, Any]:
    """Write the corpus; its facts. Raises RefusedError where this machine has less than `least`."""
    folder.mkdir(parents=True, exist_ok=True)
    looked = list(folders if folders is not None else roots())
    size, count, digest = 0, 0, hashlib.sha256()
    with (folder / "corpus.jsonl").open("w") as kept, (folder / "heldout.jsonl").open("w") as held:
        for text in documents(looked):
            name = hashlib.sha256(text.encode()).digest()
            line = json.dumps({"text": text}) + "\n"
            if int.from_bytes(name[:4], "big") % HELD_OUT == 0:
                held.write(line)
                continue
            kept.write(line)
            digest.update(name)
            size, count = size + len(text.encode()), count + 1
            if size >= enough:
                break
    if size < least:
        places = ", ".join(map(str, looked))
        raise RefusedError(
            f"{places} have {size / 1e6:.1f} MB of text, expected at least {least / 1e6:.0f}; "
            "install more Python packages, or give --data a text of your own"
        )
    facts = {
        "bytes": size,
        "documents": count,
        "sha256": digest.hexdigest(),
        "from": [str(path) for path in looked],
    }
    (folder / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")
    return facts


def made() -> Path:
    """The folder of this machine's corpus in the cache."""
    with cache.making(cache.key("corpus", ENOUGH, [str(path) for path in roots()], sys.version)) as folder:
        if not (folder / "facts.json").exists():
            write(folder)
        return folder


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the corpus")
    try:
        print(json.dumps(write(parser.parse_args().out)))
    except RefusedError as error:
        print(f"corpus.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
