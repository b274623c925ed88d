"""`build --dry-run` and the report of a build; only what follows from matrix and templates is built."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from small_checkout import CPU_STACK, FakeEngine, call
from stackcheck.certificate.statement import PROVENANCE
from stackcheck.engine.buildx import BakeResult
from stackcheck.errors import ConfigurationError
from stackcheck.imaging import bootstrap, build, plans, stages
from stackcheck.imaging.wheels import wheel_cache
from stackcheck.matrix import resolve

pytestmark = pytest.mark.usefixtures("own_home", "no_disk_flushes")


@pytest.fixture
def made_base(small_checkout: Path, monkeypatch) -> None:
    """A dry run finds the base that the build made."""
    base = bootstrap.bootstrap("bookworm", (), small_checkout)  # the stand-in of that checkout
    monkeypatch.setattr(bootstrap, "load_root_fs", lambda *_a, **_k: base)


@pytest.mark.usefixtures("made_base")
def test_a_plan_names_stages_keys_and_where_each_would_come_from(fake_engine, capsys):
    done = call(capsys, "build", CPU_STACK, "--dry-run")
    rows = [line.split() for line in done.out.splitlines()[1:]]
    assert [(row[0], row[2]) for row in rows] == [("base", "built"), ("wheels", "built"), ("final", "built")]
    assert call(capsys, "build", CPU_STACK).code == 0
    recorded = build.load_image(next(iter(engine_folder(fake_engine).glob("image.json")))).stages
    assert [use.key[:12] for use in recorded] == [row[1] for row in rows]
    kept = call(capsys, "build", CPU_STACK, "--dry-run")
    assert kept.out.startswith(f"{CPU_STACK}: keep (nothing changed, as long as the engine is fake 1")
    again = call(capsys, "build", CPU_STACK, "--dry-run", "--no-cache")
    assert again.out == done.out
    assert len(fake_engine.builds) == 1


def engine_folder(fake_engine: FakeEngine) -> Path:
    from pathlib import Path

    context = next(iter(fake_engine.builds[0]["target"].values()))["context"]
    return Path(context).parent


@pytest.mark.usefixtures("fake_engine")
@pytest.mark.usefixtures("made_base")
def test_a_changed_last_file_leaves_the_other_stages_as_they_were(small_checkout, capsys):
    call(capsys, "build", CPU_STACK)
    path = small_checkout / "images" / "parts" / "final.j2"
    path.write_text(path.read_text().replace('CMD ["python"]', 'CMD ["python3"]'))
    assert call(capsys, "render", CPU_STACK).code == 0
    done = call(capsys, "build", CPU_STACK, "--dry-run", "--json")
    (row,) = json.loads(done.out)
    assert [stage["from"] for stage in row["stages"]] == [
        *[f"reused as in {CPU_STACK}, if the engine still has it"] * 2,
        "built",
    ]


@pytest.mark.usefixtures("made_base")
def test_an_empty_folder_of_wheels_is_refused_with_what_it_lacks(fake_engine, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for options in (["--dry-run"], []):
        done = call(capsys, "build", CPU_STACK, "--wheelhouse", tmp_path / "empty", *options)
        assert done.code == 5
        said = done.out + done.err
        assert "torch==2.13.0+cpu" in said
        assert "on a machine with network: pip download" in said
    assert fake_engine.builds == []


def test_images_takes_the_same_options_to_the_build(fake_engine, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    done = call(capsys, "images", CPU_STACK, "--wheelhouse", tmp_path / "empty", "--json")
    assert done.code == 5
    (row,) = json.loads(done.out)
    assert (row["state"], fake_engine.builds) == ("not built", [])
    assert call(capsys, "images", CPU_STACK, "--no-cache").code == 0
    assert all(target["no-cache"] for target in fake_engine.builds[0]["target"].values())


def test_one_line_and_the_json_say_what_was_built_and_what_was_saved(fake_engine, capsys, monkeypatch):
    whole = FakeEngine.bake

    def bake(self: FakeEngine, definition: object, targets: object, **options: object) -> BakeResult:
        done = whole(self, definition, targets, **options)
        by_stage = {target.split("-")[1]: target for target in done_targets(definition)}
        ran = {(by_stage["base"], "base"): (0, 2), (by_stage["base"], "wheels"): (3, 1)}
        return BakeResult(steps=done.steps, cached=done.cached, seconds=1, stages=ran)

    monkeypatch.setattr(FakeEngine, "bake", bake)
    done = call(capsys, "build", CPU_STACK, "--json")
    (row,) = json.loads(done.out)
    assert [(stage["name"], stage["how"]) for stage in row["stages"]] == [
        ("base", "cached"),
        ("wheels", "built"),
        ("final", "cached"),
    ]
    assert "stages: 1 built, 2 reused (2 in the engine's cache); 0.0 MB saved" in done.err
    assert row["shared_bytes"] == 0
    assert len(fake_engine.builds) == 1


def done_targets(definition: object) -> list[str]:
    assert isinstance(definition, dict)
    return [name for name in definition["target"] if name.startswith("stage-")]


def test_the_wheel_cache_is_on_unless_the_user_says_otherwise(monkeypatch, tmp_path):
    from stackcheck.cli.build import build_options

    monkeypatch.delenv(wheel_cache.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build_options().wheel_cache == wheel_cache.default_folder()
    assert build_options(wheel_cache="off").wheel_cache is None
    named = build_options(wheel_cache=str(tmp_path / "x")).wheel_cache
    assert named == tmp_path / "x"


def add_variable(checkout: Path) -> None:
    path = checkout / "matrix.yaml"
    path.write_text(
        path.read_text().replace("  - runtime: cpu\n", "  - runtime: cpu\n    env: {PLANTED: yes}\n", 1)
    )


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("Dockerfile", b"USER 1000:1000", b"USER 0:0"),
        ("Dockerfile", b"\n", b"\r\n"),
        ("Dockerfile", b'CMD ["python"]\n', b'CMD ["python"]'),
        ("Dockerfile", b"# Stack", b"# \xff Stack"),
        ("stack.json", b'"vendor": "cpu"', b'"vendor": "amd"'),
    ],
)
def test_an_edited_file_is_refused_with_its_first_line_that_differs_and_render_restores_it(
    small_checkout, capsys, name, old, new
):
    path = small_checkout / "images" / CPU_STACK / name
    before = path.read_bytes()
    path.write_bytes(before.replace(old, new))
    (stack,) = resolve.load_stacks(small_checkout, (CPU_STACK,))
    with pytest.raises(ConfigurationError) as caught:
        plans.checked_files(stack, small_checkout)
    line = before[: before.index(old)].count(b"\n") + 1 + (old.endswith(b'"]\n'))
    assert caught.value.where == f"images/{CPU_STACK}/{name}, line {line}"
    assert caught.value.got != caught.value.expected
    assert call(capsys, "render", CPU_STACK).code == 0
    assert plans.checked_files(stack, small_checkout)[name] == before


def test_the_builder_gets_the_bytes_that_were_checked_and_hashed(
    fake_engine, small_checkout, capsys, monkeypatch
):
    """Somebody edits the Dockerfile while the base is made, after the check."""
    path, whole = small_checkout / "images" / CPU_STACK / "Dockerfile", bootstrap.bootstrap
    before = path.read_bytes()

    def slow(*arguments: object, **options: object) -> object:
        path.write_text("FROM scratch\n")
        return whole(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(bootstrap, "bootstrap", slow)
    assert call(capsys, "build", CPU_STACK).code == 0
    assert path.read_bytes() != before
    given = (small_checkout / "build" / CPU_STACK / "context" / "Dockerfile").read_text()
    assert given == stages.with_own_secret(before.decode(), "pip_conf")
    image = (small_checkout / "build" / CPU_STACK / "image.json").read_text()
    assert hashlib.sha256(before).hexdigest() in image
    assert len(fake_engine.builds) == 1


def test_the_provenance_names_the_matrix_that_the_dockerfile_follows_from_also_when_it_is_edited_meanwhile(
    job, monkeypatch
):
    path, whole = job.root / "matrix.yaml", FakeEngine.bake
    before = "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()

    def bake(
        self: FakeEngine, definition: Mapping[str, object], targets: Sequence[str], **options: object
    ) -> object:
        add_variable(job.root)
        return whole(self, definition, targets, **options)

    monkeypatch.setattr(FakeEngine, "bake", bake)
    assert job.outcome().state == "certified"
    listed = job.signed()[PROVENANCE].document["predicate"]["buildDefinition"]["resolvedDependencies"]
    named = {entry["uri"]: entry["digest"]["sha256"] for entry in listed}
    assert f"sha256:{named['file:matrix.yaml']}" == before
    assert hashlib.sha256(path.read_bytes()).hexdigest() != named["file:matrix.yaml"]
    again = job.outcome()  # the edited matrix is not what the Dockerfile follows from
    assert (again.state, again.error and again.error.exit_code) == ("not built", 2)
    assert len(job.engine.builds) == 1
