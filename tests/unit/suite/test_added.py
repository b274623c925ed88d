"""What a layer on top adds: apart only if nothing below could come to it without knowing its name."""

from pathlib import Path
from typing import Any

import pytest

import layered
from layered import DEVICE, ELF, FOLDER, HARD, Layer, Member
from stackcheck.errors import ConfigurationError
from stackcheck.suite import added

SITE = "opt/venv/lib/python3.11/site-packages"
NAMES = b"import optional_name\nfor tool in ('gcc', 'quoted-name'): which(tool)\nopen('/cache/x')\n"
BELOW: Layer = {
    "etc": Member(kind=FOLDER),
    "usr/bin": Member(kind=FOLDER),
    "opt/venv/bin": Member(kind=FOLDER),
    SITE: Member(kind=FOLDER),
    f"{SITE}/torch/__init__.py": NAMES,
    f"{SITE}/torch/lib/libtorch.so": ELF + b"\0in_a_library\0",
    "usr/lib/x/libc.so.6": ELF,
    "usr/bin/python3": "python3.11",
    "work": "/dangling",
    "usr/lib/circle": "circle",
    "usr/lib/python3/dist-packages/elsewhere/__init__.py": b"",
    "usr/lib/there": "../../near/x",
    "etc/ld.so.conf.d/x.conf": b"/usr/lib/x\n",
}
PARENT = {SITE: Member(kind=FOLDER), "opt/venv/bin": Member(kind=FOLDER)}
COMMANDS = b"[console_scripts]\nnew-tool = apart.cli:main\n"
APART: dict[str, Layer] = {
    "a script in a folder of its own": {"app": Member(kind=FOLDER), "app/train.py": b"import torch"},
    "a module": {**PARENT, f"{SITE}/apart.py": b""},
    "a package": {
        **PARENT,
        f"{SITE}/apart/__init__.py": b"",
        f"{SITE}/apart-1.2.dist-info/RECORD": b"",
        f"{SITE}/apart-1.2.dist-info/entry_points.txt": COMMANDS,
        "opt/venv/bin/new-tool": Member(body=b"#!/opt/venv/bin/python"),
    },
    "nothing": {},
}
SEEN: dict[str, Layer] = {
    "sitecustomize": {f"{SITE}/sitecustomize.py": b""},
    "usercustomize": {f"{SITE}/usercustomize.py": b""},
    "a start-up file": {f"{SITE}/apart.pth": b"import apart"},
    "a module of Python": {f"{SITE}/json/__init__.py": b""},
    "an optional module": {f"{SITE}/optional_name/__init__.py": b""},
    "an optional module, by its distribution": {f"{SITE}/Quoted_Name-1.dist-info/METADATA": b""},
    "a module that a library names": {f"{SITE}/in_a_library.py": b""},
    "a module of another folder": {f"{SITE}/elsewhere.py": b""},
    "a module inside a package": {f"{SITE}/torch/apart.py": b""},
    "a module in place of a package": {f"{SITE}/torch.py": b""},
    "a plug-in": {f"{SITE}/apart-1.dist-info/entry_points.txt": b"[torch.backends]\nx = apart:y\n"},
    "a plug-in by defaults": {f"{SITE}/apart-1.dist-info/entry_points.txt": b"[DEFAULT]\nx = apart:y\n"},
    "a list of plug-ins that cannot be read": {f"{SITE}/apart-1.dist-info/entry_points.txt": b"\xff["},
    "a library": {"app/libapart.so": ELF},
    "a program": {"app/apart": ELF},
    "a link": {"app/apart": "/usr/lib/x/libc.so.6"},
    "a file replaced by a link": {f"{SITE}/torch/__init__.py": "/app/evil.py", "app/evil.py": b""},
    "a hard link to a library": {"app/apart": Member(kind=HARD, target="usr/lib/x/libc.so.6")},
    "a device": {"app/apart": Member(kind=DEVICE)},
    "a program with rights": {"app/apart": Member(body=b"#!/bin/sh", mode=0o4755)},
    "a removed library": {"usr/lib/x/.wh.libc.so.6": b""},
    "an emptied folder": {"usr/lib/x/.wh..wh..opq": b""},
    "a changed library": {"usr/lib/x/libc.so.6": ELF + b"!"},
    "the same file again": {"usr/lib/x/libc.so.6": ELF},
    "a changed configuration": {"etc/ld.so.conf.d/x.conf": b"/app\n"},
    "a new configuration": {"etc/ld.so.conf.d/apart.conf": b"/app\n"},
    "NCCL's configuration": {"etc/nccl.conf": b"NCCL_ALGO=Tree\n"},
    "a closed folder": {SITE: Member(kind=FOLDER, mode=0o700)},
    "a folder with other attributes": {
        SITE: Member(kind=FOLDER, headers={"SCHILY.xattr.system.posix_acl_access": "x"})
    },
    "a program that others start": {"opt/venv/bin/gcc": Member(body=b"#!/bin/sh")},
    "a file at home": {"root/.nccl.conf": b""},
    "a folder that the image names": {"cache/x": b""},
    "a folder that a link names": {"dangling/x": b""},
    "a folder that a link names, from where it is": {"near/x": b""},
    "a variable's folder": {"variable/x": b""},
    "what the suites name": {f"{SITE}/of_the_suites.py": b""},
    "another folder of packages": {"app/lib/python3.11/site-packages/apart.py": b""},
    "byte code of no module": {f"{SITE}/__pycache__/apart.cpython-311.pyc": b""},
    "byte code alone": {f"{SITE}/apart.pyc": b""},
}


