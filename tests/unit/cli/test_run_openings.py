"""What `run` opens, what it refuses, and which devices a job sees."""

import errno
import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from small_checkout import call
from stackcheck import vendors
from stackcheck.cli import consumer, run
from stackcheck.errors import ConfigurationError, FileError, StackcheckError


@pytest.mark.parametrize(
    ("vendor", "asked", "environ", "seen"),
    [
        ("nvidia", None, {}, {}),
        ("nvidia", None, {"CUDA_VISIBLE_DEVICES": "2,3"}, {"CUDA_VISIBLE_DEVICES": "2,3"}),
        ("amd", None, {"HIP_VISIBLE_DEVICES": "1"}, {"HIP_VISIBLE_DEVICES": "1"}),
        ("amd", None, {"ROCR_VISIBLE_DEVICES": "5"}, {"ROCR_VISIBLE_DEVICES": "5"}),
        # Slurm counts its own variable within the job where cgroups hide the other GPUs.
        (
            "nvidia",
            None,
            {"SLURM_JOB_GPUS": "4,5", "CUDA_VISIBLE_DEVICES": "0,1"},
            {"CUDA_VISIBLE_DEVICES": "4,5"},
        ),
        (
            "amd",
            None,
            {"SLURM_JOB_GPUS": "4,5", "SLURM_STEP_GPUS": "5", "ROCR_VISIBLE_DEVICES": "0"},
            {"ROCR_VISIBLE_DEVICES": "5"},
        ),
        ("nvidia", "all", {"SLURM_STEP_GPUS": "6"}, {"CUDA_VISIBLE_DEVICES": "6"}),
        ("nvidia", "2", {}, {"CUDA_VISIBLE_DEVICES": "0,1"}),
        ("nvidia", "1", {"CUDA_VISIBLE_DEVICES": "2,3"}, {"CUDA_VISIBLE_DEVICES": "2"}),
        ("nvidia", "device=3", {"SLURM_JOB_GPUS": "2,3"}, {"CUDA_VISIBLE_DEVICES": "3"}),
        ("amd", "0,3", {}, {"ROCR_VISIBLE_DEVICES": "0,3"}),
        ("cpu", "2", {"CUDA_VISIBLE_DEVICES": "1"}, {}),
    ],
)
def test_a_job_sees_the_devices_of_its_shell_or_slurm_job_and_no_others(
    monkeypatch, vendor, asked, environ, seen
):
    for name in ("amd", "nvidia"):
        monkeypatch.setattr(vendors.module(name), "devices", lambda: tuple(range(4)))
    assert vendors.chosen_devices(vendor, asked, environ) == seen


@pytest.mark.parametrize("asked", ["5", "4", "device=9", "0,9", "GPU-other", ""])
def test_more_than_a_process_has_is_not_given(monkeypatch, asked):
    monkeypatch.setattr(vendors.module("nvidia"), "devices", lambda: tuple(range(8)))
    with pytest.raises(ConfigurationError, match="more GPUs are asked for"):
        vendors.chosen_devices("nvidia", asked, {"SLURM_JOB_GPUS": "1,2,3"})


def test_variables_come_from_files_then_from_options_and_only_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", {"HERE": "of the shell", "SECRET": "x"})
    file = tmp_path / "vars"
    file.write_text("# words\n\nA=1=2\nB=of the file\nHERE\nABSENT\n")
    found = run._variables(["B=", "C=a b"], [file])
    assert found == {"A": "1=2", "B": "", "HERE": "of the shell", "C": "a b"}
    for wrong in ("=x", "A B=1", ""):
        with pytest.raises(ConfigurationError, match="no variable"):
            run._variables([wrong], [])
    with pytest.raises(FileError):
        run._variables([], [tmp_path / "absent"])


def test_a_volume_is_something_that_is_there_at_a_whole_path(tmp_path):
    mount = run._volume(f"{tmp_path}:/data:ro")
    assert (mount.source, mount.target, mount.read_only) == (tmp_path, "/data", True)
    assert not run._volume(f"{tmp_path}:/data").read_only
    for wrong in (
        *(f"{tmp_path}/absent:/x", f"{tmp_path}", f"{tmp_path}:x", f"{tmp_path}:/", f"{tmp_path}:/a/../b"),
        *(f"{tmp_path}:/x:rx", ":/x", f"{tmp_path}:"),
    ):
        with pytest.raises(ConfigurationError):
            run._volume(wrong)


@pytest.mark.parametrize(
    ("text", "size"),
    [("512m", 512 << 20), ("16g", 16 << 30), ("16GB", 16 << 30), ("1024", 1024), ("1k", 1024)],
)
def test_a_size_is_read_as_docker_reads_it(text, size):
    assert run._bytes(text) == size


@pytest.mark.parametrize("text", ["", "g", "-1g", "1.5g", "0", "1x", "1 g", "16gg"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigurationError, match="no size"):
        run._bytes(text)


@pytest.mark.parametrize("text", ["root", "0:root", "1000:", ":5", "-1", "1 2"])
def test_a_user_is_a_number(text):
    assert run._user("1000:44") == "1000:44"
    with pytest.raises(ConfigurationError, match="a user is a number"):
        run._user(text)


@pytest.mark.parametrize("kind", [*StackcheckError.__subclasses__(), OSError])
def test_each_error_of_ours_has_the_one_code_that_no_program_is_taken_for(kind, capsys, monkeypatch):
    error = OSError(errno.ENOSPC, "full") if kind is OSError else kind.__new__(kind)
    if isinstance(error, StackcheckError):
        StackcheckError.__init__(error, "what is wrong", next_step="do this")
    monkeypatch.setattr(consumer.key_sources, "public", mock.Mock(side_effect=error))
    done = call(capsys, "run", "oci:dist:x", "--", "true")
    assert done.code == 125
    assert "next: " in done.err


def test_without_gpus_a_job_gets_no_node_of_a_gpu(monkeypatch):
    from stackcheck.certificate import job, pull
    from stackcheck.engine import client

    given: list[Any] = []
    monkeypatch.setattr(client.Engine, "connect", lambda: None)
    monkeypatch.setattr(pull, "pull", lambda *_a, **_k: "name")
    monkeypatch.setattr(job, "run", lambda *_a, needs, **_k: given.append(needs.devices) or 0)
    for name in ("amd", "nvidia", "cpu"):
        needs = vendors.ContainerNeeds(remark="", devices=() if name == "cpu" else ("/dev/gpu",))
        monkeypatch.setattr(vendors.module(name), "container_needs", lambda needs=needs: needs)
    verified: Any = SimpleNamespace(facts={"host": {"vendor": "amd"}})
    for without in (False, True):
        run._run(verified, ["x"], run.Openings(), without_gpus=without, plain_http=False)
    assert given == [("/dev/gpu",), ()]
