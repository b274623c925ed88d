"""Images without torch that want to be PASSED: each is refused, or fails, on a real engine.

The first 17 are those of an audit (issue 30): all got PASSED when the suites ran on the image's own Python.
The twelve after them were written down before one of them was tried:

 1. a `python3` of the right name and package that is another Python's file
 2. a `libc.so.6` beside a program that finds it by its folder
 3. `sitecustomize` that answers for each child
 4. a link in the place of the agent's socket, to a socket of the host
 5. an agent that says that every child ended well, and starts none
 6. an agent that answers with 100 MB
 7. an agent that never answers
 8. a child that ends its parent, the agent, at once
 9. a `.pth` in site-packages that replaces `json`
10. a volume above the tool's folders (`/`-near: `/stackcheck`)
11. a setuid program and a device node in place of the library
12. a torch that computes sums right and all else wrong
"""

# ruff: noqa: E501 - a table of cases reads in rows
import dataclasses
import uuid
from collections.abc import Mapping

import pytest

import hostile_images
import small_stacks
import small_subjects
from hostile_images import EVIL, LIBRARY, SITE, Hostile, conda_record
from stackcheck.errors import StackcheckError
from stackcheck.suite import run as suite

pytestmark = pytest.mark.integration

EVIL_MODULE = EVIL.encode()
SCRIPT = b"#!/usr/bin/sh\nexec /usr/bin/python3 -c 'import evil' \"$@\"\n"
WITNESSES = 11  # the checks of test_witness.py on a CPU
SHADOW = f"exec(open('{LIBRARY}/pathlib.py').read())\n".encode()
HARNESS = "/stackcheck/tests/acceptance/harness"


def with_module(name: str, place: str = SITE) -> dict[str, bytes | str]:
    return {f"{place}/{name}.py": EVIL_MODULE}


def env(**more: str) -> Mapping[str, object]:
    return {"Env": ["PATH=/usr/bin:/bin", *(f"{name}={value}" for name, value in more.items())]}


def with_pth(code: str) -> dict[str, bytes | str]:
    return {f"{SITE}/evil_start.py": code.encode(), f"{SITE}/evil.pth": b"import evil_start\n"}


def agent(name: str, body: str) -> Hostile:
    """An image whose Python does something else as soon as it is the agent."""
    start = "import sys\nif sys.orig_argv[-1].endswith('/agent'):\n    import socket, os, time, json\n"
    return Hostile(name, with_pth(f"{start}{body}\n"))


def serving(answer: str) -> str:
    """The code of an agent that answers each request in one way."""
    return (
        "    listener = socket.socket(socket.AF_UNIX)\n    listener.bind(sys.orig_argv[-1])\n"
        "    listener.listen()\n    connection, _ = listener.accept()\n    facts = True\n    while True:\n"
        "        head, fds, _, _ = socket.recv_fds(connection, 8, 16)\n"
        "        size = int.from_bytes(head, 'big')\n        body = b''\n"
        "        while len(body) < size: body += connection.recv(size - len(body))\n"
        "        do = json.loads(body)['do']\n"
        "        told = {'environment': dict(os.environ), 'path': sys.executable, 'file': '', 'sha256': ''}\n"
        f"        answer = told if do == 'facts' else {answer}\n"
        "        text = json.dumps(answer).encode()\n"
        "        connection.sendall(len(text).to_bytes(8, 'big') + text)"
    )


