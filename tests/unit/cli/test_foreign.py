"""Images by their reference: what holds them, and under which name they are published."""

import hashlib
from pathlib import Path

import pytest

import small_fleet
from small_checkout import AMD_STACK, CPU_STACK, FOREIGN, FakeEngine, call, verify
from stackcheck.fleet.job import Job, subject_of
from stackcheck.oci import tags
from stackcheck.oci.store import is_tag
from stackcheck.oci.tags import label
from stackcheck.suite import interpreter

pytestmark = pytest.mark.usefixtures("own_home", "no_disk_flushes")

Capsys = pytest.CaptureFixture[str]


def test_an_image_that_names_a_stack_is_held_to_the_machines_of_that_stack(
    fake_engine: FakeEngine, capsys: Capsys
) -> None:
    fake_engine.labels = {"stackcheck.stack": AMD_STACK}
    done = call(capsys, "certify", FOREIGN, "--gpu-vendor", "cpu")
    assert done.code in {6, 9}
    assert "tested_on" in done.err


@pytest.mark.parametrize("name", [f"{CPU_STACK}?", "[c]pu-*", "*"])
def test_a_label_is_a_name_and_not_a_pattern(fake_engine: FakeEngine, capsys: Capsys, name: str) -> None:
    fake_engine.labels = {"stackcheck.stack": name}
    done = call(capsys, "test", FOREIGN)
    assert (done.code, "is not in matrix.yaml" in done.err) == (2, True)


@pytest.mark.parametrize("verb", ["test", "certify"])
def test_an_image_of_a_stack_that_a_rule_refuses_is_refused_with_the_rule(
    fake_engine: FakeEngine, small_checkout: Path, capsys: Capsys, verb: str
) -> None:
    """The stack is in matrix.yaml: to add it there would be no help."""
    path = small_checkout / "matrix.yaml"
    before = path.read_text()
    path.write_text(before.replace("torch: 2.13.0", "torch: 2.5.1"))
    refused = CPU_STACK.replace("2.13.0", "2.5.1")
    told = call(capsys, "explain", refused)
    assert told.code != 0
    fake_engine.labels = {"stackcheck.stack": refused}
    done = call(capsys, verb, FOREIGN)
    assert done.code == 2
    assert f"{FOREIGN}, label stackcheck.stack: {refused}" in done.err
    assert "stackcheck explain" in done.err
    assert "not in matrix.yaml" not in done.err
    assert fake_engine.runs == []


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


def test_a_python_of_no_package_is_certified_as_accepted_and_readers_can_refuse_it(
    fake_engine: FakeEngine, small_checkout: Path, capsys: Capsys
) -> None:
    fake_engine.image = {"/usr/local/bin/python3": COMPILED}
    done = call(capsys, "certify", FOREIGN)
    assert done.code == 6
    assert f"--accept-python sha256:{DIGEST}" in done.err
    label = tags.label(FOREIGN)
    assert not (small_checkout / "build" / label / "oci").exists()  # said before the layout is written

    assert call(capsys, "certify", FOREIGN, *ACCEPTED).code == 0
    assert len(fake_engine.runs) == 1
    assert call(capsys, "certify", FOREIGN).code == 6  # the accepted run is not used again without it
    assert call(capsys, "certify", FOREIGN, *ACCEPTED).code == 0
    assert len(fake_engine.runs) == 1
    assert call(capsys, "publish", FOREIGN).code == 0
    done = verify(capsys, f"oci:dist:{label}")
    assert done.code == 0
    assert f"whoever certified it accepted /usr/local/bin/python3 (sha256:{DIGEST})" in done.err
    done = verify(capsys, f"oci:dist:{label}", "--packaged-python")
    assert done.code == 7
    assert "belongs to no package" in done.err

    runs = len(fake_engine.runs)
    done = call(capsys, "nightly", "--force")  # what the certificate accepts, a later night accepts too
    assert done.code == 0, done.err
    assert len(fake_engine.runs) > runs
    assert verify(capsys, f"oci:dist:{label}").code == 0
    fake_engine.image = {"/usr/local/bin/python3": COMPILED + b"!"}
    assert "belongs to no package" in call(capsys, "nightly", "--force").err


