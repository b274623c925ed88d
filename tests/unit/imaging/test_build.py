import dataclasses
import json
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from small_checkout import FakeEngine
from small_recipe import render_from
from stackcheck.engine import container
from stackcheck.errors import BuildError, ConfigurationError, EngineError
from stackcheck.files import checkout as checkout_lock
from stackcheck.imaging import bootstrap, build, image
from stackcheck.imaging.wheels import host_settings
from stackcheck.matrix import resolve
from stackcheck.matrix.stack import Base, Stack
from stackcheck.suite import subject

CPU = resolve.load_stacks(Path(__file__).resolve().parents[3], ("cpu-*",))[0]
DOCKERFILE = "FROM scratch\nRUN --mount=type=secret,id=pip_conf true\n"


class ReadingEngine(FakeEngine):
    """It reads the secrets of a build while they are there."""

    def __init__(self) -> None:
        super().__init__()
        self.secrets: dict[str, str] = {}

    def bake(self, definition: Mapping[str, Any], targets: Sequence[str], **options: object) -> Any:
        for secret in (each for name in targets for each in definition["target"][name]["secret"]):
            fields = dict(part.split("=", 1) for part in secret.split(","))
            self.secrets[fields["id"]] = Path(fields["src"]).read_text()
        return super().bake(definition, targets, **options)


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    render_from(DOCKERFILE, small_stack(), tmp_path)
    tar = tmp_path / "rootfs.tar"
    tar.write_bytes(b"tar")
    base = bootstrap.RootFs(path=tar, digest="sha256:" + "1" * 64, packages={}, reused=True)
    monkeypatch.setattr(bootstrap, "bootstrap", lambda *_a, **_k: base)
    settings = host_settings.HostSettings(
        pip={"index-url": ("https://u:secret@i.example.org",)}, folders=(), indexes=(), ca=None
    )
    monkeypatch.setattr(host_settings, "host_settings", lambda: settings)
    return tmp_path


def small_stack(**changes: Any) -> Stack:
    """The cpu stack with an empty base and a small budget."""
    base = Base(kind="bootstrap", suite="bookworm")
    small = {"id": "cpu-small", "base": base, "size_budget_bytes": 10_000, "missing": ()}
    return dataclasses.replace(CPU, **small | changes)


def build_it(
    checkout: Path, engine: ReadingEngine, stack: Any = None, lines: list[str] | None = None
) -> image.Image:
    report = (lines if lines is not None else []).append
    (made,) = build.build((stack or small_stack(),), engine, root=checkout, report=report)
    return made


@pytest.mark.parametrize("name", ["Dockerfile", "stack.json", "requirements.lock"])
def test_any_changed_input_builds_again(checkout, name):
    engine, folder = ReadingEngine(), checkout / "images" / "cpu-small"
    build_it(checkout, engine)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    stack = small_stack(archs=("x86_64",)) if name == "stack.json" else small_stack()
    render_from(DOCKERFILE + ("# changed\n" if name == "Dockerfile" else ""), stack, checkout)
    if name == "requirements.lock":
        (folder / name).write_text("changed==1.0\n")
    changed = {path.name for path in folder.iterdir() if path.read_bytes() != before.get(path.name)}
    assert changed == {name}
    assert not build_it(checkout, engine, stack).reused
    assert len(engine.builds) == 2


def test_a_lost_layout_builds_again_and_a_lost_engine_image_is_only_loaded(checkout):
    engine = ReadingEngine()
    made = build_it(checkout, engine)
    engine.names.clear()
    assert build_it(checkout, engine).reused
    assert made.reference in engine.names
    shutil.rmtree(made.layout)
    assert not build_it(checkout, engine).reused


def test_secrets_are_given_as_files_that_end_with_the_build(checkout):
    engine = ReadingEngine()
    build_it(checkout, engine)
    assert "https://u:secret@i.example.org" in engine.secrets["pip_conf-0"]
    assert "secret@" not in json.dumps(engine.builds)
    (target,) = engine.builds[0]["target"].values()
    assert not any(Path(entry.split("src=")[1]).exists() for entry in target["secret"])


