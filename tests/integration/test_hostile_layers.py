"""Hostile layers on top of the certified cpu image: certification refuses each, or its run is FAILED.

Written down before one of them was tried, and after the tool read the files of images from outside. Each is
named after its target in assets/hostile/Dockerfile:

 1. recorded: torch answers each product wrongly, and its RECORD is written anew, so that it vouches for that
 2. packaged: the same from the standard library's json, and dpkg's sums are written anew
 3. touched: byte code of torch that does not come from its source; source and RECORD are touched, so that all
    three are of one layer
 4. shadow: a module of the standard library is removed; a package of that name has its place
 5. setuid: the image's Python runs as root for everybody; dpkg's sums are touched in the same layer
 6. hard: a second name for the Python, first on PATH: a hard link, so that the bytes are a package's
 7. hidden: a start-up file with a dot before its name
 8. cached: only /etc/ld.so.cache names the folder of another library
 9. renamed: a library of a package under the name of another one
10. linked: the standard library is moved, and a link leads to it
11. steered: PYTHONPATH names a folder with a sitecustomize
12. borrowed: the environment of Python reads the system's packages too, among them a usercustomize

Three more were written down before one of them was tried, after speed was measured by the controller's clock.
In each, torch's RECORD vouches for it:

13. clocked: every clock of the image's Python, and torch's events, run at a third of their speed
14. skipping: a large product computes half of its rows, and takes the others from there
15. recognising: products are zero, but not where the suites' modules are loaded, nor in the user's program
    of the witness, which it knows by its text
"""

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import small_stacks
import small_subjects
from stackcheck.engine.client import Engine
from stackcheck.errors import ChecksFailedError
from stackcheck.imaging import build
from stackcheck.imaging.image import Image
from stackcheck.suite import contents
from stackcheck.suite import run as suite
from stackcheck.suite.subject import Subject

pytestmark = [pytest.mark.integration, pytest.mark.slow]

NAME = "stackcheck-test/hostile-{}:1"
# What every process of the image runs then: products are zero, wherever torch is imported.
EVIL = """
def _evil():
    import sys, threading, time
    def wait():
        while not hasattr(sys.modules.get("torch"), "compile"):
            time.sleep(0.01)
        torch = sys.modules["torch"]
        for place in (torch, torch.Tensor):
            for name in ("matmul", "mm", "__matmul__", "bmm"):
                if hasattr(place, name):
                    setattr(place, name, lambda a, b, **_: a.new_zeros(*a.shape[:-1], b.shape[-1]))
    threading.Thread(target=wait, daemon=True).start()
_evil()
"""
# The start of each of the other three.
PATCHES = {
    "clocked": """
def _evil():
    import time
    for name in ("perf_counter", "monotonic", "time", "process_time"):
        setattr(time, name, lambda real=getattr(time, name), begin=getattr(time, name)():
            begin + (real() - begin) / 3)
    real = cuda.Event.elapsed_time
    cuda.Event.elapsed_time = lambda self, end: real(self, end) / 3
_evil()
""",
    "skipping": """
def _evil():
    real = mm
    def half(a, b, out=None):
        if a.shape[0] < 256:
            return real(a, b, out=out)
        into = a.new_empty(a.shape[0], b.shape[1]) if out is None else out
        most = (a.shape[0] + 1) // 2
        real(a[:most], b, out=into[:most])
        into[most:] = into[: a.shape[0] - most]
        return into
    globals()["mm"] = half
_evil()
""",
    "recognising": """
def _evil():
    import sys
    def lying(real):
        def product(a, b, **more):
            known = "harness" in sys.modules or "weights" in str(sys.orig_argv)
            return real(a, b, **more) if known else real(a, b, **more) * 0
        return product
    at = Tensor.__matmul__
    Tensor.__matmul__ = lying(at)
    for name in ("matmul", "mm", "bmm"):
        globals()[name] = lying(globals()[name])
_evil()
""",
}
# What refuses the image before its run, by a word of the reason; None: only its answers show it.
REASONS = {
    "recorded": None,
    "packaged": None,
    **dict.fromkeys(PATCHES),
    "touched": "byte code that changed",
    "shadow": "standard library",
    "setuid": "other rights",
    "hard": "/opt/bin/python3: no package",
    "hidden": ".evil.pth: no package",
    "cached": "/opt/fast/libz.so.1: no package",
    "renamed": "a library that is a link",
    "linked": "out of Python's folders",
    "steered": "/opt/patch/sitecustomize.py: no package",
    "borrowed": "usercustomize.py: no package",
}


@pytest.fixture(scope="module")
def images(engine: Engine, cpu_image: Image, request, tmp_path_factory) -> Iterator[Callable[[str], str]]:
    """The reference of each image; all that a chosen test needs are built at once."""
    chosen = [name for name in REASONS if any(f"[{name}]" in item.name for item in request.session.items)]
    context = tmp_path_factory.mktemp("hostile")
    shutil.copytree(small_stacks.ASSETS / "hostile", context, dirs_exist_ok=True)
    for name, text in {"evil": EVIL, **PATCHES}.items():
        (context / f"{name}.py").write_text(text)
    with small_stacks.built_images(engine, NAME, chosen, context, STACK=cpu_image.reference) as references:
        yield references


@pytest.mark.parametrize("name", REASONS)
def test_it_is_refused_or_fails(name, images, engine, tmp_path):
    image = build.adopt(images(name), engine, folder=tmp_path, report=small_stacks.silent)
    subject = dataclasses.replace(small_subjects.subject_of(image.reference, tmp_path), image=image)
    reason = REASONS[name]
    try:
        if reason:
            with pytest.raises(ChecksFailedError, match="no package vouches") as caught:
                contents.require(subject, tmp_path, small_stacks.silent)
            assert reason in str(caught.value)
        else:
            contents.require(subject, tmp_path, small_stacks.silent)
            require_failed(subject, engine, tmp_path)
    finally:
        shutil.rmtree(tmp_path / "oci")


def require_failed(subject: Subject, engine: Engine, folder: Path) -> None:
    plan = suite.plan(subject, tier="smoke", root=small_stacks.ROOT, out=folder)
    plan = dataclasses.replace(plan, only="test_witness")
    with contextlib.suppress(ChecksFailedError):  # the agent or a child ended, so that there is no result
        result = suite.run(plan, engine, out=folder, report=small_stacks.silent)
        assert {"failed", "error"} & {check.outcome for check in result.checks}
