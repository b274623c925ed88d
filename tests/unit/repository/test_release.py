"""What a package index shows of a release: links that work there, and the address of the project."""

import functools
import importlib.util
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[3]
URL, REF = "https://git.example.org/team/stackcheck", "v0.1.0"


@functools.cache
def program() -> Any:
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def targets(text: str) -> Iterator[tuple[str, str]]:
    """Each link and picture of a page, as a renderer of Markdown sees it."""
    for block in MarkdownIt("commonmark").enable("table").parse(text):
        for token in block.children or ():
            if token.type in {"link_open", "image"}:
                yield token.type, str(token.attrs["src" if token.type == "image" else "href"])


def test_each_link_of_the_readme_is_absolute_and_leads_to_a_file_of_the_tree() -> None:
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
def test_links_and_pictures_are_absolute_and_code_stays(text: str, expected: str) -> None:
    assert program().index_page(text, URL, REF, ROOT) == expected


def test_the_metadata_has_the_address_and_stays_otherwise_as_it_is() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    before, after = tomllib.loads(text), tomllib.loads(program().with_urls(text, URL, REF))
    urls = after["project"].pop("urls")
    assert set(urls) == {"Homepage", "Documentation", "Changelog", "Issues"}
    assert all(address.startswith(URL) for address in urls.values())
    assert after == before


@pytest.mark.parametrize(
    "url", ["", "/", "https:///", "http://a.org/b/c", "https://a.org", "https://a.org/b/c d"]
)
def test_a_release_without_an_address_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="address"):
        program().write(url, "HEAD", tmp_path / "out")
    assert not (tmp_path / "out").exists()
