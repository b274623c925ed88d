"""Images by their reference: what holds them, and under which name they are published."""

import hashlib
from pathlib import Path

import pytest

import small_fleet
from small_checkout import CPU_STACK, FOREIGN, FakeEngine, call
from stackcheck.fleet.job import Job, subject_of
from stackcheck.oci import tags
from stackcheck.oci.store import is_tag
from stackcheck.oci.tags import label
from stackcheck.suite import interpreter

pytestmark = pytest.mark.usefixtures("own_home", "no_disk_flushes")

Capsys = pytest.CaptureFixture[str]


def test_an_image_whose_history_names_no_layers_is_a_clear_error(
    fake_engine: FakeEngine, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_engine, "step_sizes", lambda _reference: ())
    done = call(capsys, "test", FOREIGN)
    assert done.code == 2
    assert "the image's history does not match" in done.err


COMPILED = b"\x7fELF a Python of no package"
DIGEST = hashlib.sha256(COMPILED).hexdigest()
ACCEPTED = ("--accept-python", DIGEST)


def test_a_pair_and_a_fleet_take_a_python_of_no_package_once_it_is_accepted(
    fake_engine: FakeEngine, small_checkout: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_engine.image = {"/usr/local/bin/python3": COMPILED}
    pair = ("compare", FOREIGN, FOREIGN, "--paired", "--tier", "smoke")
    assert "belongs to no package" in call(capsys, *pair).err
    assert fake_engine.runs == []
    done = call(capsys, *pair, *ACCEPTED)  # the fake measures nothing that could be compared
    assert "belongs to no package" not in done.err
    assert fake_engine.runs

    assert call(capsys, "test", FOREIGN, *ACCEPTED).code == 0
    monkeypatch.setattr("stackcheck.fleet.slurm.Slurm", small_fleet.LeavingEngine)
    monkeypatch.setattr("stackcheck.cli.fleet.secrets.token_hex", lambda _bytes: "feedbeef")
    fleet = ("fleet", "run", FOREIGN, "--nodes", "1", "--gpu-vendor", "cpu")
    call(capsys, *fleet, *ACCEPTED)
    folder = small_checkout / "build" / "fleet" / "feedbeef"
    job = Job.load(folder)
    assert job.accepted_python == (f"sha256:{DIGEST}",)
    assert job.reference == f"stackcheck/image:{job.config_digest[7:19]}"  # not an id of this engine
    # What a node does with it.
    node_s = subject_of(job.name, small_checkout, job.vendor, job.accepted_python)
    assert interpreter.find(node_s.image.reference, fake_engine, node_s.accepted_python).package is None


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
