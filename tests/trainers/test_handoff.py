"""A job that moves between systems through its checkpoints has the loss curve of the job that stays."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TRAINERS = Path(__file__).resolve().parents[2] / "trainers"
ALONE = f"@{sys.executable} {TRAINERS / 'train.py'} --device cpu"
JOB = ("--data", "text", "--global-batch", "8", "--lr", "3e-3", "--phase-limit-s", "100")
GUARD_S = 600  # only for what hangs: eight processes load torch one after the other, on a busy machine
pytestmark = pytest.mark.timeout(GUARD_S + 60)
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


def call(program: str, *arguments: str) -> tuple[int, dict, str]:
    command = [sys.executable, TRAINERS / "tools" / program, *arguments, "--", *JOB]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=GUARD_S)
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


def handoff(folder: Path, *systems: str, every: int = 5, steps: int = 15) -> tuple[int, dict, str]:
    places = [word for text in systems for word in ("--system", text)]
    sizes = ("--every", str(every), "--steps", str(steps), "--band", TIGHT)
    return call("handoff.py", "--folder", str(folder / "shared"), *sizes, *places)


@pytest.mark.slow
def test_one_two_and_four_ranks_take_turns_and_stay_in_the_band(tmp_path: Path) -> None:
    code, result, errors = handoff(tmp_path, "one: --ranks 1", "two: --ranks 2", "four: --ranks 4")
    assert code == 0, (result, errors)
    assert [(part["world_size"], part["first_step"]) for part in result["segments"]] == [
        (1, 0),
        (2, 5),
        (4, 10),
    ]
    assert len(result["losses"]) == 15
    assert result["losses"][-1] < 0.9 * result["losses"][0]


@pytest.mark.slow
def test_a_system_that_forgets_the_optimizer_leaves_the_band(tmp_path: Path) -> None:
    (tmp_path / "forgetful.py").write_text(FORGETFUL)
    code, result, _ = handoff(
        tmp_path, f"whole: {ALONE}", f"bad: @{sys.executable} {tmp_path / 'forgetful.py'}"
    )
    assert code == 1
    assert "outside the band" in result["verdict"]["problems"][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--no-resume", "starts after step 0, not 5"),
        ("--seed 7", "'seed': (1, 7)"),
        ("--size none", "no preset"),
    ],
    ids=["starts afresh", "other data", "does not run"],
)
def test_a_system_that_does_not_continue_the_job_is_named(flag: str, says: str, tmp_path: Path) -> None:
    code, _, errors = handoff(tmp_path, f"whole: {ALONE}", f"bad: {ALONE} {flag}", steps=10)
    assert code in {1, 2}
    assert says in errors
    assert "Traceback" not in errors


def test_a_used_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shared" / "step_00000005").mkdir(parents=True)
    code, _, errors = handoff(tmp_path, f"whole: {ALONE}")
    assert code == 2
    assert "is not empty" in errors


@pytest.mark.slow
def test_two_precisions_are_compared_step_by_step() -> None:
    arms = ("--arm", f"fp32: {ALONE}", "--arm", f"bf16: {ALONE} --precision bf16")
    code, result, errors = call("compare_runs.py", *arms, "--steps", "40", "--band", "2e-3:3e-2")
    assert code == 0, (result, errors)
    assert [arm["precision"] for arm in result["arms"]] == ["fp32", "bf16"]
    assert 0 < result["gap"]["largest"] < 0.03
    assert result["rate_ratio"] > 0


@pytest.mark.slow
def test_an_arm_that_learns_nothing_is_caught() -> None:
    arms = ("--arm", f"fp32: {ALONE}", "--arm", f"stuck: {ALONE} --clip 1e-12")
    code, _, errors = call("compare_runs.py", *arms, "--steps", "20")
    assert code == 2
    assert "'clip': (1.0, 1e-12)" in errors
