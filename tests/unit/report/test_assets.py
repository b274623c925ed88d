"""The library that the package carries, so that a page is made without a network: which one, unchanged."""

from __future__ import annotations

import hashlib
import re
from importlib.resources import files
from pathlib import Path

from report_content import whole
from stackcheck.report import page

ASSETS = files("stackcheck.report").joinpath("assets")
ROOT = Path(__file__).resolve().parents[3]


def text(name: str) -> str:
    return ASSETS.joinpath(name).read_text(encoding="utf-8")


def test_uplot_is_the_release_that_the_page_of_the_report_names() -> None:
    told = (ROOT / "docs" / "guides" / "report.md").read_text(encoding="utf-8")
    version = re.search(r"\(v([0-9.]+)\)", text("uPlot.iife.min.js"))
    assert version
    assert f"uPlot {version[1]}" in told
    for name in ("uPlot.iife.min.js", "uPlot.min.css"):
        digest = hashlib.sha256(ASSETS.joinpath(name).read_bytes()).hexdigest()
        assert digest in told, f"{name} has sha256 {digest}"


def test_its_licence_lies_beside_it_and_in_the_page() -> None:
    assert "MIT License" in text("uPlot.LICENSE")
    assert "Leon Sorokin" in text("uPlot.LICENSE")
    assert text("uPlot.LICENSE") in page.render(whole()).decode()


def test_every_asset_is_used_or_named() -> None:
    known = {*page.SCRIPTS, *page.STYLES, "page.html.j2", "grafana.json", "uPlot.LICENSE"}
    assert {item.name for item in ASSETS.iterdir()} == known