@pytest.fixture
def suites(tmp_path) -> Path:
    for name in added.OURS:
        (tmp_path / "suites" / name).mkdir(parents=True)
    (tmp_path / "suites/tests/test_x.py").write_text("import of_the_suites\n")
    return tmp_path / "suites"


ENV = {"CACHE": "/variable/x"}


def look(
    tmp_path: Path, suites: Path, *layers: Layer, below: tuple[Layer, ...] = (BELOW,), **own: Any
) -> Any:
    lower = layered.make(tmp_path / "below", *below, env=ENV)
    upper = layered.make(tmp_path / "on-top", *layers, **({"env": ENV} | own))
    return added.look(tmp_path / "on-top", upper, added.config_of(tmp_path / "below", lower), suites)


@pytest.mark.parametrize("name", APART)
def test_what_nothing_below_knows_is_apart(tmp_path, suites, name):
    found = look(tmp_path, suites, BELOW, APART[name])
    assert (found.seen, found.layers) == ("", 1)
    assert (
        found.paths
        == sum(not isinstance(item, Member) or path not in BELOW for path, item in APART[name].items())
        or found.paths
    )


@pytest.mark.parametrize("name", SEEN)
def test_all_else_is_seen_and_named(tmp_path, suites, name):
    assert look(tmp_path, suites, BELOW, SEEN[name]).seen
    assert look(tmp_path / "apart", suites, BELOW, APART["a package"], SEEN[name]).seen


@pytest.mark.parametrize(
    "own",
    [
        {"env": ENV | {"LD_PRELOAD": "/app/x.so"}},
        {"env": {}},
        *(
            {"settings": {name: ["x"]}}
            for name in ("Entrypoint", "User", "Volumes", "Healthcheck", "Shell", "New")
        ),
    ],
    ids=str,
)
def test_another_setting_is_seen(tmp_path, suites, own):
    assert "setting" in look(tmp_path, suites, BELOW, {}, **own).seen


@pytest.mark.parametrize("name", added.UNSEEN)
def test_what_no_run_uses_is_not_seen(tmp_path, suites, name):
    assert look(tmp_path, suites, BELOW, {}, settings={name: ["x"]}).seen == ""


@pytest.mark.parametrize(
    "layers",
    [(BELOW | {"usr/lib/x/libc.so.6": ELF + b"!"}, {}), (), ({}, BELOW)],
    ids=("another base", "no layer", "the base on top"),
)
def test_an_image_that_was_not_made_from_the_other_is_refused(tmp_path, suites, layers):
    with pytest.raises(ConfigurationError, match="was not made from this one"):
        look(tmp_path, suites, *layers)