AUDITED = (
    Hostile("e15 a volume on the harness", {f"{HARNESS}/agent.py": EVIL_MODULE}, {"Volumes": {HARNESS: {}}}),
    Hostile("e15b a volume on the runner", {}, {"Volumes": {"/stackcheck/tests": {}}}),
    Hostile("e1 python3 is another packaged program", {"/evil/python3": "/usr/bin/cat"}, {"Env": ["PATH=/evil:/usr/bin"]}),
    Hostile("e16 a module that subprocess tries", {f"{SITE}/msvcrt.py": EVIL_MODULE + b"raise ModuleNotFoundError\n"}),
    Hostile("e16b a package that copy tries", {f"{SITE}/org/__init__.py": EVIL_MODULE}),
    Hostile("e3 data of sysconfig", {f"{SITE}/evilmod.py": EVIL_MODULE + b"build_time_vars = {}\n"}, env(_PYTHON_SYSCONFIGDATA_NAME="evilmod")),
    Hostile("e4 a configuration of OpenSSL", {"/evil/openssl.cnf": b"x"}, env(OPENSSL_CONF="/evil/openssl.cnf")),
    Hostile("e4b OpenSSL's own configuration", {"/etc/ssl/openssl.cnf": b"openssl_conf = evil\n"}),
    Hostile("e14 a .pth that writes memory", with_pth(EVIL)),
    Hostile("e5 LD_LIBRARY_PATH", with_pth(EVIL), env(LD_LIBRARY_PATH="/evil")),
    Hostile("e6 hwcaps of glibc", {**with_pth(EVIL), "/usr/lib/glibc-hwcaps/x86-64-v2/libx.so": b"\x7fELF"}),
    Hostile("e7 ld.so.conf.d", {**with_pth(EVIL), "/etc/ld.so.conf.d/0.conf": b"/evil\n"}),
    Hostile("e8 an archive of the standard library", with_module("encodings_evil", LIBRARY) | with_pth(EVIL)),
    Hostile("e9 a package that shadows a module", {f"{LIBRARY}/pathlib/__init__.py": EVIL_MODULE + SHADOW}),
    Hostile("e10 poisoned byte code", {f"{LIBRARY}/__pycache__/json.cpython-x.pyc": b"x"}),
    Hostile("e11 a record of conda", {"/evil/bin/python3": SCRIPT, "/evil/conda-meta/python-3.json": conda_record(SCRIPT)}, {"Env": ["PATH=/evil/bin:/usr/bin"]}),
    Hostile("e17 a torch of 30 lines"),
)  # fmt: skip
# A child that ended has closed what it was given; with these open, the controller waits for its limit.
ENDED = "(os.write(fds[2], b'0'), [os.close(fd) for fd in fds]) and {'pid': 1}"
SUMS = b"import math\ndef tensor(rows, **_): return rows\n__version__ = '2.13.0'\n"
INVENTED = (
    Hostile("another python3", {"/usr/bin/python3": b"\x7fELF another"}),
    Hostile("a libc beside the program", {"/usr/bin/libc.so.6": b"\x7fELF", **with_pth(EVIL)}),
    Hostile("sitecustomize", with_module("sitecustomize")),
    agent("a link for a socket", "    os.symlink('/run/docker.sock', sys.orig_argv[-1])\n    time.sleep(600)"),
    agent("children that end well at once", serving(ENDED)),
    agent("an answer of 100 MB", serving("{'text': 'x' * 100_000_000}")),
    agent("an answer that never comes", serving("time.sleep(600)")),
    Hostile("a child that ends the agent", with_pth("import os, sys\nif 'harness' in str(sys.orig_argv): os.kill(1, 9), os.kill(os.getppid(), 9)\n")),
    Hostile("a .pth that replaces json", with_pth("import json\njson.loads = lambda *_: {'do': 'facts'}\n")),
    Hostile("a volume above the suites", {}, {"Volumes": {"/stackcheck": {}}}),
    Hostile("a library that is a link to a device", {f"{SITE}/torch/libtorch.so": "/dev/zero", **with_pth(EVIL)}),
    Hostile("a torch that knows some answers", {f"{SITE}/torch/__init__.py": SUMS}),
)  # fmt: skip

# Each is a way in that the usual half tries by another file, variable or answer; the slow half tries these.
ALIKE = (
    "e15b a volume on the runner",
    "e1 python3 is another packaged program",
    "e16 a module that subprocess tries",
    "e16b a package that copy tries",
    "e3 data of sysconfig",
    "e4 a configuration of OpenSSL",
    "e4b OpenSSL's own configuration",
    "e14 a .pth that writes memory",
    "e6 hwcaps of glibc",
    "e7 ld.so.conf.d",
    "e8 an archive of the standard library",
    "e10 poisoned byte code",
    "another python3",
    "a libc beside the program",
    "sitecustomize",
    "a child that ends the agent",
    "an answer of 100 MB",
    "an answer that never comes",
    "a .pth that replaces json",
    "a volume above the suites",
    "a torch that knows some answers",
)
IMAGES = {image.name: image for image in (*AUDITED, *INVENTED)}


@pytest.mark.parametrize(
    "hostile",
    [
        *(image for name, image in IMAGES.items() if name not in ALIKE),
        *(pytest.param(IMAGES[name], marks=pytest.mark.slow) for name in ALIKE),
    ],
    ids=str,
)
def test_it_gets_no_passed(hostile, engine, tmp_path):
    """Every witness of the run fails; or the image or its run is refused, and a reason is given."""
    reference = f"stackcheck-test/hostile:{uuid.uuid4().hex[:12]}"
    hostile_images.make_layout(tmp_path / "oci", hostile)
    engine.load(tmp_path / "oci", reference)
    subject, out = small_subjects.subject_of(reference, tmp_path), tmp_path / "out"
    plan = suite.plan(subject, tier="smoke", root=small_stacks.ROOT, out=out)
    plan = dataclasses.replace(plan, only="test_witness")
    try:
        result = suite.run(plan, engine, out=out, report=small_stacks.silent)
    except StackcheckError as refusal:
        require_reason(refusal)
        return
    finally:
        engine.remove(reference)
    witnesses = {check.id: check.outcome for check in result.checks}
    assert len(witnesses) == WITNESSES
    assert set(witnesses.values()) <= {"failed", "error"}


def require_reason(refusal: StackcheckError) -> None:
    assert refusal.got
    assert refusal.expected
