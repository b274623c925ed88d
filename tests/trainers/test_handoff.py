"""A job that moves between systems through its checkpoints has the loss curve of the job that stays."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import loss_curve
from conftest import Record
from tools import compare_runs, handoff, launch

TRAINERS = Path(__file__).resolve().parents[2] / "trainers"
ALONE = f"@{sys.executable} {TRAINERS / 'train.py'} --device cpu"
JOB = ("--data", "text", "--global-batch", "8", "--lr", "3e-3", "--phase-limit-s", "100")
TIGHT = "1e-5:1e-3"  # ranks change float32 losses by 1e-6 over these steps
# A system whose restart keeps the weights and forgets AdamW's moments.
FORGETFUL = f"""
import sys
sys.path.insert(0, {str(TRAINERS)!r})
import train
from layouts import fsdp2
restore = fsdp2.Fsdp2.restore
def forget(self, state):
    restore(self, state)
    for moments in self.optimizer.state.values():
        moments["exp_avg"].zero_()
        moments["exp_avg_sq"].zero_()
fsdp2.Fsdp2.restore = forget
sys.exit(train.main(sys.argv[1:]))
"""


TURNS = ("--every", "5", "--band", TIGHT)


def call(program: str, *arguments: str) -> tuple[int, dict, str]:
    """A tool in new processes, as its user starts it."""
    command = [sys.executable, TRAINERS / "tools" / program, *arguments, "--", *JOB]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


def systems(*texts: str) -> list[str]:
    return [word for text in texts for word in ("--system", text)]


Tool = Callable[..., tuple[int, dict, str]]


@pytest.fixture
def forked(forked_runs: None, capsys) -> Tool:  # noqa: ARG001  # it is in place
    """The main function of a tool, whose jobs are forks."""

    def called(main: Callable[[list[str]], int], *arguments: str) -> tuple[int, dict, str]:
        code = main([*arguments, "--", *JOB])
        said = capsys.readouterr()
        return code, json.loads(said.out or "{}"), said.err

    return called


@pytest.fixture(scope="module")
def reference(record: Record, tmp_path_factory) -> Path:
    """The job of ten steps without a break, once for all that is compared with it."""
    found = record(1, "--device", "cpu", *launch.COMPARABLE, *JOB, "--steps", "10")
    curve = loss_curve.reference(found, loss_curve.Band.parse(TIGHT), measured=launch.timestamp())
    path = tmp_path_factory.mktemp("reference") / "curve.json"
    loss_curve.save(curve, path)
    return path


@pytest.mark.slow
def test_one_two_and_four_ranks_take_turns_and_stay_in_the_band(tmp_path):
    turns = systems("one: --ranks 1", "two: --ranks 2", "four: --ranks 4")
    folder = ("--folder", str(tmp_path / "shared"))
    code, result, errors = call("handoff.py", *folder, *TURNS, "--steps", "15", *turns)
    assert code == 0, (result, errors)
    turns = [(part["world_size"], part["first_step"]) for part in result["segments"]]
    assert turns == [(1, 0), (2, 5), (4, 10)]
    assert len(result["losses"]) == 15
    assert result["losses"][-1] < 0.9 * result["losses"][0]


def in_turns(forked: Tool, folder: Path, reference: Path, bad: str) -> tuple[int, dict, str]:
    """Five steps here, and five of another system."""
    flags = ("--folder", str(folder / "shared"), "--reference", str(reference), *TURNS, "--steps", "10")
    return forked(handoff.main, *flags, *systems(f"whole: {ALONE}", f"bad: {bad}"))


@pytest.mark.slow
def test_a_system_that_forgets_the_optimizer_leaves_the_band(tmp_path, reference, forked):
    (tmp_path / "forgetful.py").write_text(FORGETFUL)
    forgetful = f"@{sys.executable} {tmp_path / 'forgetful.py'}"
    code, result, errors = in_turns(forked, tmp_path, reference, forgetful)
    assert code == 1, errors
    assert "outside the band" in result["verdict"]["problems"][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--no-resume", "starts after step 0, not 5"),
        ("--seed 7", "give the same flags, or --changed"),
        ("--seed 7 --changed", "'seed': (1, 7)"),
        ("--size none", "no preset"),
    ],
    ids=["starts afresh", "refuses other data", "other data", "does not run"],
)
def test_a_system_that_does_not_continue_the_job_is_named(flag, says, tmp_path, reference, forked):
    code, _, errors = in_turns(forked, tmp_path, reference, f"{ALONE} {flag}")
    assert code in {1, 2}
    assert says in errors
    assert "Traceback" not in errors


def test_a_used_folder_is_refused(tmp_path):
    (tmp_path / "shared" / "step_00000005").mkdir(parents=True)
    used = ("--folder", str(tmp_path / "shared"), *TURNS, "--steps", "15")
    code, _, errors = call("handoff.py", *used, *systems(f"whole: {ALONE}"))
    assert code == 2
    assert "is not empty" in errors


@pytest.mark.slow
def test_two_precisions_are_compared_step_by_step():
    arms = ("--arm", f"fp32: {ALONE}", "--arm", f"bf16: {ALONE} --precision bf16")
    code, result, errors = call("compare_runs.py", *arms, "--steps", "40", "--band", "2e-3:3e-2")
    assert code == 0, (result, errors)
    assert [arm["precision"] for arm in result["arms"]] == ["fp32", "bf16"]
    assert 0 < result["gap"]["largest"] < 0.03
    assert result["rate_ratio"] > 0


@pytest.mark.slow
def test_an_arm_that_learns_nothing_is_caught(forked):
    arms = ("--arm", f"fp32: {ALONE}", "--arm", f"stuck: {ALONE} --clip 1e-12")
    code, _, errors = forked(compare_runs.main, *arms, "--steps", "20")
    assert code == 2
    assert "'clip': (1.0, 1e-12)" in errors