def test_an_accepted_digest_in_any_spelling_counts_and_a_needless_one_is_said(
    fake_engine: FakeEngine, capsys: Capsys
) -> None:
    fake_engine.image = {"/usr/local/bin/python3": COMPILED}
    other = hashlib.sha256(b"another file").hexdigest()
    done = call(capsys, "test", FOREIGN, "--accept-python", other)
    assert done.code == 6
    assert f"accepted is sha256:{other}, which is none of its files" in done.err
    spellings = (*ACCEPTED, "--accept-python", f"SHA256:{DIGEST.upper()}")
    done = call(capsys, "test", FOREIGN, *spellings)
    assert done.code == 0
    assert "not needed" not in done.err
    done = call(capsys, "test", FOREIGN, *ACCEPTED, "--accept-python", other)
    assert done.code == 0
    assert f"--accept-python sha256:{other} is not needed: no file of the image's Python" in done.err


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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("certify", CPU_STACK, *ACCEPTED), "is for images that were not built here"),
        (("fleet", "run", CPU_STACK, "--nodes", "1", *ACCEPTED), "is for images that were not built here"),
        (("compare", CPU_STACK, AMD_STACK, "--paired", *ACCEPTED), "and the stack rocm"),
        (("compare", FOREIGN, FOREIGN, *ACCEPTED), "is for --paired"),
        (("test", FOREIGN, "--accept-python", DIGEST[:-1]), "takes the SHA-256 of a file"),
        (("test", FOREIGN, "--accept-python", "abc"), "takes the SHA-256 of a file"),
        (("certify", "python3.12-torch"), "add its tag: python3.12-torch:latest"),
    ],
)
def test_a_wrong_argument_about_an_image_names_the_right_one(
    fake_engine: FakeEngine, capsys: Capsys, arguments: tuple[str, ...], says: str
) -> None:
    done = call(capsys, *arguments)
    assert done.code in {2, 3}
    assert says in done.err
    assert fake_engine.runs == []


def test_an_image_for_another_processor_is_refused_before_anything_is_written(
    fake_engine: FakeEngine, small_checkout: Path, capsys: Capsys
) -> None:
    fake_engine.processor = "arm64"
    done = call(capsys, "certify", FOREIGN)
    assert done.code == 4
    assert "the image is for a different processor" in done.err
    assert "docker pull --platform linux/amd64" in done.err
    assert not (small_checkout / "build" / tags.label(FOREIGN)).exists()


@pytest.mark.parametrize("name", ["torch", "numpy"])
def test_an_image_without_what_the_suites_need_is_refused_in_one_sentence(
    fake_engine: FakeEngine, capsys: Capsys, name: str
) -> None:
    (record,) = (each for each in fake_engine.inventory if f"Name: {name}\n" in each.get("head", ""))
    record["head"] = "Name: pillow\nVersion: 12.0"
    done = call(capsys, "certify", FOREIGN)
    assert done.code == 6
    assert f"the image has no {name}" in done.err
    assert done.err.endswith(f"RUN python3 -m pip install {name}\n")
    assert fake_engine.runs == []


def test_an_image_with_torch_for_another_python_is_refused_in_one_sentence(
    fake_engine: FakeEngine, capsys: Capsys
) -> None:
    fake_engine.not_found = ["numpy", "torch"]
    done = call(capsys, "certify", FOREIGN)
    assert done.code == 6
    assert "does not find the installed torch and numpy" in done.err
    assert "ENV PATH=/opt/conda/envs/NAME/bin:$PATH" in done.err
    assert fake_engine.runs == []


def test_an_image_whose_python_only_root_can_start_is_refused_in_one_sentence(
    fake_engine: FakeEngine, capsys: Capsys
) -> None:
    fake_engine.python_says = "exec /root/venv/bin/python3: permission denied"
    done = call(capsys, "certify", FOREIGN)
    assert done.code == 6
    assert "cannot be started by the user who runs the suites" in done.err
    assert fake_engine.python_says in done.err
    assert fake_engine.runs == []


# A name that stands for nothing, or for nothing yet, leads to the command that helps.


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