def test_a_layer_that_is_not_what_the_config_says_is_refused(tmp_path, suites, monkeypatch):
    """The config names the layers of the base, and the manifest other ones."""
    lower = layered.make(tmp_path / "below", BELOW, env=ENV)
    honest = added.config_of(tmp_path / "below", lower)
    other = layered.make(tmp_path / "other", BELOW | {"usr/lib/x/libc.so.6": ELF + b"!"}, {}, env=ENV)
    config = added.config_of(tmp_path / "other", other)
    config["rootfs"]["diff_ids"][0] = honest["rootfs"]["diff_ids"][0]
    monkeypatch.setattr(added, "config_of", lambda *_: config)
    with pytest.raises(ConfigurationError, match="not made from"):
        added.look(tmp_path / "other", other, honest, suites)


def test_a_layer_that_the_config_does_not_name_is_looked_at(tmp_path, suites, monkeypatch):
    lower = layered.make(tmp_path / "below", BELOW, env=ENV)
    config = added.config_of(tmp_path / "below", lower)
    upper = layered.make(tmp_path / "on-top", BELOW, SEEN["a changed library"], env=ENV)
    monkeypatch.setattr(added, "config_of", lambda *_: config)
    assert added.look(tmp_path / "on-top", upper, config, suites).seen


@pytest.mark.parametrize("shift", range(0, 16, 2))
def test_a_name_is_found_where_two_pieces_of_a_layer_meet(tmp_path, suites, shift):
    big: Layer = {"usr/data": b"." * ((1 << 20) - 512 - 14 + shift) + b"\nimport apart\n" + b"." * 4096}
    assert look(tmp_path, suites, BELOW, big, {f"{SITE}/apart.py": b""}, below=(BELOW, big)).seen


NAMED = (
    *(
        "import apart",
        "from apart import x",
        "import os, apart as a",
        "import a.b as c,apart",
        "    import apart.x",
    ),
    *(
        "import_module('apart')",
        'find_spec("apart.x")',
        "['apart>=1']",
        "x = apart:plugin",
        "x=apart.y",
        "\0apart\0",
    ),
    *("IMPORT Apart", "try:import apart", "r'apart'"),
)
UNNAMED = (
    *(
        "# set apart, by far",
        "it is apart",
        "from .apart import x",
        "import os.apart",
        "'set apart'",
        "apart = 1",
    ),
    *("import apartment", "not-apart", "/apart", "x.apart"),
)


@pytest.mark.parametrize("text", NAMED)
def test_a_package_is_named_by_what_imports_it(text):
    assert added._named(text.encode(), {"apart": added.Spelling.of("apart")})


@pytest.mark.parametrize("text", UNNAMED)
def test_prose_names_no_package(text):
    assert not added._named(text.encode(), {"apart": added.Spelling.of("apart")})


@pytest.mark.parametrize(
    "text",
    ["'/app'", "X=/app/x", "\0/app\0", "PATH=/bin:/app", "`/app/x`", "X=/bin:/app", "/usr/lib\n/app/lib\n"],
)
def test_a_folder_is_named_by_its_whole_path(text):
    assert added._named(text.encode(), {"/app": added.Spelling.of("/app")})
    assert not added._named(text.replace("/app", "x/app").encode(), {"/app": added.Spelling.of("/app")})


@pytest.mark.parametrize("text", ["gcc -c x", "run gcc", "'gcc'", "/usr/bin/gcc\n", "\0gcc\0"])
def test_a_program_is_named_by_any_word(text):
    names = {"bin/gcc": added.Spelling.of("bin/gcc")}
    assert added._named(text.encode(), names)
    assert not added._named(text.replace("gcc", "gcc-12").encode(), names)


@pytest.mark.parametrize(
    "text", ["run -w /app x", "hf://spaces/org/space:/app", "<id>:/app/x", "a/app", "/apps"]
)
def test_prose_and_addresses_name_no_folder(text):
    assert not added._named(text.encode(), {"/app": added.Spelling.of("/app")})
