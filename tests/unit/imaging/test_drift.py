"""Only what follows from matrix.yaml and the templates is built, and the provenance names that matrix."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from small_checkout import CPU_STACK, FakeEngine, call
from small_flow import Job
from stackcheck.certificate.statement import PROVENANCE
from stackcheck.errors import ConfigurationError
from stackcheck.imaging import bootstrap, plans, stages
from stackcheck.matrix import resolve

pytestmark = pytest.mark.usefixtures("own_home", "no_disk_flushes")

Capsys = pytest.CaptureFixture[str]


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
    small_checkout: Path, capsys: Capsys, name: str, old: bytes, new: bytes
) -> None:
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
    fake_engine: FakeEngine, small_checkout: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
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
