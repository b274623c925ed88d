"""A contributor without torch: the tool's own tests, a new check with a mistake, its repair, its proof."""

from __future__ import annotations

import importlib.util
import re
import shutil

import pytest

from small_stacks import ROOT
from stackcheck.certificate import keys

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="this Python has torch"),
]
STACK = "cpu-torch2.13.0-py3.11-debian12"
BLOCK = re.compile(r"^```python\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TOLD = (
    "grep -E '^(stackcheck:|ERROR|=+ .*passed)'"
    " | sed -E 's/=+ //; s/[0-9]+ (skipped|deselected),? ?//g; s/,? in [0-9].*//'"
)


def test_the_terminal_of_a_contributor(journey):
    own = journey.checkout(STACK)
    for name, text in BLOCK.findall((ROOT / "docs/guides/write-a-check.md").read_text(encoding="utf-8")):
        (own / name).write_text(text, encoding="utf-8")
    public = keys.public_path(keys.default_path())  # of whoever certified the image in dist
    shutil.copytree(
        public.parent, journey.home / ".config" / "stackcheck", ignore=lambda *_: ["stackcheck.key"]
    )
    tests = "cd checkout && python -m pytest tests"
    journey.types(f"{tests} -k files_and_commands | {TOLD}")
    journey.types(f"{tests} --gpu-vendor cpu -k sort", code=4)
    program = own / "tests/acceptance/workloads/sorting.py"
    program.write_text(program.read_text().replace("torch.arange(size)", "torch.arange(size + 1)"))
    test = f"cd checkout && stackcheck -q test {STACK}"
    journey.types(f"{test} -k 'gemm or sort'", code=6)
    program.write_text(program.read_text().replace("size + 1", "size"))
    journey.types(f"{test} --last-failed")
    journey.types(f"{test} --last-failed", code=3)
    journey.types("cd checkout && stackcheck -q prove --only test_sort")
    journey.types("cd checkout && stackcheck -q prove --only no-such-check", code=3)
    journey.is_as_in("contributor.txt")
