"""The verbs that make images: their exit codes, what they print, and what they leave alone."""

import json
from pathlib import Path

import pytest

from small_checkout import AMD_STACK, CPU_STACK, FakeEngine, call, verify

pytestmark = pytest.mark.usefixtures("own_home", "no_disk_flushes")


Capsys = pytest.CaptureFixture[str]


def tree(root: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in root.rglob("*")}


@pytest.mark.usefixtures("fake_engine")
def test_the_json_of_images_has_every_stack_and_progress_stays_on_stderr(capsys: Capsys) -> None:
    done = call(capsys, "images", "cpu-*", AMD_STACK, "--anyway", "--json")
    rows = {row["id"]: row for row in json.loads(done.out)}
    assert done.code == 6
    assert (rows[CPU_STACK]["state"], rows[CPU_STACK]["verdict"]) == ("certified", "PASSED")
    assert (rows[AMD_STACK]["state"], rows[AMD_STACK]["verdict"]) == ("failed", "FAILED")
    assert rows[AMD_STACK]["reference"] is None
    assert CPU_STACK in done.err


def test_a_host_that_no_stack_is_for_is_exit_3(
    fake_engine: FakeEngine,
    small_checkout: Path,
    capsys: Capsys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stackcheck.matrix.resolve.load_stacks", lambda *_a: ())
    done = call(capsys, "images", "--root", small_checkout)
    assert done.code == 3
    assert "no stack of the matrix runs on this host (cpu)" in done.err
    assert fake_engine.builds == []


@pytest.mark.parametrize("verb", ["images", "build", "certify", "test"])
def test_a_dry_run_changes_nothing(
    verb: str,
    fake_engine: FakeEngine,
    tmp_path: Path,
    capsys: Capsys,
) -> None:
    before = tree(tmp_path)
    done = call(capsys, verb, CPU_STACK, "--dry-run")
    assert done.code == 0
    assert done.out.startswith(f"{CPU_STACK}: ")
    assert tree(tmp_path) == before
    assert (fake_engine.builds, fake_engine.runs) == ([], [])


def test_the_steps_one_by_one_lead_to_the_same_certificate(fake_engine: FakeEngine, capsys: Capsys) -> None:
    assert call(capsys, "publish", CPU_STACK).code == 2  # nothing is built
    assert call(capsys, "build", CPU_STACK).code == 0
    done = call(capsys, "publish", CPU_STACK)
    assert done.code == 2
    assert f"stackcheck certify {CPU_STACK}" in done.err
    assert call(capsys, "test", CPU_STACK).code == 0
    done = call(capsys, "certify", CPU_STACK)
    assert done.code == 0
    assert f"stackcheck publish {CPU_STACK}" in done.out
    done = call(capsys, "publish", CPU_STACK, "--dry-run")
    assert "with 4 statements" in done.out
    assert verify(capsys).code == 7
    assert call(capsys, "publish", CPU_STACK).code == 0
    assert verify(capsys).code == 0
    assert (len(fake_engine.builds), len(fake_engine.runs)) == (1, 1)


@pytest.mark.usefixtures("fake_engine")
def test_the_matrix_says_where_to_publish_unless_the_user_does(small_checkout: Path, capsys: Capsys) -> None:
    path = small_checkout / "matrix.yaml"
    path.write_text(path.read_text().replace("publish: oci:dist", "publish: oci:elsewhere"))
    assert call(capsys, "images").code == 0
    assert verify(capsys, f"oci:elsewhere:{CPU_STACK}").code == 0
    assert call(capsys, "publish", CPU_STACK, "--to", "oci:third").code == 0
    assert verify(capsys, f"oci:third:{CPU_STACK}").code == 0
    assert not (small_checkout / "dist").exists()


# The verbs that take an image out of here, and that say what is in it.

REFERENCE = f"oci:dist:{CPU_STACK}"


def test_the_list_of_packages_is_printed_from_what_was_published(
    fake_engine: FakeEngine, capsys: Capsys
) -> None:
    fake_engine.inventory[:0] = [
        {"kind": "python", "place": "/x/a.dist-info", "head": "Name: a\nVersion: 1\nLicense-Expression: MIT"}
    ]
    assert call(capsys, "images").code == 0
    done = call(capsys, "sbom", REFERENCE)
    assert done.code == 0
    assert [line.split() for line in done.out.splitlines()] == [
        ["package", "version", "kind", "licence"],
        ["python3-minimal", "3.11.2-1", "deb", "not", "stated"],
        ["a", "1", "pypi", "MIT"],
        ["numpy", "2.4.6", "pypi", "not", "stated"],
        ["torch", "2.13.0+cpu", "pypi", "not", "stated"],
    ]


@pytest.mark.usefixtures("fake_engine")
def test_the_json_is_the_document_that_was_signed(small_checkout: Path, capsys: Capsys) -> None:
    call(capsys, "images")
    done = call(capsys, "sbom", REFERENCE, "--json")
    assert done.code == 0
    kept = json.loads((small_checkout / "build" / CPU_STACK / "sbom.json").read_text())
    assert json.loads(done.out) == kept
    assert kept["bomFormat"] == "CycloneDX"


@pytest.mark.usefixtures("fake_engine")
def test_an_export_can_be_asked_what_it_would_do_and_answers_machines(
    small_checkout: Path, capsys: Capsys
) -> None:
    call(capsys, "build", CPU_STACK)
    done = call(capsys, "export", CPU_STACK, "--dry-run")
    assert done.code == 0
    assert f"write {CPU_STACK}.tar, 0.0 MB" in done.out
    assert not (small_checkout / f"{CPU_STACK}.tar").exists()
    done = call(capsys, "export", CPU_STACK, "--json")
    assert json.loads(done.out)["tar"] == f"{CPU_STACK}.tar"
    assert (small_checkout / f"{CPU_STACK}.tar").exists()
