"""A platform engineer: an empty folder, then a checkout with one block that no rule knows."""

from __future__ import annotations

import re
import shutil

import pytest
import yaml

from small_stacks import ROOT
from stackcheck.files import yamlfile

pytestmark = pytest.mark.slow
NEW = {
    "runtime": "cuda",
    "version": "13.0",
    "torch": "2.99.0",
    "python": ["3.12"],
    "os": ["debian12"],
    "wheels": ["upstream"],
}


def test_the_terminal_of_a_platform_engineer(journey):
    journey.types("stackcheck --version")
    journey.types("stackcheck verfy", code=2)
    journey.types("stackcheck list 'cpu*'")
    journey.types("stackcheck explain rocm=7.2 torch=2.99.0", code=11)
    journey.types("stackcheck find oci:nowhere --device-model CPU --driver none", code=7)
    journey.types("stackcheck verify oci:nowhere:x --key nobody.pub --json", code=2)
    checkout = journey.folder / "checkout"
    checkout.mkdir()
    for part in ("images", "tests/acceptance"):
        shutil.copytree(ROOT / part, checkout / part)
    value = yamlfile.load_yaml(ROOT / "matrix.yaml")
    value["stacks"].append(NEW)
    (checkout / "matrix.yaml").write_text(yaml.safe_dump(value))
    journey.types("cd checkout/images && stackcheck list 'cpu*'")
    journey.types("cd checkout && stackcheck list 2>&1 >/dev/null | head -n 1")
    journey.types("cd checkout && stackcheck mirror --print 'cuda13.0-torch2.99*'", code=2)
    journey.is_as_in("platform_engineer.txt")


def test_colour_is_of_a_terminal_alone(journey):
    line = "script -qec \"stackcheck list 'cpu*'; stackcheck verify oci:nowhere:x --key no\" /dev/null"
    journey.env.update(TERM="xterm")
    journey.env.pop("NO_COLOR", None)
    assert re.search(r"\x1b\[1;31merror:\x1b\[0m", journey.types(line, code=2))
    journey.env["NO_COLOR"] = "1"
    assert "\x1b" not in journey.types(line, code=2)
