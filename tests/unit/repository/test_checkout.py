"""What ships is short and says where it belongs; lists of the checkout hold, and `make` finds a Python."""

import ast
import functools
import os
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from by_path import module_at
from waits import run_program

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = ("stackcheck", "trainers", "tests/acceptance")
MODULE_LINES, FUNCTION_LINES = 400, 60


def too_long(path: Path) -> Iterator[str]:
    """The module if it is too long, and each function that is; decorators do not count."""
    text = path.read_text(encoding="utf-8")
    lines = len(text.splitlines())
    if lines > MODULE_LINES:
        yield f"{path}: {lines} lines, at most {MODULE_LINES}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            if length > FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name} has {length} lines, at most {FUNCTION_LINES}"


@pytest.mark.parametrize("folder", SHIPPED)
def test_modules_and_functions_are_short(folder):
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    assert [found for path in paths for found in too_long(path)] == []


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("x = 1\n" * MODULE_LINES, 0),
        ("x = 1\n" * (MODULE_LINES + 1), 1),
        ("def one():\n" + "    x = 1\n" * (FUNCTION_LINES - 1), 0),
        ("def one():\n" + "    x = 1\n" * FUNCTION_LINES, 1),
        ("class A:\n  async def one(self):\n" + "    x = 1\n" * FUNCTION_LINES, 1),
    ],
)
def test_what_is_too_long_is_found(tmp_path, text, problems):
    path = tmp_path / "module.py"
    path.write_text(text)
    assert len([*too_long(path)]) == problems


TESTS = Path(__file__).resolve().parents[2]
MARK = "mark" + ".slow"  # in two parts, or this file would be one of them


@pytest.mark.parametrize("folder", ["integration", "unit"])
def test_no_helper_hands_the_mark_on(folder):
    naming = [path for path in (TESTS / folder).rglob("*.py") if MARK in path.read_text(encoding="utf-8")]
    assert naming
    assert [path for path in naming if not path.name.startswith("test_")] == []
    handed_on = [f"from {path.stem} import" for path in naming]
    sources = {path: path.read_text(encoding="utf-8") for path in (TESTS / folder).rglob("*.py")}
    assert [path for path, text in sources.items() if any(words in text for words in handed_on)] == []


# Answers whether it is new enough, and its version, and can make no environment.
STUB = """#!/bin/sh
case "$*" in
--version) echo "Python 3.{minor}" ;;
*version_info*) [ {minor} -ge 11 ] ;;
*) exit 3 ;;
esac
"""


@pytest.mark.parametrize(
    ("there", "taken"),
    [
        ({"python3": 11}, "python3"),
        ({"python3": 10, "python3.11": 11}, "python3.11"),
        ({"python3": 10, "python3.11": 11, "python3.13": 13}, "python3.13"),
        ({"python3": 10}, None),
        ({}, None),
    ],
)
def test_a_newer_python_is_found_beside_an_old_one(there, taken, tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "dirname", "id"):
        (folder / name).symlink_to(shutil.which(name) or name)
    for name, minor in there.items():
        (folder / name).write_text(STUB.format(minor=minor))
        (folder / name).chmod(0o755)
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    done = run_program([str(folder / "sh"), ".ci/venv"], cwd=tmp_path, env={"PATH": str(folder)}, timeout=300)
    if taken:
        assert f"error: {taken} cannot make virtual environments" in done.stderr
        assert f"sudo apt-get install {taken}-venv" in done.stderr
    else:
        assert done.returncode == 2
        assert "sudo apt-get install python3.11 python3.11-venv" in done.stderr


SHARED = Path(__file__).resolve().parents[1] / "shared"
PAGE = SHARED / "README.md"
HEAD = """# What tests share

Each test imports these modules by their bare names. `make lists` writes this page from their first lines.

| module | what it gives |
|---|---|
"""


def index() -> str:
    """The page: a row for each module, with the first sentences of its docstring."""
    rows = []
    for path in sorted(SHARED.glob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        first = " ".join(docstring.split("\n\n")[0].split())
        rows.append(f"| `{path.stem}` | {first.replace('|', '&#124;')} |\n")
    return HEAD + "".join(rows)


def test_the_index_has_every_shared_module():
    if os.environ.get("STACKCHECK_WRITE_CHECKS"):
        PAGE.write_text(index(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == index(), "write it again: make lists"


def test_every_shared_module_says_what_it_gives():
    assert [line for line in index().splitlines() if line.endswith("|  |")] == []


URL, REF = "https://git.example.org/team/stackcheck", "v0.1.0"


@functools.cache
def program() -> Any:
    return module_at(ROOT / ".ci" / "release.py", "release")


def targets(text: str) -> Iterator[tuple[str, str]]:
    """Each link and picture of a page, as a renderer of Markdown sees it."""
    for block in MarkdownIt("commonmark").enable("table").parse(text):
        for token in block.children or ():
            if token.type in {"link_open", "image"}:
                yield token.type, str(token.attrs["src" if token.type == "image" else "href"])


def test_each_link_of_the_readme_is_absolute_and_leads_to_a_file_of_the_tree():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    before, after = list(targets(text)), list(targets(program().index_page(text, URL, REF, ROOT)))
    assert len(before) == len(after) > 20
    for (_, relative), (_, absolute) in zip(before, after, strict=True):
        if relative.startswith("https:"):
            assert absolute == relative
            continue
        path = relative.partition("#")[0]
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        assert absolute == f"{URL}/{kind}/{REF}/{relative}"
        assert (ROOT / path).exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("![a picture](docs/guides/report.png)", f"![a picture]({URL}/raw/{REF}/docs/guides/report.png)"),
        ("[docs](docs/)", f"[docs]({URL}/tree/{REF}/docs/)"),
        ("[`code`](README.md#test)", f"[`code`]({URL}/blob/{REF}/README.md#test)"),
        ("[below](#test) [far](https://a.org/x)", "[below](#test) [far](https://a.org/x)"),
        ("`[a](b)`", "`[a](b)`"),
        ("```\n[a](b)\n```\n", "```\n[a](b)\n```\n"),
    ],
)
def test_links_and_pictures_are_absolute_and_code_stays(text, expected):
    assert program().index_page(text, URL, REF, ROOT) == expected


def test_the_metadata_has_the_address_and_stays_otherwise_as_it_is():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    before, after = tomllib.loads(text), tomllib.loads(program().with_urls(text, URL, REF))
    urls = after["project"].pop("urls")
    assert set(urls) == {"Homepage", "Documentation", "Changelog", "Issues"}
    assert all(address.startswith(URL) for address in urls.values())
    assert after == before


@pytest.mark.parametrize(
    "url", ["", "/", "https:///", "http://a.org/b/c", "https://a.org", "https://a.org/b/c d"]
)
def test_a_release_without_an_address_is_refused(url, tmp_path):
    with pytest.raises(SystemExit, match="address"):
        program().write(url, "HEAD", tmp_path / "out")
    assert not (tmp_path / "out").exists()
