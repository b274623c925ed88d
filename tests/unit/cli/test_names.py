"""A name that stands for nothing, or for nothing yet, leads to the command that helps."""

from __future__ import annotations

from pathlib import Path

import pytest

from small_checkout import CPU_STACK, FOREIGN, FakeEngine, call
from stackcheck.oci import tags
from stackcheck.oci.store import is_tag
from stackcheck.oci.tags import label

pytestmark = pytest.mark.usefixtures("own_home", "no_disk_flushes")

Capsys = pytest.CaptureFixture[str]
VERBS = ["build", "images", "test", "certify", "publish", "export", "lock", "render", "list", "outdated"]


@pytest.mark.parametrize("verb", VERBS)
def test_a_stack_that_is_not_there_is_exit_3_and_leads_to_the_list(
    fake_engine: FakeEngine, capsys: Capsys, verb: str
) -> None:
    dry = [["--dry-run"]] if verb not in {"list", "outdated"} else []
    for options in ([], *dry):
        done = call(capsys, verb, "nope", *options)
        assert (done.code, done.out) == (3, "")
        assert "\n  next: stackcheck list" in done.err
    assert fake_engine.builds == []


def test_explain_leads_to_the_list_too(capsys: Capsys) -> None:
    done = call(capsys, "explain", "nope")
    assert done.code == 2
    assert done.err.startswith("error: no such stack")
    assert done.err.endswith("next: stackcheck list\n")
    assert "stackcheck list" not in call(capsys, "explain", "nope=1").err


@pytest.mark.usefixtures("fake_engine")
@pytest.mark.parametrize("verb", ["publish", "export"])
def test_what_is_not_made_yet_leads_to_the_verb_that_makes_it(capsys: Capsys, verb: str) -> None:
    for name in (CPU_STACK, "cpu-*"):
        done = call(capsys, verb, name)
        assert done.code == 2
        assert f"next: stackcheck build {CPU_STACK}\n" in done.err
    done = call(capsys, verb, FOREIGN)
    assert done.code == 2
    assert f"next: stackcheck test {FOREIGN}\n" in done.err


@pytest.mark.usefixtures("fake_engine")
def test_an_image_outlives_its_stack(small_checkout: Path, capsys: Capsys) -> None:
    call(capsys, "build", CPU_STACK)
    (small_checkout / "matrix.yaml").unlink()
    assert call(capsys, "export", CPU_STACK, "--dry-run").code == 0


def test_no_reference_takes_the_folder_or_the_tag_of_a_stack_or_of_another_reference() -> None:
    names = [CPU_STACK, CPU_STACK.replace("-debian12", ":debian12"), CPU_STACK.replace("-torch", "/torch")]
    labels = [label(name) for name in names]
    assert labels[0] == CPU_STACK
    assert len(set(labels)) == len(names)
    assert all(is_tag(item) for item in (*labels, label(f"registry.example.org/{'a' * 200}:1")))
    assert [tags.names(item, item, None) for item in labels] == [False, True, True]


def test_the_tag_of_a_reference_is_never_read_as_one_that_stays() -> None:
    # Among so many hashes some are digits alone, as the number of a unique tag is.
    for number in range(1000):
        found = label(f"registry.example.org/pytorch{number}:nightly-20250101")
        assert tags.names(found, found, None)
        assert not tags.is_unique(found)
        assert tags.floating(f"{found}-20250102-1.0123abcd") == found
