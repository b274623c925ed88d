"""Settings of processors: none limits a part alone, none that cannot run passes, and a failure repeats."""

import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest

from by_path import module_at

ROOT = Path(__file__).resolve().parents[3]
# From the plainest to the newest, as ATen's limit and oneDNN's stand beside each other.
RANKS = {"default": 0, "SSE41": 0, "AVX": 1, "avx2": 2, "AVX2": 2, "avx512": 3, "AVX512_CORE": 3}
AMX = {"amx"}  # ATen has no limit of that name: compiled code takes it with avx512
PYTHON = """#!/bin/sh
case "$1" in
-c) echo "torch: 2.0 CPU capability $(echo "$ATEN_CPU_CAPABILITY" | tr a-z A-Z)" ;;
*) {pytest} ;;
esac
"""
# Plant in checks of numbers what is no number: a hang, bytes, a process that dies, a speed.
OF_NO_NUMBER = {"hang", "memory", "process", "training_speed", "whole_run"}
# What pytest reports of one test that passed: a start of the real one takes half a second.
REPORT = '<x><testcase name="test_one"/></x>'
PASSED = f"""for word; do case "$word" in --junit*) echo '{REPORT}' >"${{word#--junitxml=}}" ;; esac; done"""


@pytest.fixture
def program(monkeypatch, tmp_path) -> ModuleType:
    """The program, in a checkout of its own and on a processor with AVX2."""
    module = module_at(ROOT / ".ci" / "processors.py", "processors")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "LOGS", tmp_path / "build" / "logs" / "processors")
    monkeypatch.setattr(module, "flags_of_processor", lambda: ("a processor", module.AVX2 | {"avx"}))
    (tmp_path / "python").write_text(PYTHON.format(pytest=PASSED))
    (tmp_path / "python").chmod(0o755)
    return module


def ended(program: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The exit code of a run of one test."""
    python = str(program.ROOT / "python")
    monkeypatch.setattr(sys, "argv", ["processors.py", "--python", python, *words, "test_it.py"])
    code: int = program.main()
    return code


def test_no_library_may_do_more_than_atens_limit_says(program):
    for setting in program.SETTINGS:
        onednn = setting.onednn.removesuffix("_AMX") if setting.name in AMX else setting.onednn
        assert RANKS[onednn] <= RANKS[setting.aten], setting.name
        assert setting.mkl, setting.name
        assert {*setting.environment(1)} <= {*program.LIMITS, *program.THREADS}
    assert set(program.USUAL) <= {setting.name for setting in program.SETTINGS}


@pytest.mark.parametrize("slow", [False, True])
def test_what_plants_in_a_check_of_numbers_runs_under_every_setting(program, monkeypatch, *, slow):
    monkeypatch.setattr(program, "ROOT", ROOT)
    ran = {word for run in program.parts([], slow=slow) for word in run.words}
    checks = [Path(word).name for word in ran if word.startswith("tests/acceptance/")]
    for path in sorted((ROOT / "tests/faults").glob("test_*_faults.py")):
        text, kind = path.read_text(encoding="utf-8"), path.stem[len("test_") : -len("_faults")]
        if any(f"{check}::" in text for check in checks) and kind not in OF_NO_NUMBER:
            assert f"tests/faults/{path.name}" in ran, path.name


def test_checks_that_record_a_margin_run_under_every_setting(program):
    """Of those that a processor can run: a link joins two GPUs."""
    for path in sorted((ROOT / "tests/acceptance").glob("test_*.py")):
        records = "margins.record(" in path.read_text(encoding="utf-8")
        if records and path.name != "test_devices_links.py":
            assert f"tests/acceptance/{path.name}" in program.SUITES, path.name


def test_limits_from_outside_do_not_mix_with_those_of_a_setting(program, monkeypatch):
    for name in (*program.LIMITS, *program.THREADS):
        monkeypatch.setenv(name, "from outside")
    for setting in program.SETTINGS:
        assert "from outside" not in program.environment(setting, 1).values()


def test_a_setting_that_the_processor_lacks_is_named_and_does_not_pass(program, monkeypatch, capsys):
    assert ended(program, monkeypatch, "--setting", "amx-1") == 1
    said = capsys.readouterr().out
    assert "not on this processor: amx-1 (it lacks amx_bf16" in said
    assert "no setting ran" in said


def test_a_setting_without_effect_fails(program, monkeypatch, capsys):
    text = (program.ROOT / "python").read_text()
    (program.ROOT / "python").write_text(text.replace('$(echo "$ATEN_CPU_CAPABILITY" | tr a-z A-Z)', "AVX2"))
    assert ended(program, monkeypatch, "--setting", "default-1") == 1
    assert "expected CPU capability DEFAULT" in capsys.readouterr().out
    assert ended(program, monkeypatch, "--setting", "avx2-1") == 0


def test_a_failure_prints_the_command_that_repeats_it(program, monkeypatch, capsys):
    (program.ROOT / "test_it.py").write_text("def test_one(): assert False\n")
    real = f'exec {shlex.quote(sys.executable)} "$@"'
    (program.ROOT / "python").write_text(PYTHON.format(pytest=real))
    assert ended(program, monkeypatch, "--setting", "default-2", "--with", "in-image python") == 1
    said = capsys.readouterr().out
    assert "FAILED test_it.py::test_one" in said
    assert "repeat: in-image python .ci/processors.py --setting default-2 test_it.py::test_one" in said


def test_each_kind_of_processor_with_other_vectors_runs_here(program, monkeypatch, capsys):
    for flags, others in (
        (frozenset(), {"default-1"}),
        (program.AVX2, {"default-1"}),
        (program.AVX512, {"default-1", "avx2-2"}),
        (program.AMX, {"default-1", "avx2-2"}),
    ):
        monkeypatch.setattr(program, "flags_of_processor", lambda known=flags: ("a processor", known))
        assert ended(program, monkeypatch) == 0
        said = capsys.readouterr().out
        assert {line.split()[1] for line in said.splitlines() if line.startswith("| ")} == others


def test_only_settings_that_can_run_count(program, monkeypatch, capsys):
    chosen = ("--setting", "default-1", "--setting", "avx2-2", "--setting", "avx512-1")
    assert ended(program, monkeypatch, *chosen) == 0
    assert "2 settings: 2 passed, 0 failed, 0 skipped in" in capsys.readouterr().out
