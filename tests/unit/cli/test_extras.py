"""What a small installation lacks: each verb says its extra before it begins."""

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from stackcheck import cli
from stackcheck.cli import usage
from stackcheck.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Starts the command line in a Python that cannot import the libraries named first.
WITHOUT = """
import sys
hidden = set(sys.argv[1].split(","))
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Finder())
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in hidden else find(name, package)
sys.argv[:] = ["stackcheck", *sys.argv[2:]]
from stackcheck import cli
cli.main()
"""
ALL = {name for _, libraries in usage.EXTRAS.values() for name in libraries}


def without(hidden: set[str], *words: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT, ",".join(hidden), *words]
    env = {"PYTHONPATH": str(ROOT), "HOME": str(cwd), "PATH": "/usr/bin:/bin", **more}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=env)


def test_the_libraries_are_those_of_pyproject():
    """A library that is added to an extra is looked for before a verb begins."""
    distributions = importlib.metadata.packages_distributions()
    for extra, (_, libraries) in usage.EXTRAS.items():
        asked = {Requirement(text).name for text in PROJECT["optional-dependencies"][extra]} - {"stackcheck"}
        found = {canonicalize_name(name) for module in libraries for name in distributions[module]}
        assert found >= {canonicalize_name(name) for name in asked}, extra
        assert len(libraries) == len(asked)


def test_every_verb_of_an_extra_exists():
    assert {verb for verbs, _ in usage.EXTRAS.values() for verb in verbs} <= cli.VERBS.keys()


@pytest.mark.parametrize("extra", usage.EXTRAS)
def test_every_verb_names_the_extra_that_it_lacks(extra, tmp_path):
    verbs, libraries = usage.EXTRAS[extra]
    for verb in verbs:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(usage, "find_spec", lambda name, lacks=libraries: None if name in lacks else name)
            with pytest.raises(ConfigurationError) as raised:
                usage.require_extra(verb)
        assert f"stackcheck[{extra}]" in str(raised.value.next_step)
    (verb, *_) = sorted(verbs)
    done = without(libraries, verb, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert f"pip install 'stackcheck[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("list",), 0),
        (("key",), 0),
        (("policy", "cosign"), 7),
        (("verify", "oci:nowhere:x"), 7),
        (("run", "oci:nowhere:x", "--", "true"), 125),
        (("pull", "oci:nowhere:x"), 7),
        (("find", "oci:nowhere"), 7),
        (("promote", "oci:nowhere:x", "--to", "oci:elsewhere"), 7),
        (("revoke", "oci:nowhere:x", "--reason", "x"), 2),
        (("judge", "result.json"), 2),
    ],
    ids=lambda words: words[0] if isinstance(words, tuple) else "",
)
def test_what_uses_images_needs_no_extra(words, code, tmp_path):
    done = without(ALL, *words, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert "the extra" not in done.stderr


def test_a_shell_completes_the_verbs_of_missing_extras(tmp_path):
    told = {"_STACKCHECK_COMPLETE": "complete_bash", "COMP_WORDS": "stackcheck h", "COMP_CWORD": "1"}
    done = without(ALL, cwd=tmp_path, **told)
    assert (done.stdout.split(), done.stderr) == (["history"], "")


def test_a_missing_library_of_stackcheck_itself_is_a_defect(tmp_path):
    """Only extras have a next step; anything else keeps its traceback."""
    done = without({"yaml"}, "list", cwd=tmp_path)
    assert "Traceback" in done.stderr
    assert usage.missing_library(ModuleNotFoundError(name="yaml")) is None
    assert "stackcheck[fleet]" in str(usage.missing_library(ModuleNotFoundError(name="jinja2.ext")))


def test_what_an_index_shows_agrees_with_the_project():
    shown = set(PROJECT["classifiers"])
    assert len(shown) == len(PROJECT["classifiers"])
    oldest = PROJECT["requires-python"].removeprefix(">=")
    versions = sorted(
        (
            line.rpartition(" ")[2]
            for line in shown
            if line.startswith("Programming Language :: Python :: 3.")
        ),
        key=lambda text: int(text.partition(".")[2]),
    )
    assert versions[0] == oldest
    assert not any(line.startswith("License ::") for line in shown), "the SPDX expression says it"
    assert ("Typing :: Typed" in shown) == (ROOT / "stackcheck" / "py.typed").exists()
    assert PROJECT["readme"] == "README.md"
    assert len(PROJECT["keywords"]) > 5
