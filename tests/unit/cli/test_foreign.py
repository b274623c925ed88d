"""Images by their reference: what holds them, and their names; foreign text reaches the terminal as text."""

import hashlib
import json
import re
import sys
from pathlib import Path

import pytest
import typer

import result_files
import small_fleet
from small_checkout import CPU_STACK, FOREIGN, call
from stackcheck import cli
from stackcheck.fleet.job import Job, subject_of
from stackcheck.oci import tags
from stackcheck.oci.store import is_tag
from stackcheck.oci.tags import label
from stackcheck.suite import interpreter

pytestmark = pytest.mark.usefixtures("own_home", "no_disk_flushes")


def test_an_image_whose_history_names_no_layers_is_a_clear_error(fake_engine, capsys, monkeypatch):
    monkeypatch.setattr(fake_engine, "step_sizes", lambda _reference: ())
    done = call(capsys, "test", FOREIGN)
    assert done.code == 2
    assert "the image's history does not match" in done.err


COMPILED = b"\x7fELF a Python of no package"
DIGEST = hashlib.sha256(COMPILED).hexdigest()
ACCEPTED = ("--accept-python", DIGEST)


def test_a_pair_and_a_fleet_take_a_python_of_no_package_once_it_is_accepted(
    fake_engine, small_checkout, capsys, monkeypatch
):
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


def test_no_reference_takes_the_folder_or_the_tag_of_a_stack_or_of_another_reference():
    names = [CPU_STACK, CPU_STACK.replace("-debian12", ":debian12"), CPU_STACK.replace("-torch", "/torch")]
    labels = [label(name) for name in names]
    assert labels[0] == CPU_STACK
    assert len(set(labels)) == len(names)
    assert all(is_tag(item) for item in (*labels, label(f"registry.example.org/{'a' * 200}:1")))
    assert [tags.names(item, item, None) for item in labels] == [False, True, True]


def test_the_tag_of_a_reference_is_never_read_as_one_that_stays():
    # Among so many hashes some are digits alone, as the number of a unique tag is.
    for number in range(1000):
        found = label(f"registry.example.org/pytorch{number}:nightly-20250101")
        assert tags.names(found, found, None)
        assert not tags.is_unique(found)
        assert tags.floating(f"{found}-20250102-1.0123abcd") == found


ROOT = Path(__file__).resolve().parents[3]
EVIL = "\x1b]0;owned\x07\x1b[2J\rname\nfake: line\u202e\x9b31m"


@pytest.mark.parametrize(
    "write",
    [
        lambda: print(EVIL),  # noqa: T201  # as a verb does
        lambda: print(EVIL, file=sys.stderr),  # noqa: T201
        lambda: sys.stdout.write(EVIL),
        lambda: sys.stderr.writelines([EVIL]),
        lambda: typer.echo(EVIL),
        lambda: typer.echo(EVIL, err=True, color=True),
    ],
)
def test_no_verb_can_print_a_control_character_however_it_prints(capsys, monkeypatch, write):
    """The streams themselves hold it, so a verb that is added later holds it too."""

    def app(**_: object) -> None:
        write()
        raise SystemExit(0)

    monkeypatch.setattr(cli, "app", app)
    done = call(capsys, "anything")
    written = done.out + done.err
    assert r"\x1b]0;owned\x07" in written
    assert all(char.isprintable() or char == "\n" for char in written)


def test_only_the_job_of_a_user_writes_past_the_streams_that_take_text_alone():
    raw = re.compile(r"\.buffer\b|sys\.__std|os\.write\([12],|/dev/(tty|std)|fdopen\([12]")
    files = [path for path in (ROOT / "stackcheck").rglob("*.py") if raw.search(path.read_text())]
    assert {path.relative_to(ROOT / "stackcheck").as_posix() for path in files} <= {
        "cli/output.py",  # says so
        "cli/status.py",  # only what `screen` gives, which test_wall.py holds
        "engine/terminal.py",  # the user's own program
    }


@pytest.mark.usefixtures("fake_engine")
def test_publishing_with_a_mistyped_key_makes_no_key(small_checkout, capsys):
    assert call(capsys, "certify", CPU_STACK).code == 0
    typo = small_checkout / "typo.key"
    done = call(capsys, "publish", CPU_STACK, "--key", typo)
    assert done.code == 2
    assert not typo.exists()


def test_a_result_cannot_rewrite_what_judge_says_of_it(small_checkout, tmp_path, capsys):
    check = result_files.check("test_kernels.py::test_gemm", "failed", reason=EVIL)
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result_files.result(check)))
    done = call(capsys, "judge", path, "--root", small_checkout)
    assert done.code == 6
    assert "\x1b" not in done.out + done.err
    assert r"\x1b]0;owned" in done.out