def test_proxies_reach_the_build_and_times_are_fixed(checkout, monkeypatch):
    monkeypatch.setenv("https_proxy", "http://proxy.example.org:3128")
    engine = ReadingEngine()
    build_it(checkout, engine)
    (target,) = engine.builds[0]["target"].values()
    assert target["args"]["https_proxy"] == "http://proxy.example.org:3128"
    assert target["args"]["SOURCE_DATE_EPOCH"] == str(bootstrap.SOURCE_DATE_EPOCH)
    assert "rewrite-timestamp=true" in target["output"][0]


def test_an_image_over_its_budget_names_the_layer(checkout):
    with pytest.raises(BuildError) as caught:
        build_it(checkout, ReadingEngine(), small_stack(size_budget_bytes=999))
    assert "a test" in str(caught.value)
    assert not (checkout / "build" / "cpu-small" / "image.json").exists()


def test_the_layer_that_passes_the_budget_need_not_be_the_largest():
    layers = tuple(
        image.Layer(digest="", size_bytes=size, created_by=f"STEP {size}") for size in (600, 90, 30)
    )
    made = SimpleNamespace(layers=layers)
    marked = [line for line in image.size_report(made, 650) if "exceeds the budget" in line]
    assert [line.split(": ")[1].split("  ")[0] for line in marked] == ["STEP 90"]
    assert not any("passes" in line for line in image.size_report(made))


def test_a_stack_that_is_not_locked_names_what_is_missing(checkout):
    with pytest.raises(BuildError) as caught:
        build_it(checkout, ReadingEngine(), small_stack(missing=("torch's index cannot be reached",)))
    assert caught.value.exit_code == 5
    assert "torch's index cannot be reached" in str(caught.value)


def test_a_stack_that_is_not_rendered_names_the_command(checkout):
    (checkout / "images" / "cpu-small" / "Dockerfile").unlink()
    with pytest.raises(BuildError, match="not been rendered"):
        build_it(checkout, ReadingEngine())


def test_provenance_names_every_input(checkout):
    made = build_it(checkout, ReadingEngine())
    found = subject.of_build(small_stack(), made)
    assert found.dependencies["urn:stackcheck:rootfs:bookworm"] == "sha256:" + "1" * 64
    assert "file:images/cpu-small/Dockerfile" in found.dependencies
    assert found.dependencies["file:matrix.yaml"] == CPU.matrix_digest
    assert found.started is not None
    assert found.started <= found.finished
    assert "stagesFromWheelCache" not in found.parameters
    uses = tuple(image.StageUse(name=how, key=f"key of {how}", how=how) for how in ("built", "handed over"))
    given = subject.of_build(small_stack(), dataclasses.replace(made, stages=uses))
    assert given.parameters["stagesFromWheelCache"] == {"handed over": "key of handed over"}


def test_a_damaged_image_file_names_the_place(tmp_path):
    (tmp_path / "image.json").write_text('{"schema_version": 1}')
    with pytest.raises(ConfigurationError, match="damaged"):
        image.load_image(tmp_path / "image.json")
    with pytest.raises(ConfigurationError, match="no image has been built"):
        image.load_image(tmp_path / "none.json")


def test_the_second_builder_waits_and_says_for_whom(tmp_path):
    lines: list[str] = []
    waiting = threading.Event()

    def second() -> None:
        def report(line: str) -> None:
            lines.append(line)
            waiting.set()

        with checkout_lock.exclusive(tmp_path, "second", report):
            lines.append("second works")

    with checkout_lock.exclusive(tmp_path, "stackcheck images", lines.append):
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(10)
        lines.append("first ends")
    thread.join(10)
    assert "waiting for stackcheck images (pid " in lines[0]
    assert lines[1:] == ["first ends", "second works"]


@pytest.mark.parametrize(
    ("suite", "packages"),
    [("bookworm; reboot", ()), ("bookworm", ("python3,../x",)), ("bookworm", ("--hook=x",))],
)
def test_a_base_takes_no_names_that_could_be_options(suite, packages, tmp_path):
    with pytest.raises(ConfigurationError, match=r"invalid name of a package|no base can be made"):
        bootstrap.bootstrap(suite, packages, tmp_path, report=print)


def test_a_refused_limit_is_explained():
    import docker

    class Refusing:
        def start(self) -> None:
            raise docker.errors.APIError("error setting rlimit type 8: operation not permitted")

    spec = container.RunSpec(image="x", command=("true",), ulimits={"memlock": -1})
    with pytest.raises(EngineError) as caught:
        container.start(Refusing(), spec)
    assert "memlock=-1" in str(caught.value)
    assert "pin" in str(caught.value)
