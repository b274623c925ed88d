"""A consumer without a checkout: the wheel in an environment of its own, and the key by file and by URL."""

import datetime as dt
import json
import os
import subprocess
import sys
import uuid
import venv
from pathlib import Path
from typing import Any

import pytest

import small_stacks
from small_images import STACK_ID, SmallImage, new_key, release
from small_registry import serving
from stackcheck import cli
from stackcheck.certificate import keyring, keys
from stackcheck.cli import usage
from stackcheck.imaging.build import Image
from stackcheck.oci.layout import OciLayout
from waits import run_program

KEY = new_key()
HOST = ("--device-model", "CPU", "--driver", "none")


PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
MOST_PACKAGES = 30  # of an installation that only uses images; the whole tool has 48


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a build writes into its source
    tracked = run_program(
        ["git", "-C", small_stacks.ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        check=True,
    ).stdout.split("\0")
    parts = (
        "stackcheck/",
        "images/",
        "tests/acceptance/",
        "tests/conftest.py",
        "tests/pytest.ini",
        "trainers/",
    )
    files = ("pyproject.toml", "README.md", "LICENSE", "matrix.yaml")
    wanted = [name for name in tracked if name.startswith(parts) or name in files]
    source.mkdir()
    copied = ["cp", "--parents", "--no-dereference", *wanted, str(source)]
    subprocess.run(copied, check=True, cwd=small_stacks.ROOT)
    build = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run(build, check=True, cwd=folder)
    (made,) = folder.glob("stackcheck-*.whl")
    return made


def installed(wheel: Path, folder: Path, extra: str = "") -> Path:
    """stackcheck from a wheel, outside the checkout, with nothing else but what it asks for."""
    venv.create(folder / "venv")
    # This environment's pip installs into that one, which needs none of its own.
    into = [*PIP, "--python", folder / "venv" / "bin" / "python"]
    subprocess.run([*into, "install", "--no-compile", f"{wheel}{extra}"], check=True, cwd=folder)
    return folder / "venv" / "bin" / "stackcheck"


@pytest.fixture(scope="module")
def program(wheel: Path, tmp_path_factory) -> Path:
    """What a user of images installs."""
    return installed(wheel, tmp_path_factory.mktemp("consumer"))


@pytest.fixture(scope="module")
def whole_program(wheel: Path, tmp_path_factory) -> Path:
    """What a maker of images installs."""
    return installed(wheel, tmp_path_factory.mktemp("maker"), "[registry]")


class Consumer:
    def __init__(self, program: Path, home: Path) -> None:
        self.program, self.home = program, home
        home.mkdir()

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "XDG_"))}
        env = kept | {"HOME": str(self.home)}
        done = run_program([self.program, *words], cwd=self.home, env=env)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def json(self, *words: str) -> Any:
        done = self.run(*words, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.mark.slow
def test_a_wheel_is_enough_to_find_verify_pull_run_and_list(program, registry, small_image, engine, tmp_path):
    layout = OciLayout(small_image.layout)
    manifest = layout.only_manifest()
    target = f"{registry}/stacks/{uuid.uuid4().hex}"
    image = small_of(small_image, manifest)
    release(image, target, KEY, now=dt.datetime.now(dt.UTC))
    consumer = Consumer(program, tmp_path / "home")
    pem = keys.public_pem(KEY.public_key())
    (consumer.home / "publisher.pub").write_bytes(pem)
    reference = f"{target}:{STACK_ID}"
    refused = consumer.run("verify", reference, *HOST)
    assert refused.returncode == 7
    assert "no public key" in refused.stderr
    with serving(lambda _: (200, {}, pem)) as (host, _seen):
        url = f"http://{host}/publisher.pub#sha256={keyring.hint(KEY.public_key())}"
        for key in ("publisher.pub", url):
            found = consumer.json("find", target, "--device-model", "CPU", "--key", key)
            assert [item["tag"] for item in found] == [STACK_ID]
            assert consumer.json("verify", reference, *HOST, "--key", key)["digest"] == manifest.digest
            assert consumer.json("sbom", reference, "--key", key)["bomFormat"] == "CycloneDX"
            name = consumer.json("pull", reference, *HOST, "--key", key)["image"]
            try:
                done = consumer.run("run", reference, *HOST, "--key", key, "--", "sh", "-c", "echo in $PWD")
                assert (done.returncode, done.stdout) == (0, "in /workspace\n")
                words = ("run", reference, *HOST, "--key", key, "--print", "docker")
                printed = consumer.run(*words, "--", "sh", "-c", "echo $((6*7))")
                assert printed.returncode == 0, printed.stderr
                assert f"{target}@{manifest.digest}" in printed.stdout
                line = printed.stdout.replace(f"{target}@{manifest.digest}", name)  # it is in the engine
                ran = run_program(["sh", "-c", line], cwd=consumer.home)
                assert (ran.returncode, ran.stdout) == (0, "42\n"), ran.stderr
            finally:
                engine.remove(name)


def small_of(built: Image, manifest: Any) -> SmallImage:
    (config,) = manifest.descriptors("config")
    return SmallImage(built.layout, manifest.digest, config.digest)


@pytest.mark.slow
def test_the_table_of_devices_is_in_the_wheel(program, tmp_path):
    """Without it a consumer's GPU would be an unknown model, and nothing certified would fit."""
    code = "from stackcheck import vendors; print(vendors.model_of('10de:2335', 150754820096))"
    python = program.with_name("python")
    command = [python, "-I", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == "H200\n"


# Verb -> words after it -> its exit code in an empty folder of a host without an engine, GPU or network.
STACK = "cpu-torch2.13.0-py3.11-debian12"
WORKS: dict[str, tuple[str, ...]] = {
    "list": (),
    "explain": (STACK,),
    "compat": (),
    "history": (),
    "report": (),
    "key": (),
    "gate": ("--install", "systemd", "--dry-run"),
    "status": (),
}
NEEDS: dict[str, tuple[str, ...]] = {
    "find": (),
    "verify": ("oci:nowhere:x",),
    "pull": ("oci:nowhere:x",),
    "run": ("oci:nowhere:x", "--", "true"),
    "policy": ("kyverno",),
    "export": (STACK,),
    "sbom": ("oci:nowhere:x",),
    "images": (STACK,),
    "build": (STACK,),
    "test": (STACK,),
    "judge": ("result.json",),
    "certify": (STACK,),
    "publish": (STACK,),
    "nightly": (),
    "fleet": ("status", "none"),
    "compare": ("a", "b"),
    "bisect": ("--good", STACK, "--bad", STACK, "--check", "x"),
    "revoke": ("oci:nowhere:x", "--reason", "x"),
    "promote": ("oci:nowhere:x", "--to", "oci:elsewhere"),
    "gc": (),
    "lock": (),
    "outdated": ("nope",),
    "render": (),
    "base": ("nope",),
    "wheelhouse": ("--from", "/nowhere"),
    "prove": (),
    "mirror": (STACK, "--print"),  # this environment has no pip, as pipx and uv make them
    "baseline": ("result.json",),
    "contribute": ("result.json",),
    "first-host": (STACK, "--record", "../first-host.json"),
}


def in_an_empty_folder(
    program: Path, folder: Path, verb: str, *words: str
) -> subprocess.CompletedProcess[str]:
    home, empty = folder / "home", folder / "empty"
    for each in (home, empty):
        each.mkdir()
    env = {"HOME": str(home), "PATH": os.environ["PATH"], "DOCKER_HOST": f"unix://{folder}/none.sock"}
    command = [program, verb, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=empty, env=env)
    assert "Traceback" not in done.stderr, done.stderr
    assert not list(empty.iterdir()), "state belongs in the user's folders"
    return done


def test_every_verb_is_tried_without_a_checkout():
    assert WORKS.keys() | NEEDS.keys() == cli.VERBS.keys() - {"doctor"}  # it depends on the host


@pytest.mark.slow
@pytest.mark.parametrize("verb", WORKS)
def test_a_verb_that_needs_no_checkout_works_anywhere(whole_program, tmp_path, verb):
    done = in_an_empty_folder(whole_program, tmp_path, verb, *WORKS[verb])
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("verb", NEEDS)
def test_a_verb_that_lacks_something_says_the_next_step(whole_program, tmp_path, verb):
    done = in_an_empty_folder(whole_program, tmp_path, verb, *NEEDS[verb])
    assert done.returncode in {2, 3, 4, 6, 7, 8, 125}, done.stderr
    assert "  next: " in done.stderr
    assert "yaml cannot be read" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("verb", WORKS | NEEDS)
def test_each_verb_of_a_small_installation_works_or_names_its_extra(program, tmp_path, verb):
    extra = next((name for name, (verbs, _) in usage.EXTRAS.items() if verb in verbs), None)
    done = in_an_empty_folder(program, tmp_path, verb, *(WORKS | NEEDS)[verb])
    assert ("this command needs the extra" in done.stderr) == (extra is not None), done.stderr
    if extra:
        assert done.returncode == 2
        assert f"-m pip install 'stackcheck[{extra}]'" in done.stderr
    elif verb in WORKS:
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_small_installation_has_few_packages(program):
    site = program.parent.parent / "lib"
    found = sorted(path.name for path in site.glob("python3*/site-packages/*.dist-info"))
    assert 10 < len(found) <= MOST_PACKAGES, found
