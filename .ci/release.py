"""Write the wheel of a release, with the address of the repository in its metadata and in its README.

In: `URL REF FOLDER`: the repository's web address, the tag or commit, where the files go. Out: the wheel and
SHA256SUMS. The tree itself states no address: only whoever publishes a copy knows the address of that copy.
"""

from __future__ import annotations

import hashlib
import io
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(!?)(\[[^\]]*\])\(([^)\s]+)\)")
CODE = re.compile(r"(^```.*?^```|`[^`\n]+`(?!\]))", re.MULTILINE | re.DOTALL)
PROJECT = "[project.optional-dependencies]"


def index_page(text: str, url: str, ref: str, root: Path) -> str:
    """README.md with absolute links and pictures: an index shows it far from the files beside it."""

    def absolute(found: re.Match[str]) -> str:
        picture, words, target = found.groups()
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        path = target.partition("#")[0]
        kind = "raw" if picture else "tree" if (root / path).is_dir() else "blob"
        return f"{picture}{words}({url}/{kind}/{ref}/{target})"

    parts = CODE.split(text)  # every second one is code
    return "".join(part if number % 2 else LINK.sub(absolute, part) for number, part in enumerate(parts))


def with_urls(pyproject: str, url: str, ref: str) -> str:
    """pyproject.toml with the addresses that an index shows beside the page."""
    addresses = {
        "Homepage": url,
        "Documentation": f"{url}/tree/{ref}/docs",
        "Changelog": f"{url}/blob/{ref}/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }
    lines = "".join(f'{name} = "{address}"\n' for name, address in addresses.items())
    if pyproject.count(PROJECT) != 1:
        raise SystemExit(f"pyproject.toml: expected {PROJECT} once")
    return pyproject.replace(PROJECT, f"[project.urls]\n{lines}\n{PROJECT}")


def write(url: str, ref: str, folder: Path) -> list[Path]:
    """Build the wheel of the committed tree; the files that were written."""
    if not re.fullmatch(r"https://[\w.-]+(/[\w.-]+){2,}", url):
        raise SystemExit(f"the address of the repository is missing or no address: {url!r}")
    folder.mkdir(parents=True, exist_ok=True)
    packed = subprocess.run(("git", "archive", ref), cwd=ROOT, check=True, capture_output=True).stdout
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
        with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
            tar.extractall(tree, filter="data")
        for path, change in ((tree / "README.md", index_page), (tree / "pyproject.toml", with_urls)):
            more = (tree,) if change is index_page else ()
            path.write_text(change(path.read_text(encoding="utf-8"), url, ref, *more), encoding="utf-8")
        command = (sys.executable, "-m", "pip", "--quiet", "wheel", "--no-deps", "--no-build-isolation")
        subprocess.run((*command, "--wheel-dir", str(folder.absolute()), "."), cwd=tree, check=True)
    wheels = sorted(folder.glob("*.whl"))
    sums = folder / "SHA256SUMS"
    sums.write_text(
        "".join(f"{hashlib.sha256(each.read_bytes()).hexdigest()}  {each.name}\n" for each in wheels)
    )
    return [*wheels, sums]


if __name__ == "__main__":
    for file in write(*sys.argv[1:3], Path(sys.argv[3])):
        print(file)
